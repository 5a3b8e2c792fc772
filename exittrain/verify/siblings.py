"""Trees cut into groups that can be handled at once: the children of one rank at one depth, all trees side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.tree.batch import TreeBatch


@dataclass(frozen=True, eq=False)
class Siblings:
    """nodes, parents [n]: flat indices (tree * M + column), no parent twice; last [n] bool: no sibling comes after."""

    nodes: Tensor
    parents: Tensor
    last: Tensor


def sibling_levels(trees: TreeBatch) -> list[list[Siblings]]:
    """By depth (1 first), then by rank in draft order. A level's first group has every parent of the level."""
    width = trees.parents.shape[1]
    tree, column = (trees.depths > 0).nonzero(as_tuple=True)
    if not len(tree):
        return []
    nodes, parents = tree * width + column, tree * width + trees.parents[tree, column]
    rank = _ranks(parents)
    last = rank + 1 == trees.child_counts().flatten()[parents]
    ranks = int(rank.max()) + 1
    key = (trees.depths[tree, column] - 1) * ranks + rank
    order = key.argsort(stable=True)
    sizes = torch.bincount(key, minlength=trees.max_depth * ranks).tolist()
    parts = zip(*(torch.split(values[order], sizes) for values in (nodes, parents, last)), strict=True)
    groups = [Siblings(*part) for part in parts]
    levels = [groups[start : start + ranks] for start in range(0, len(groups), ranks)]
    return [[group for group in level if len(group.nodes)] for level in levels]


def _ranks(parents: Tensor) -> Tensor:
    """How many earlier entries name the same parent [n]."""
    order = parents.argsort(stable=True)
    together = parents[order].contiguous()
    rank = torch.empty_like(parents)
    rank[order] = torch.arange(len(parents), device=parents.device) - torch.searchsorted(together, together)
    return rank
