"""The exit law of a fixed tree from raw logits, all trees side by side: `tev`'s, and so every fixed verifier's.

Shapes: B trees, M = N+1 nodes with the root (padded), M' the same after twins were merged, P nodes with children over
all trees, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.law.exit_law import reach_by_level
from exittrain.law.sampling import Sampling, log_weights
from exittrain.tree.batch import TreeBatch
from exittrain.tree.merge import merge_batch

ELEMENTS = {"cpu": 1 << 18}  # of the rows processed at once: what a core's cache holds of a temporary
MANY_ELEMENTS = 1 << 24  # elsewhere


@dataclass(frozen=True, eq=False)
class FixedExits:
    """exits w(v) [B, M'] float64 of the merged trees; kept [B, M']: each node's column in the trees given (0 where
    padded)."""

    trees: TreeBatch
    exits: Tensor
    kept: Tensor


def fixed_exits(trees: TreeBatch, target_logits: Tensor, sampling: Sampling) -> FixedExits:
    """From raw target_logits [B, M, V]. Only rows of nodes with children are read, each once, a few at a time: nothing
    V-sized outlives its turn.

    The miss is what the row still holds without its children, over the whole: no 1 - sum, so it is exactly 0 where the
    children carry everything, however the logits were rounded.
    """
    trees, columns = merge_batch(trees)
    kept = columns.clamp(min=0)
    tree, node = trees.has_children().nonzero(as_tuple=True)
    row_of = torch.full_like(trees.parents, -1)
    row_of[tree, node] = torch.arange(len(tree), device=row_of.device)
    child_tree, child = (trees.depths > 0).nonzero(as_tuple=True)
    row = row_of[child_tree, trees.parents[child_tree, child]]
    order = row.argsort(stable=True)
    tree_of, child_of, row = child_tree[order], child[order], row[order]
    carried, left = _sums(target_logits, sampling, tree, kept[tree, node], row, trees.token_ids[tree_of, child_of])
    whole = left.index_add(0, row, carried)
    edges = torch.zeros(trees.parents.shape, dtype=torch.float64, device=left.device)
    edges[tree_of, child_of] = carried / whole[row]
    miss = trees.valid.double()
    miss[tree, node] = left / whole
    return FixedExits(trees, reach_by_level(trees, edges) * miss, kept)


def rows_left(law: FixedExits, nodes: Tensor, target_logits: Tensor, sampling: Sampling) -> Tensor:
    """Weights [B, V] float64 of the bonus at node nodes[b] of each merged tree: its row without its own children."""
    at = torch.arange(len(nodes), device=nodes.device)
    weights = log_weights(target_logits[at, law.kept[at, nodes]], sampling).exp_().double()
    tree, child = ((law.trees.parents == nodes[:, None]) & (law.trees.depths > 0)).nonzero(as_tuple=True)
    weights[tree, law.trees.token_ids[tree, child]] = 0
    return weights


def _sums(
    logits: Tensor, sampling: Sampling, tree: Tensor, node: Tensor, row: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the P rows logits[tree, node]: each child's weight (children by row, ascending; their tokens), and what each
    row holds besides, [P]; float64."""
    carried = torch.empty(len(row), dtype=torch.float64, device=logits.device)
    left = torch.empty(len(tree), dtype=torch.float64, device=logits.device)
    step = max(1, ELEMENTS.get(logits.device.type, MANY_ELEMENTS) // logits.shape[-1])
    starts = torch.arange(0, len(tree) + step, step, device=logits.device)
    bounds = torch.searchsorted(row, starts).tolist()
    for first, last, start in zip(bounds, bounds[1:], range(0, len(tree), step), strict=False):
        part = slice(start, start + step)
        weights = log_weights(logits[tree[part], node[part]], sampling).exp_()
        place = row[first:last] - start, token[first:last]
        carried[first:last] = weights[place].double()
        weights[place] = 0
        left[part] = weights.sum(-1, dtype=torch.float64)
    return carried, left
