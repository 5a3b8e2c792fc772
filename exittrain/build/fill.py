"""A fixed shape filled level by level, all contexts at once: the one engine of `static` and the sampled builders.

Shapes: B contexts, N+1 places of the shape with the root, W nodes of a wave, n children below it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.build.base import Draft, DraftSession
from exittrain.tree.batch import TreeBatch

Path = tuple[int, ...]  # a node as the ranks of the tokens down to it: (0, 2) is the first child's third child


@dataclass(frozen=True, eq=False)
class Wave:
    """What is filled at once: the children of the W nodes of one level that have any.

    nodes [W] and children [n]: places in the shape; rows [n]: which of the W nodes is each child's parent; ranks [n];
    in_use [B, W] bool: nodes that exist (the log-probabilities of the others are unspecified).
    """

    nodes: list[int]
    children: list[int]
    rows: list[int]
    ranks: list[int]
    in_use: Tensor


# (log-probabilities [B, W, V], wave) -> tokens [B, n] and their log-probabilities [B, n]; -inf: there is no such child.
Fill = Callable[[Tensor, Wave], tuple[Tensor, Tensor]]


def fill_shape(session: DraftSession, paths: Sequence[Path], drawn: str, fill: Fill) -> tuple[Draft, Tensor]:
    """Trees of one shape, one a context; a child that `fill` does not find is left out, with all below it.

    paths: the shape, root () first, then level by level. Also returns places [B, M]: each node's place in the shape, -1
    where padded.
    """
    place = {path: index for index, path in enumerate(paths)}
    parents = [-1, *(place[path[:-1]] for path in paths[1:])]
    roots = session.root_tokens
    device, size, inner = roots.device, (len(roots), len(paths)), set(parents)
    tokens, scores = torch.zeros(size, dtype=torch.int64, device=device), torch.zeros(size, device=device)
    valid = torch.zeros(size, dtype=torch.bool, device=device)
    tokens[:, 0], valid[:, 0] = roots, True
    slots = torch.where(valid, 0, -1)
    nodes, logprobs, seen = [0], session.root()[:, None], 0
    for level in range(1, len(paths[-1]) + 1):
        new = [index for index, path in enumerate(paths) if len(path) == level]
        above = [parents[index] for index in new]
        row_of = {node: row for row, node in enumerate(nodes)}
        ranks = [paths[index][-1] for index in new]
        wave = Wave(nodes, new, [row_of[node] for node in above], ranks, valid[:, nodes])
        tokens[:, new], scores[:, new] = fill(logprobs, wave)
        valid[:, new] = valid[:, above] & (scores[:, new] > -torch.inf)
        nodes = [index for index in new if index in inner]
        if nodes:
            parent_slots = slots[:, [parents[node] for node in nodes]].clamp(min=0)
            logprobs = session.expand(parent_slots, tokens[:, nodes], valid[:, nodes])
            wave_slots = torch.arange(seen + 1, seen + len(nodes) + 1, device=device)
            slots[:, nodes] = torch.where(valid[:, nodes], wave_slots, -1)
            seen += len(nodes)
    links = torch.tensor(parents, device=device).expand(size)
    depths = torch.tensor([len(path) for path in paths], device=device).expand(size)
    return Draft(TreeBatch(tokens, links, depths, valid, drawn, scores), slots).keep(valid)
