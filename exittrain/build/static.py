"""Static trees: a fixed shape, filled with the drafter's top-ranked tokens (math.md section 6)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from exittrain.build.base import Draft, DraftSession, TreeShape
from exittrain.build.fill import Path as Path
from exittrain.build.fill import Wave, fill_shape
from exittrain.errors import InputError
from exittrain.law.ranking import top_tokens

# EAGLE's sparse tree: 25 nodes, depth 5 (`mc_sim_7b_63` in the official code, whatever its name says).
EAGLE: tuple[Path, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


def build_static(session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None) -> Draft:
    """Every context gets the same shape (`rank_paths`); a rank whose token has no probability is left out, with all
    below it. Nodes come level by level, by rank path. Raises InputError as `rank_paths` does.
    """
    draft, _ = fill_shape(session, rank_paths(shape), "top", _best_ranked)
    return draft


def _best_ranked(logprobs: Tensor, wave: Wave) -> tuple[Tensor, Tensor]:
    values, ids = top_tokens(logprobs, max(wave.ranks) + 1)
    ranks = [min(rank, values.shape[-1]) for rank in wave.ranks]  # the extra last column: no such rank
    tokens = torch.nn.functional.pad(ids, (0, 1))[:, wave.rows, ranks]
    return tokens, torch.nn.functional.pad(values, (0, 1), value=-torch.inf)[:, wave.rows, ranks]


def rank_paths(shape: TreeShape) -> list[Path]:
    """The shape as rank paths, the root () first, then level by level, by path.

    shape.branching: "chain"; "2-ary", "3-ary", ... (complete levels until budget or depth is full); "eagle"; or a
    list of rank paths such as [[0], [1], [0, 0]]. shape.width is not used. Raises InputError on an unknown form, a path
    whose parent is missing, a list that exceeds the budget or the depth.
    """
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
        paths += [(*path, rank) for rank in range(min(arity, shape.budget + 1 - len(paths)))]
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
