"""Coverage on fixed held-out anchors, and how stale stored trees have become: what is measured while an arm trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.drafters.base import Drafter
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.packed import pack
from exittrain.models.target import TargetModel
from exittrain.runtime.ranks import all_reduce_sums, rank, world_size
from exittrain.stages.coverage import coverage_of
from exittrain.stages.training.scoring import score_edges, tree_edges
from exittrain.stages.training.sequences import SequenceSet, choose_anchors
from exittrain.stages.training.trees import StoredTrees, anchor_groups, draw_trees, max_trees, move_trees, take_trees
from exittrain.tree.batch import TreeBatch


class HeldOut:
    """The first `num_sequences` held-out sequences, anchors fixed by `seed`: every arm is measured there."""

    def __init__(
        self, target: TargetModel, sequences: SequenceSet, num_sequences: int, per_sequence: int, seed: int,
        shape: TreeShape, sampling: Sampling, builder: str,
    ) -> None:  # fmt: skip
        count = min(num_sequences, len(sequences))
        last = target.max_positions - shape.depth - 1
        masks = [sequences.anchor_mask(i, last) for i in range(count)]
        tree_sequence, anchors = choose_anchors(masks, per_sequence, generator_for(seed, "held-out anchors"))
        own = (tree_sequence % world_size() == rank()).nonzero().flatten()  # this rank's share of the sequences
        self._target, self._tokens = target, sequences.tokens
        self._tree_sequence, self._anchors = tree_sequence[own], anchors[own]
        self._shape, self._sampling, self._builder = shape, sampling, builder

    def measure(self, drafter: Drafter) -> dict[str, float]:
        """Mean coverage over the anchors; score = expected block length, 1 + C. Every rank calls it."""
        sums = {"coverage": 0.0, "anchors": float(len(self._anchors))}
        if len(self._anchors):
            measured = coverage_of(
                self._target, drafter, self._tokens, self._tree_sequence, self._anchors,
                self._shape, self._sampling, self._builder,
            )  # fmt: skip
            sums["coverage"] = float(measured.coverage.sum())
        sums = all_reduce_sums(sums)
        coverage = sums["coverage"] / max(sums["anchors"], 1.0)
        return {"score": 1 + coverage, "coverage": coverage}


@torch.no_grad()
def staleness(
    drafter: Drafter, sequences: Sequence[Tensor], stored: StoredTrees, rows: Tensor, shape: TreeShape,
    sampling: Sampling, builder: str,
) -> dict[str, float]:  # fmt: skip
    """How far the drafter has moved from the one that drew the stored trees at `rows` [R'].

    log_q_change: mean |log q now - log q then| over their nodes, in nats; still_drawn: share of their nodes that the
    drafter would draw today, as paths from the root.
    """
    owner = torch.zeros(len(stored.anchors), dtype=torch.int64)
    for sequence, members in enumerate(stored.members):
        owner[members] = sequence
    change, nodes, kept = 0.0, 0, 0
    for group in anchor_groups([len(s) for s in sequences], owner[rows], max_trees(drafter.model.vocab_size, shape)):
        part = rows[group]
        used, local = torch.unique(owner[part], return_inverse=True)
        inputs = [sequences[i] for i in used.tolist()]
        trees = move_trees(take_trees(stored.trees, part), drafter.model.device)
        edges = tree_edges(trees)
        packed = pack(inputs, edges.inner, local, stored.anchors[part], drafter.model.dtype)
        hidden = packed.gather(drafter.tree_hidden(packed)).flatten(0, 1)[edges.places]
        now, _ = score_edges(drafter.head, hidden, edges, sampling.for_drafting(), drafter.model.vocab_size)
        drafted = trees.valid & (trees.depths > 0)
        assert trees.draft_logprobs is not None  # records have them
        change += float((now - trees.draft_logprobs.double())[drafted].abs().sum())
        nodes += int(drafted.sum())
        today = draw_trees(drafter, inputs, local, stored.anchors[part], shape, sampling, builder)
        kept += sum(len(old & new) for old, new in zip(_paths(trees), _paths(today), strict=True))
    return {"log_q_change": change / max(nodes, 1), "still_drawn": kept / max(nodes, 1)}


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
