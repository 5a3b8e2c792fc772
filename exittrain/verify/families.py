"""Trees cut into levels of families, parents with their children in draft order, all trees side by side.

On the host: a level has few numbers and many steps. Nodes are flat indices tree * M + column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exittrain.tree.batch import TreeBatch

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Families:
    """parents [R] of one depth, in rising order; children [R, K]: theirs by rank, -1 where there are fewer than K."""

    parents: Indices
    children: Indices


def families(trees: TreeBatch) -> list[Families]:
    """By depth of the parents, the roots first."""
    width = trees.parents.shape[1]
    columns, depths = trees.parents.cpu().numpy(), trees.depths.cpu().numpy()
    nodes = np.flatnonzero(depths)
    own = nodes // width * width + columns.flat[nodes]
    order = np.argsort(own, kind="stable")  # siblings side by side, draft order kept
    nodes = nodes[order]
    parents, first, counts = np.unique(own[order], return_index=True, return_counts=True)
    table = np.full((len(parents), counts.max(initial=0)), -1)
    table[np.repeat(np.arange(len(parents)), counts), np.arange(len(nodes)) - np.repeat(first, counts)] = nodes
    levels = depths.flat[parents]
    return [
        Families(parents[here], table[here][:, : counts[here].max()])
        for here in (levels == depth for depth in range(int(levels.max(initial=-1)) + 1))
    ]
