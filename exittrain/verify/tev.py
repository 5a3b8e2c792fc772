"""`tev`: one draw of the exit node, one draw of the bonus, no walk (tree-exit verification; math.md section 2).

Shapes: B trees, M = N+1 nodes with the root (padded), P nodes with children over all trees, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exittrain.law.exit_law import reach_by_level
from exittrain.law.probabilities import Rows
from exittrain.law.sampling import Sampling, log_weights
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins
from exittrain.verify.base import BatchVerdict, Generators
from exittrain.verify.fixed import Exit, FixedVerifier, RowReader, Uniform, pick


class Tev(FixedVerifier):
    """Exit v with w(v) = P(v) rho(v), then the bonus from p_v without v's children."""

    name = "tev"

    def exits(self, tree: DraftTree, rows: Rows) -> Iterator[Exit]:
        reach, left, miss = _node_terms(tree, rows)
        for node in np.flatnonzero(reach * miss):
            yield Exit(int(node), reach[node] * miss[node], left[node] / miss[node])

    def draw(self, tree: DraftTree, rows: RowReader, uniform: Uniform) -> tuple[int, int]:
        reach, left, miss = _node_terms(tree, np.stack([rows[node] for node in range(tree.num_nodes + 1)]))
        node = pick(reach * miss, uniform())
        return node, pick(left[node], uniform())

    def verify_batch(
        self,
        trees: TreeBatch,
        target_logits: Tensor,
        sampling: Sampling,
        generators: Generators,
        draft_rows: DraftRows | None = None,
    ) -> BatchVerdict:
        """All trees at once. Only rows of nodes with children are summed, only the exits' rows drawn from."""
        self.check(trees.drawn)
        if trees.drawn == "iid":
            return self._verify_merged(trees, target_logits, sampling, generators)
        draws = _uniforms(len(trees), generators, sampling).to(target_logits.device)
        edges, miss, row_of, rows = _edges(trees, target_logits, sampling)
        exits = reach_by_level(trees, edges) * miss
        nodes = pick_rows(exits, draws[:, 0])
        at = torch.arange(len(trees), device=nodes.device)
        row = row_of[at, nodes]
        leaf = (row < 0).nonzero().flatten()
        chosen = rows[row]  # children already taken out
        chosen[leaf] = log_weights(target_logits[leaf, nodes[leaf]], sampling).to(chosen.dtype)
        weights = (chosen - chosen.amax(-1, keepdim=True)).exp().double()
        return BatchVerdict(nodes, pick_rows(weights, draws[:, 1]))

    def _verify_merged(
        self, trees: TreeBatch, target_logits: Tensor, sampling: Sampling, generators: Generators
    ) -> BatchVerdict:
        """Twins merged, then as above; nodes are numbered as in the trees given."""
        pairs = [merge_twins(tree) for tree in trees.trees()]
        kept = torch.nn.utils.rnn.pad_sequence([index for _, index in pairs], batch_first=True)
        single = [DraftTree(tree.token_ids, tree.parents) for tree, _ in pairs]
        kept = kept.to(target_logits.device)
        at = torch.arange(len(trees), device=kept.device)
        verdict = self.verify_batch(
            TreeBatch.from_trees(single, kept.device), target_logits[at[:, None], kept], sampling, generators
        )
        return BatchVerdict(kept[at, verdict.nodes], verdict.bonus_tokens)


def _node_terms(tree: DraftTree, rows: Rows) -> tuple[Rows, Rows, Rows]:
    """reach [N+1], rows without the children [N+1, V], and what they sum to (the miss) [N+1], of one tree."""
    parents, tokens = tree.parents.numpy()[1:], tree.token_ids.numpy()[1:]
    reach: list[Any] = [1]
    for parent, edge in zip(parents, rows[parents, tokens], strict=True):
        reach.append(reach[parent] * edge)
    left = rows.copy()
    left[parents, tokens] = 0
    return np.array(reach, dtype=rows.dtype), left, left.sum(axis=1)


def _edges(trees: TreeBatch, target_logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Edge probabilities and miss [B, M] float64, each node's row among the P processed ones [B, M] (-1: a leaf), and
    those rows [P, V]: log-weights with the children's tokens at -inf.

    The miss is what the row still holds without its children, over the whole: no 1 - sum, so it is exactly 0 where the
    children carry everything, however the logits were rounded.
    """
    tree, node = trees.has_children().nonzero(as_tuple=True)
    row_of = torch.full_like(trees.parents, -1)
    row_of[tree, node] = torch.arange(len(tree), device=row_of.device)
    child_tree, child = (trees.depths > 0).nonzero(as_tuple=True)
    row, token = row_of[child_tree, trees.parents[child_tree, child]], trees.token_ids[child_tree, child]
    # A batch of bare roots has no row to process, but one must exist to be indexed.
    rows = log_weights(target_logits[tree, node], sampling) if len(tree) else target_logits[:1, 0].float()
    carried = rows[row, token].double().exp()
    rows[row, token] = -torch.inf
    left = rows.exp().sum(-1, dtype=torch.float64)
    whole = left.index_add(0, row, carried)
    edges = torch.zeros(trees.parents.shape, dtype=torch.float64, device=rows.device)
    edges[child_tree, child] = carried / whole[row]
    miss = trees.valid.double()
    miss[tree, node] = (left / whole)[: len(tree)]
    return edges, miss, row_of, rows


def _uniforms(num_trees: int, generators: Generators, sampling: Sampling) -> Tensor:
    """[B, 2] float64: two draws a tree from its own generator; at temperature 0 nothing is left to draw."""
    if sampling.greedy:
        return torch.full((num_trees, 2), 0.5, dtype=torch.float64)
    return torch.stack(
        [torch.rand(2, dtype=torch.float64, generator=g, device=g.device).cpu() for g in generators[:num_trees]]
    )


def pick_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[B]: an index of each row of weights [B, n] by inverse CDF, never one of weight 0."""
    total = weights.cumsum(1)
    index = torch.searchsorted(total, (uniforms * total[:, -1])[:, None], right=True)[:, 0]
    return index.clamp(max=weights.shape[1] - 1)
