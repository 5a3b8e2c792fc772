"""Coverage on fixed held-out anchors, and how stale stored trees have become: what is measured while an arm trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.build.registry import drawn_by
from exittrain.drafters.base import Drafter, TrainingInputs
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.runtime.ranks import all_reduce_sums, rank, world_size
from exittrain.stages.coverage import coverage_of
from exittrain.stages.evaluation.contexts import ContextSet, grow_scored
from exittrain.stages.training.scoring import Edges, score_edges, tree_edges
from exittrain.stages.training.sequences import SequenceSet, choose_anchors
from exittrain.stages.training.trees import (
    StoredTrees,
    anchor_groups,
    draw_trees,
    max_trees,
    move_trees,
    take_trees,
    tree_generators,
)
from exittrain.tree.batch import TreeBatch
from exittrain.verify.base import expected_block_lengths
from exittrain.verify.registry import get_verifier

RULE = "traversal"  # exact for every sampled tree, and the best of those


class HeldOut:
    """The first `num_sequences` held-out sequences; anchors, and what sampled trees are drawn from, fixed by `seed`:
    every arm is measured there."""

    def __init__(
        self, target: TargetModel, sequences: SequenceSet, num_sequences: int, per_sequence: int, seed: int,
        shape: TreeShape, sampling: Sampling, builder: str,
    ) -> None:  # fmt: skip
        count = min(num_sequences, len(sequences))
        last = target.max_positions - shape.depth - 1
        masks = [sequences.anchor_mask(i, last) for i in range(count)]
        tree_sequence, anchors = choose_anchors(masks, per_sequence, generator_for(seed, "held-out anchors"))
        own = (tree_sequence % world_size() == rank()).nonzero().flatten()  # this rank's share of the sequences
        names = tuple(sequences.ids[i] for i in tree_sequence[own].tolist())
        self._target, self._seed = target, seed
        self._contexts = ContextSet(sequences.tokens, tree_sequence[own], anchors[own], names)
        self._shape, self._sampling, self._builder = shape, sampling, builder

    def measure(self, drafter: Drafter) -> dict[str, float]:
        """score: the mean expected block length over the anchors, exact given the trees: 1 + coverage, which is also
        given, or on sampled trees what RULE makes of them (coverage is no measure of those). Every rank calls it."""
        sampled = drawn_by(self._builder) != "top"
        total = self._sampled_lengths(drafter) if sampled else self._coverage(drafter)
        sums = all_reduce_sums({"total": total, "anchors": float(len(self._contexts))})
        mean = sums["total"] / max(sums["anchors"], 1.0)
        return {"score": mean} if sampled else {"score": 1 + mean, "coverage": mean}

    def _coverage(self, drafter: Drafter) -> float:
        """Summed over this rank's anchors."""
        places = self._contexts
        if not len(places):
            return 0.0
        inputs = (places.sequences, places.tree_sequence, places.anchors, self._shape, self._sampling, self._builder)
        return float(coverage_of(self._target, drafter, *inputs).coverage.sum())

    def _sampled_lengths(self, drafter: Drafter) -> float:
        """Expected block lengths, summed over this rank's anchors."""
        rule, places, total = get_verifier(RULE), self._contexts, 0.0
        names = list(zip(places.ids, places.anchors.tolist(), strict=True))
        tree = (self._builder, self._shape, self._sampling)
        lengths, most = [len(tokens) for tokens in places.sequences], max_trees(self._target.vocab_size, self._shape)
        for rows in anchor_groups(lengths, places.tree_sequence, most):
            own = [names[row] for row in rows.tolist()]
            generators = tree_generators(self._builder, own, self._seed, "held-out tree") or []
            draft, logits = grow_scored(self._target, drafter, places, rows, *tree, generators)
            exits = rule.exit_probabilities(draft.trees, logits, self._sampling, draft.draft_rows)
            total += float(expected_block_lengths(exits, draft.trees).sum())
        return total


@torch.no_grad()
def staleness(
    drafter: Drafter, target: TargetModel, sequences: Sequence[Tensor], stored: StoredTrees, rows: Tensor,
    shape: TreeShape, sampling: Sampling, builder: str, generators: Sequence[torch.Generator] | None = None,
) -> dict[str, float]:  # fmt: skip
    """How far the drafter has moved from the one that drew the stored trees at `rows` [R'].

    log_q_change: mean |log q now - log q then| over their nodes, in nats; still_drawn: share of their nodes that the
    drafter would draw today, as paths from the root. generators: of sampled trees, one a row, as they were drawn from.
    """
    owner = torch.zeros(len(stored.anchors), dtype=torch.int64)
    for sequence, members in enumerate(stored.members):
        owner[members] = sequence
    change, nodes, kept = 0.0, 0, 0
    for group in anchor_groups([len(s) for s in sequences], owner[rows], max_trees(drafter.vocab_size, shape)):
        part = rows[group]
        used, local = torch.unique(owner[part], return_inverse=True)
        inputs = [sequences[i] for i in used.tolist()]
        trees = move_trees(take_trees(stored.trees, part), drafter.device)
        edges = tree_edges(trees)
        now, _ = score_edges(
            drafter.logits, _node_states(drafter, target, inputs, edges, local, stored.anchors[part]), edges,
            sampling.for_drafting(), drafter.vocab_size,
        )  # fmt: skip
        drafted = trees.valid & (trees.depths > 0)
        assert trees.draft_logprobs is not None  # records have them
        gap = (now - trees.draft_logprobs.double())[drafted].abs()
        gap = gap[gap.isfinite()]  # what can no longer be drafted at all shows in still_drawn
        change += float(gap.sum())
        nodes += len(gap)
        own = None if generators is None else [generators[i] for i in group.tolist()]
        today = draw_trees(drafter, inputs, local, stored.anchors[part], shape, sampling, builder, own)
        kept += sum(len(old & new) for old, new in zip(_paths(trees), _paths(today), strict=True))
    return {"log_q_change": change / max(nodes, 1), "still_drawn": kept / max(nodes, 1)}


def _node_states(
    drafter: Drafter, target: TargetModel, sequences: Sequence[Tensor], edges: Edges, tree_sequence: Tensor,
    anchors: Tensor,
) -> Tensor:  # fmt: skip
    """The drafter's states [P, H] at `edges.rows`."""
    layers = drafter.feature_layers
    features = target.states(layers).batch(sequences)[1] if layers else None
    nothing = [torch.zeros(len(tokens), dtype=torch.bool) for tokens in sequences]
    unused = [torch.Generator() for _ in sequences]  # nothing is trained, so no place is drawn
    given = TrainingInputs(sequences, nothing, features, edges.inner, tree_sequence, anchors, edges.places, unused)
    layout = drafter.lay_out(given)
    return drafter.states(layout)[1][layout.node_rows]


def _paths(trees: TreeBatch) -> list[set[tuple[int, ...]]]:
    """Each tree as the set of its nodes' token paths."""
    result = []
    for tree in trees.trees():
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tokens)):
            paths.append((*paths[parents[node]], tokens[node]))
        result.append(set(paths[1:]))
    return result
