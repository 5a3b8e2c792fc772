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


@dataclass(frozen=True, eq=False)
class FixedExits:
    """exits w(v) [B, M'] float64; kept [B, M']: each node's column in the trees given (0 where padded).

    rows [P, V]: log-weights of the nodes with children, their children's tokens at -inf; row_of [B, M']: each node's
    row among them (-1: a leaf).
    """

    exits: Tensor
    kept: Tensor
    row_of: Tensor
    rows: Tensor


def fixed_exits(trees: TreeBatch, target_logits: Tensor, sampling: Sampling) -> FixedExits:
    """From raw target_logits [B, M, V]. Only rows of nodes with children are read, and each is summed once.

    The miss is what the row still holds without its children, over the whole: no 1 - sum, so it is exactly 0 where the
    children carry everything, however the logits were rounded.
    """
    trees, columns = merge_batch(trees)
    kept = columns.clamp(min=0)
    tree, node = trees.has_children().nonzero(as_tuple=True)
    row_of = torch.full_like(trees.parents, -1)
    row_of[tree, node] = torch.arange(len(tree), device=row_of.device)
    child_tree, child = (trees.depths > 0).nonzero(as_tuple=True)
    row, token = row_of[child_tree, trees.parents[child_tree, child]], trees.token_ids[child_tree, child]
    # A batch of bare roots has no row to process, but one must exist to be indexed.
    rows = log_weights(target_logits[tree, kept[tree, node]], sampling) if len(tree) else target_logits[:1, 0].float()
    carried = rows[row, token].double().exp()
    rows[row, token] = -torch.inf
    left = rows.exp().sum(-1, dtype=torch.float64)
    whole = left.index_add(0, row, carried)
    edges = torch.zeros(trees.parents.shape, dtype=torch.float64, device=rows.device)
    edges[child_tree, child] = carried / whole[row]
    miss = trees.valid.double()
    miss[tree, node] = (left / whole)[: len(tree)]
    return FixedExits(reach_by_level(trees, edges) * miss, kept, row_of, rows)
