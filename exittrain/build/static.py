"""Static trees: a fixed shape, filled with the drafter's top-ranked tokens (math.md section 6)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from exittrain.build.base import Draft, DraftSession, TreeShape
from exittrain.errors import InputError
from exittrain.law.ranking import top_tokens
from exittrain.tree.batch import TreeBatch

Path = tuple[int, ...]  # a node as the ranks of the tokens down to it: (0, 2) is the best token's third-best child

# EAGLE's sparse tree: 25 nodes, depth 5 (`mc_sim_7b_63` in the official code, whatever its name says).
EAGLE: tuple[Path, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


def build_static(
    session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None
) -> Draft:
    """Every context gets the same shape; a rank whose token has no probability is left out, with all below it.

    shape.branching: "chain"; "2-ary", "3-ary", ... (complete levels until budget or depth is full); "eagle"; or a
    list of rank paths such as [[0], [1], [0, 0]]. Nodes come level by level, by rank path. shape.width is not used.
    Raises InputError on an unknown form, a path whose parent is missing, a list that exceeds the budget or the depth.
    """
    paths = rank_paths(shape)
    parents = _parent_columns(paths)
    depths = torch.tensor([len(path) for path in paths])
    inner = torch.zeros(len(paths), dtype=torch.bool).index_fill(0, torch.tensor(parents[1:]), True)
    roots = session.root_tokens
    size = (len(roots), len(paths))
    tokens = torch.zeros(size, dtype=torch.int64, device=roots.device)
    scores = torch.zeros(size, device=roots.device)
    tokens[:, 0] = roots
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    valid[:, 0] = True
    slots = torch.where(valid, 0, -1)
    wave, logprobs, seen = [0], session.root()[:, None], 0
    for level in range(1, int(depths.max()) + 1):
        new = (depths == level).nonzero().flatten().tolist()
        rows = [wave.index(parents[node]) for node in new]
        ranks = [paths[node][-1] for node in new]
        values, ids = top_tokens(logprobs, max(ranks) + 1)
        ranks = [min(rank, values.shape[-1]) for rank in ranks]  # the extra last column: no such rank
        values = torch.nn.functional.pad(values, (0, 1), value=-torch.inf)[:, rows, ranks]
        valid[:, new] = valid[:, [parents[node] for node in new]] & (values > -torch.inf)
        tokens[:, new] = torch.nn.functional.pad(ids, (0, 1))[:, rows, ranks]
        scores[:, new] = values
        wave = [node for node in new if inner[node]]
        if wave:
            logprobs = session.expand(
                slots[:, [parents[n] for n in wave]].clamp(min=0), tokens[:, wave], valid[:, wave]
            )
            places = torch.arange(seen + 1, seen + len(wave) + 1, device=roots.device)
            slots[:, wave] = torch.where(valid[:, wave], places, -1)
            seen += len(wave)
    return _compact(tokens, torch.tensor(parents, device=roots.device), depths.to(roots.device), valid, scores, slots)


def rank_paths(shape: TreeShape) -> list[Path]:
    """The shape as rank paths, the root () first, then level by level."""
    branching = shape.branching
    if not isinstance(branching, str):
        return _fitting([tuple(path) for path in branching], shape, "this static shape")
    if branching == "eagle":
        return _fitting(EAGLE, shape, "EAGLE's tree")
    match = re.fullmatch(r"([1-9]\d*)-ary", branching)
    if branching != "chain" and not match:
        raise InputError(
            f"no static shape {branching!r}; use 'chain', '2-ary', 'eagle' or rank paths such as [[0], [0, 0]]"
        )
    arity = int(match[1]) if match else 1
    paths: list[Path] = [()]
    for path in paths:  # grows while it is read: breadth first
        if len(path) == shape.depth:
            break
        paths += [(*path, rank) for rank in range(arity)][: shape.budget + 1 - len(paths)]
    return paths


def _fitting(paths: Sequence[Path], shape: TreeShape, name: str) -> list[Path]:
    ordered = [(), *sorted(set(paths) - {()}, key=lambda path: (len(path), path))]
    if len(ordered) == 1:
        raise InputError("a static shape needs at least one rank path, such as [[0]]")
    for path in ordered[1:]:
        if path[:-1] not in ordered or any(type(rank) is not int or rank < 0 for rank in path):
            raise InputError(f"static shape: {list(path)} needs its parent {list(path[:-1])} and ranks from 0 up")
    depth = len(ordered[-1])
    if len(ordered) - 1 > shape.budget or depth > shape.depth:
        raise InputError(
            f"{name} has {len(ordered) - 1} nodes and depth {depth}; set tree.budget and tree.depth to at least that "
            f"(they are {shape.budget} and {shape.depth})"
        )
    return ordered


def _parent_columns(paths: list[Path]) -> list[int]:
    column = {path: index for index, path in enumerate(paths)}
    return [-1] + [column[path[:-1]] for path in paths[1:]]


def _compact(tokens: Tensor, parents: Tensor, depths: Tensor, valid: Tensor, scores: Tensor, slots: Tensor) -> Draft:
    """Left-over nodes moved together: columns keep their order, parents are renumbered, padding is zeroed."""
    order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    new_column = valid.cumsum(1) - 1
    size = int(valid.sum(1).max())
    order = order[:, :size]
    kept = valid.gather(1, order)
    links = parents.expand_as(tokens).gather(1, order)
    links = torch.where(links < 0, -1, new_column.gather(1, links.clamp(min=0)))
    trees = TreeBatch(
        torch.where(kept, tokens.gather(1, order), 0),
        torch.where(kept, links, 0),
        torch.where(kept, depths.expand_as(tokens).gather(1, order), 0),
        kept,
        drawn="top",
        draft_logprobs=torch.where(kept, scores.gather(1, order), 0.0),
    )
    return Draft(trees, torch.where(kept, slots.gather(1, order), -1))
