"""Draft trees with what the target says of them, and what a drafter's states are then compared with.

Shapes: S sequences, L tokens of the longest, R trees, M nodes with the root, P rows (nodes whose distribution is
compared), E edges, Ht the target's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.drafters.base import Layout
from exittrain.law.objectives import NodeTerms
from exittrain.law.sampling import Sampling
from exittrain.models.session import prefixes
from exittrain.models.target import TargetModel
from exittrain.stages.training.drafter_loss import NodeTargets
from exittrain.stages.training.scoring import Edges, score_edges, tree_edges
from exittrain.tree.batch import TreeBatch

TARGET_TOKENS = 8192  # columns of one forward of the target


@dataclass(frozen=True, eq=False)
class ScoredTrees:
    """trees: all nodes that can have a weight; edges: theirs; edge_logprobs [R, M] of the target; hidden [P, Ht] its
    states at `edges.rows`, logits [P, V] the same through its head: as far as they are needed."""

    trees: TreeBatch
    edges: Edges
    edge_logprobs: Tensor
    hidden: Tensor | None = None
    logits: Tensor | None = None


def score_trees(
    target: TargetModel, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor,
    sampling: Sampling, depth_limit: int | None, whole: bool,
) -> tuple[ScoredTrees, Tensor]:  # fmt: skip
    """Run the target on the trees. depth_limit: distributions are compared at all nodes above this depth; None: edges
    alone are scored. whole: run the sequences to their end, not
    to their last anchor.

    Returns the scored trees and the target's states [S, L, Ht] along the sequences. At temperature 0 the trees come
    back as the target's argmax path through each: the other nodes are reached by no continuation, so no objective gives
    them a weight, and they are never run.
    """
    wanted = trees.has_children() if depth_limit is None else trees.valid & (trees.depths < depth_limit)
    read = sequences if whole else prefixes(sequences, tree_sequence, anchors)
    if sampling.greedy:
        along, nodes, path = target.greedy_hidden(read, trees, tree_sequence, anchors, wanted, TARGET_TOKENS)
        paths, _ = trees.keep(path)
        rows = None if depth_limit is None else paths.valid & (paths.depths < depth_limit)
        hidden = None if depth_limit is None else nodes[path & wanted]
        certain = torch.zeros(paths.token_ids.shape, dtype=torch.float64, device=nodes.device)
        return ScoredTrees(paths, tree_edges(paths, rows), certain, hidden), along
    edges = tree_edges(trees, None if depth_limit is None else wanted)
    along, nodes = target.hidden_with_trees(read, edges.inner, tree_sequence, anchors, TARGET_TOKENS)
    hidden = nodes.flatten(0, 1)[edges.places]
    scores, logits = score_edges(target.head, hidden, edges, sampling, target.vocab_size, keep=depth_limit is not None)
    return ScoredTrees(trees, edges, scores, hidden, logits), along


@dataclass(frozen=True, eq=False)
class TrainedTrees:
    """A micro-batch's scored trees, weighted; tree_sequence, anchors [R]: where they grow."""

    scored: ScoredTrees
    tree_sequence: Tensor
    anchors: Tensor
    terms: NodeTerms

    def targets(self, layout: Layout) -> NodeTargets:
        """What the drafter's node states are compared with."""
        scored, edges, terms = self.scored, self.scored.edges, self.terms
        if terms.row_loss is None:
            weights = terms.edge_weights.float().flatten()[edges.nodes]
            return NodeTargets(weights, state_of=layout.node_rows[edges.row_of], tokens=edges.tokens)
        weights = terms.row_weights.float().flatten()[edges.rows]
        hidden = scored.hidden if scored.logits is None else None
        return NodeTargets(weights, terms.row_loss, hidden, scored.logits)
