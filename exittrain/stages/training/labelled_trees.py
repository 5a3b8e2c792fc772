"""Draft trees with what the target says of them: the labels that a drafter's states are then compared with.

Shapes: S sequences, L tokens of the longest, R trees, M nodes with the root, P rows (nodes whose distribution is
compared), E edges, Ht the target's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.drafters.base import Layout
from exittrain.errors import InputError
from exittrain.law.objectives import NodeTerms
from exittrain.law.sampling import Sampling
from exittrain.models.session import prefixes
from exittrain.models.target import TargetModel
from exittrain.stages.training.drafter_loss import NodeTargets
from exittrain.stages.training.scoring import Edges, score_edges, tree_edges
from exittrain.tree.batch import TreeBatch

TARGET_TOKENS = 8192  # columns of one forward of the target


@dataclass(frozen=True, eq=False)
class LabelledTrees:
    """trees: all nodes that can have a weight; edges: theirs; edge_logprobs [R, M] of the target; hidden [P, Ht] its
    states at `edges.rows`, logits [P, V] the same through its head: as far as they are needed."""

    trees: TreeBatch
    edges: Edges
    edge_logprobs: Tensor
    hidden: Tensor | None = None
    logits: Tensor | None = None


def label_trees(
    target: TargetModel, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor,
    sampling: Sampling, depth_limit: int | None, whole: bool,
) -> tuple[LabelledTrees, Tensor]:  # fmt: skip
    """Run the target on the trees. depth_limit: distributions are compared at all nodes above this depth; None: edges
    alone are scored. whole: run the sequences to their end, not only to their last anchor.

    Returns the labelled trees and the target's states [S, L, Ht] along the sequences. At temperature 0 the trees come
    back as the target's argmax path through each: the other nodes are reached by no continuation, so no objective gives
    them a weight, and they are never run (unless layers are brought in for every forward: a path takes several).

    Raises:
        InputError: a tree deeper than the limit, or one whose siblings repeat a token.
    """
    if depth_limit is not None and trees.max_depth > depth_limit:
        raise InputError(f"a tree has {trees.max_depth} levels, the recipe's have {depth_limit}: collect again")
    read = sequences if whole else prefixes(sequences, tree_sequence, anchors)
    label = _along_paths if sampling.greedy and not target.is_offloaded else _at_all_nodes
    return label(target, read, trees, tree_sequence, anchors, sampling, depth_limit)


def _at_all_nodes(
    target: TargetModel, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor,
    sampling: Sampling, depth_limit: int | None,
) -> tuple[LabelledTrees, Tensor]:  # fmt: skip
    edges = tree_edges(trees, _rows(trees, depth_limit))
    along, nodes = target.hidden_with_trees(sequences, edges.inner, tree_sequence, anchors, TARGET_TOKENS)
    hidden = nodes.flatten(0, 1)[edges.places]
    scores, logits = score_edges(target.head, hidden, edges, sampling, target.vocab_size, keep=depth_limit is not None)
    return LabelledTrees(trees, edges, scores, hidden, logits), along


def _along_paths(
    target: TargetModel, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor,
    sampling: Sampling, depth_limit: int | None,
) -> tuple[LabelledTrees, Tensor]:  # fmt: skip
    rows = _rows(trees, depth_limit)
    wanted = trees.has_children() if rows is None else rows
    along, nodes, path = target.greedy_hidden(sequences, trees, tree_sequence, anchors, wanted, TARGET_TOKENS)
    paths, _ = trees.keep(path)
    certain = torch.zeros(paths.token_ids.shape, dtype=torch.float64, device=nodes.device)  # every edge of a path
    hidden = None if rows is None else nodes[path & rows]
    return LabelledTrees(paths, tree_edges(paths, _rows(paths, depth_limit)), certain, hidden), along


def _rows(trees: TreeBatch, depth_limit: int | None) -> Tensor | None:
    """[R, M] bool: nodes whose distribution is compared; None where only edges are scored."""
    return None if depth_limit is None else trees.valid & (trees.depths < depth_limit)


@dataclass(frozen=True, eq=False)
class TrainedTrees:
    """A micro-batch's labelled trees, weighted; tree_sequence, anchors [R]: where they grow."""

    labelled: LabelledTrees
    tree_sequence: Tensor
    anchors: Tensor
    terms: NodeTerms

    def targets(self, layout: Layout) -> NodeTargets:
        """What the drafter's node states are compared with."""
        edges, terms = self.labelled.edges, self.terms
        if terms.row_loss is None:
            weights = terms.edge_weights.float().flatten()[edges.nodes]
            return NodeTargets(weights, state_of=layout.node_rows[edges.row_of], tokens=edges.tokens)
        weights = terms.row_weights.float().flatten()[edges.rows]
        hidden = self.labelled.hidden if self.labelled.logits is None else None
        return NodeTargets(weights, terms.row_loss, hidden, self.labelled.logits)
