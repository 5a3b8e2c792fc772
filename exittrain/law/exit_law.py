"""The exit law: where the target's own continuation leaves a fixed tree (math.md section 2; ExitTrain, TEV).

Shapes: B trees, N drafted nodes, M = N+1 nodes with the root (padded in a batch), V vocabulary. Float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.probabilities import checked_rows
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins

SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class ExitLaw:
    """reach P(v), miss rho(v), exit w(v) = P(v) rho(v): [N+1], or [B, M] with 0 where padded; float64.

    coverage: sum of reach over drafted nodes, 0-dimensional or [B]. 1 + coverage is the expected block length.
    """

    reach: Tensor
    miss: Tensor
    exit: Tensor
    coverage: Tensor


def exit_law(tree: DraftTree, target_probs: Any) -> ExitLaw:
    """The exit law of one tree from target_probs [N+1, V] (row i: the target's next token at node i).

    Twins of an i.i.d. tree count once: the later ones get zeros, their children count under the first.
    Raises InputError as `checked_rows` does.
    """
    merged, kept = merge_twins(tree)
    rows = torch.from_numpy(checked_rows(tree, target_probs).astype("float64"))[kept]
    parents, tokens = merged.parents[1:], merged.token_ids[1:]
    edges = torch.ones(len(kept), dtype=torch.float64)
    edges[1:] = rows[parents, tokens]
    # What is left after the children are taken out, summed: no cancellation, and exactly 0 where they carry everything.
    rows[parents, tokens] = 0.0
    law = _law(TreeBatch.from_trees([merged]), edges[None], rows.sum(1)[None])
    reach, miss, exit_ = (
        torch.zeros(tree.num_nodes + 1, dtype=torch.float64).index_copy(0, kept, part[0])
        for part in (law.reach, law.miss, law.exit)
    )
    return ExitLaw(reach, miss, exit_, law.coverage[0])


def batch_exit_law(trees: TreeBatch, edge_logprobs: Tensor) -> ExitLaw:
    """The exit laws of B trees, level by level, from edge_logprobs [B, M]: log p_par(v)(x_v), see `edge_logprobs`.

    Raises InputError when a tree's exits do not sum to one within 1e-6: its log-probabilities are no distribution, or
    siblings repeat a token.
    """
    edges, parents = torch.where(trees.valid, edge_logprobs.double().exp(), 0.0), trees.parent_index()
    taken = torch.zeros_like(edges).scatter_add(1, parents, torch.where(trees.depths > 0, edges, 0.0))
    # Children that carry everything may sum to a rounding more than one: shared out, or it would add up with depth.
    excess = torch.where(taken <= 1 + SUM_TOLERANCE, taken.clamp(min=1), 1.0)
    return _law(trees, edges / excess.gather(1, parents), (1 - taken).clamp(0, 1))


def edge_logprobs(trees: TreeBatch, logprobs: Tensor) -> Tensor:
    """[B, M] float64: log p of each drafted node at its parent's row of logprobs [B, M, V]; 0 at root and padding."""
    rows = torch.arange(len(trees), device=logprobs.device)[:, None]
    drafted = trees.depths > 0
    picked = logprobs[rows, trees.parent_index(), torch.where(drafted, trees.token_ids, 0)].double()
    return torch.where(drafted, picked, 0.0)


def reach_by_level(trees: TreeBatch, edges: Tensor) -> Tensor:
    """P(v) [B, M] from edge probabilities [B, M]: one multiplication a level, all trees side by side."""
    reach = (trees.valid & (trees.depths == 0)).to(edges.dtype)
    for depth in range(1, trees.max_depth + 1):
        reach = torch.where(trees.depths == depth, reach.gather(1, trees.parent_index()) * edges, reach)
    return reach


def _law(trees: TreeBatch, edges: Tensor, miss: Tensor) -> ExitLaw:
    reach = reach_by_level(trees, edges)
    miss = torch.where(trees.valid, miss, 0.0)
    exit_ = reach * miss
    total = exit_.sum(1)
    wrong = ~((total - 1).abs() <= SUM_TOLERANCE)  # written so that NaN is wrong too
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"the exits of tree {row} sum to {float(total[row]):.9g}, not 1: its log-probabilities are no "
            "distribution, or siblings repeat a token"
        )
    return ExitLaw(reach, miss, exit_, torch.where(trees.depths > 0, reach, 0.0).sum(1))
