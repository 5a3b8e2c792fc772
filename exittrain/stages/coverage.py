"""Coverage of a drafter's trees at many anchors of many sequences: the expected block length, exact, without decoding.

Shapes: S sequences, R anchors over all sequences, M = N+1 nodes padded, D the deepest level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.law.exit_law import ExitLaw, batch_exit_law
from exittrain.law.sampling import Sampling
from exittrain.stages.training.labelled_trees import label_trees
from exittrain.stages.training.scoring import Edges, score_edges, tree_edges
from exittrain.stages.training.trees import anchor_groups, group_inputs, grow_merged, max_trees
from exittrain.tree.batch import TreeBatch

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter
    from exittrain.models.target import TargetModel


@dataclass(frozen=True, eq=False)
class Coverage:
    """Per anchor, in the order given (CPU tensors).

    coverage [R] float64: C of the drafter's tree, 1 + C the expected block length; depth_reach [R, D] float64: P(at
    least d tokens accepted), summing to C over d; num_nodes [R]: drafted nodes.
    """

    tree_sequence: Tensor
    anchors: Tensor
    coverage: Tensor
    depth_reach: Tensor
    num_nodes: Tensor


@dataclass(frozen=True, eq=False)
class ScoredTrees:
    """One group's trees with the target's law: `rows` [R'] says which anchors of the whole they belong to;
    hidden [P, H]: the target's states at `edges.rows`."""

    rows: Tensor
    trees: TreeBatch
    edges: Edges
    hidden: Tensor
    edge_logprobs: Tensor
    law: ExitLaw


def coverage_of(
    target: TargetModel,
    drafter: Drafter,
    sequences: Sequence[Tensor],
    tree_sequence: Tensor,
    anchors: Tensor,
    shape: TreeShape,
    sampling: Sampling,
    builder: str = "best_first",
    progress: Callable[[int], None] | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> Coverage:
    """Draw the drafter's tree at every anchor and score it with the target behind its full context (at temperature 0
    along the target's own path alone).

    sequences: S 1-D token tensors; tree_sequence [R]: which sequence; anchors [R]: position of the root in it.
    `progress` is told how many anchors each finished group had. generators: one an anchor, for sampled builders.
    """
    count = anchors.numel()
    coverage, num_nodes = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    depth_reach = torch.zeros(count, shape.depth, dtype=torch.float64)
    for rows in anchor_groups([len(s) for s in sequences], tree_sequence, max_trees(target.vocab_size, shape)):
        inputs = group_inputs(sequences, tree_sequence, anchors, rows)
        trees = grow_merged(drafter.session(*inputs, sampling), shape, builder, generators, rows)
        labelled, _ = label_trees(target, inputs[0], trees, *inputs[1:], sampling, None, whole=False)
        law = batch_exit_law(labelled.trees, labelled.edge_logprobs)
        coverage[rows] = law.coverage.cpu()
        depth_reach[rows] = reach_by_depth(labelled.trees, law.reach, shape.depth).cpu()
        num_nodes[rows] = trees.valid.sum(1).cpu() - 1
        if progress is not None:
            progress(rows.numel())
    return Coverage(tree_sequence, anchors, coverage, depth_reach, num_nodes)


@torch.no_grad()
def draw_and_score(
    target: TargetModel,
    drafter: Drafter,
    sequences: Sequence[Tensor],
    tree_sequence: Tensor,
    anchors: Tensor,
    rows: Tensor,
    shape: TreeShape,
    sampling: Sampling,
    builder: str = "best_first",
    whole: bool = False,
    generators: Sequence[torch.Generator] | None = None,
) -> ScoredTrees:
    """The drafter's trees at the anchors `rows` and the target's exit law on them; twins are merged.

    Leaves are not run through the target, their reach is read at their parents; `whole` runs them too. generators: one
    for each of all anchors, for sampled builders.
    """
    inputs = group_inputs(sequences, tree_sequence, anchors, rows)
    trees = grow_merged(drafter.session(*inputs, sampling), shape, builder, generators, rows)
    used, local, positions = inputs
    edges = tree_edges(trees, trees.valid if whole else None)
    hidden = target.tree_hidden(used, edges.inner, local, positions).flatten(0, 1)[edges.places]
    edge_logprobs, _ = score_edges(target.head, hidden, edges, sampling, target.vocab_size)
    return ScoredTrees(rows, trees, edges, hidden, edge_logprobs, batch_exit_law(trees, edge_logprobs))


def reach_by_depth(trees: TreeBatch, reach: Tensor, depth: int) -> Tensor:
    """[R, D] sum of reach [R, M] over the nodes of each depth: the probability that at least d drafted tokens are
    accepted, d from 1 to `depth`."""
    columns = torch.zeros((len(trees), depth + 1), dtype=reach.dtype, device=reach.device)
    return columns.scatter_add(1, trees.depths, torch.where(trees.valid, reach, 0.0))[:, 1:]
