"""Training a drafter against its target: token loss on response tokens plus lambda times a node loss on draft trees.

Shapes: S sequences of a micro-batch, L tokens of the longest, R trees, M nodes with the root, P node rows, Ht the
target's hidden size, F features of a token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exittrain.build.registry import drawn_by
from exittrain.drafters.base import Drafter, TrainingInputs
from exittrain.errors import InputError
from exittrain.law.exit_law import batch_exit_law
from exittrain.law.objectives import get_objective, node_terms, weight_at
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.runtime.ranks import rank, world_size
from exittrain.stages.training.drafter_loss import DrafterLoss, LossSettings, MicroBatch
from exittrain.stages.training.labelled_trees import TARGET_TOKENS, LabelledTrees, TrainedTrees, label_trees
from exittrain.stages.training.loop import Sums
from exittrain.stages.training.scoring import tree_edges
from exittrain.stages.training.sequences import Plan, SequenceSet, batch_at, choose_anchors, micro_batches
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.trees import (
    StoredTrees,
    draw_trees,
    join_trees,
    move_trees,
    take_trees,
    tree_generators,
)
from exittrain.tree.batch import TreeBatch

TREE_FIELDS = ("token_ids", "parents", "depths", "valid", "draft_logprobs")


class DrafterTask:
    """A `loop.Task`. Order of sequences, anchors and (given the drafter) trees are functions of (seed, step): a sampled
    tree's draws of (seed, step, sequence, anchor), whatever the rank and the arm."""

    def __init__(
        self, drafter: Drafter, target: TargetModel, sequences: SequenceSet, loop: LoopSettings, loss: LossSettings,
        stored: StoredTrees | None = None,
    ) -> None:  # fmt: skip
        self.module = DrafterLoss(drafter, target, loss)
        self._drafter, self._target, self._sequences, self._stored = drafter, target, sequences, stored
        self._loop, self._loss, self._lengths = loop, loss, tuple(sequences.lengths)
        if loss.uses_trees:
            drafter.check_depth(loss.depth_limit)
        positions = min(target.max_positions, drafter.max_positions)
        if max(self._lengths) > positions:
            raise InputError(
                f"sequences have up to {max(self._lengths)} tokens, target and drafter share {positions} positions: "
                "lower data.max_length"
            )
        last_anchor = positions - loss.shape.depth - 1
        self._anchor_masks = [sequences.anchor_mask(i, last_anchor) for i in range(len(sequences))]
        levels = loss.depth_limit + 1 if loss.uses_trees else 0
        self._exit_masses = [f"exit_mass/depth_{depth}" for depth in range(levels)]
        self._drawn: dict[int, TreeBatch] = {}  # step -> trees of this rank's share of that step's batch

    # What the loop asks for.

    def runs_module(self, step: int) -> bool:
        """Whether trees are due to be drawn: steps whose trees are there are the same on all ranks."""
        return self._loss.uses_trees and self._stored is None and step not in self._drawn

    def prepare(self, step: int) -> list[MicroBatch]:
        plan = self._plan(step)
        shares, sampling = self._shares(plan), self._loss.sampling_at(step)
        if not self._loss.uses_trees:
            return [self._without_trees([plan.indices[i] for i in members], sampling, step) for members in shares]
        trees, own_rows = None if self._stored is not None else self._trees_of(step), self._own(plan)[3]
        batches = []
        for members in shares:
            indices, tree_sequence, anchors, rows = plan.share(members)
            if not len(rows):
                batches.append(self._without_trees(indices, sampling, step))
            elif trees is None:
                stored = self._stored_trees(plan, rows)
                batches.append(self._with_trees(indices, tree_sequence, anchors, sampling, step, *stored))
            else:
                own = take_trees(trees, torch.searchsorted(own_rows, rows))
                batches.append(self._with_trees(indices, tree_sequence, anchors, sampling, step, own, None))
        return batches

    def scales(self, step: int, totals: Sums) -> Sums:
        weight = self._weight(step)
        return {
            "token": self._loss.token_weight / totals["tokens"] if totals["tokens"] else 0.0,
            "node": weight / totals["nodes"] if totals.get("nodes") else 0.0,
        }

    def metrics(self, step: int, sums: Sums, totals: Sums) -> dict[str, float]:
        """Means over the step's rows; node_gradient_share: of the two gradients' norms at the last hidden states;
        exit_mass/depth_d: the chance that the target leaves a tree at a node of depth d."""
        token = sums["token_loss"] / max(totals["tokens"], 1.0)
        numbers = {"token_loss": token, "num_tokens": totals["trained_tokens"], "loss": self._loss.token_weight * token}
        if self._loss.uses_trees and totals["trees"]:
            weight = self._weight(step)
            node = sums["node_loss"] / totals["nodes"] if totals["nodes"] else 0.0
            norms = math.sqrt(sums["token_gradient"]), math.sqrt(sums["node_gradient"])
            numbers |= {
                "node_loss": node,
                "loss": numbers["loss"] + weight * node,
                "node_weight": weight,
                "num_trees": totals["trees"],
                "coverage": totals["coverage"] / totals["trees"],
                "node_gradient_share": norms[1] / sum(norms) if sum(norms) else 0.0,
                **{name: totals[name] / totals["trees"] for name in self._exit_masses},
            }
            if drawn_by(self._loss.builder) == "top":  # of sampled trees it is no measure
                numbers["expected_block_length"] = 1 + numbers["coverage"]
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Trees already drawn for steps to come: a later drafter would draw others. Step -> [their rows of the step's
        plan, by which any number of ranks finds its own, and the trees' tensors]."""
        return {
            "drawn": {
                step: [self._own(self._plan(step))[3], *(getattr(trees, name).cpu() for name in TREE_FIELDS)]
                for step, trees in self._drawn.items()
            }
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._drawn = {}
        for step in states[0]["drawn"]:
            shares = [share for share in (state["drawn"][step] for state in states) if len(share[0])]
            drawn = drawn_by(self._loss.builder)
            parts = [TreeBatch(ids, parents, depths, valid, drawn, scores)
                     for _, ids, parents, depths, valid, scores in shares]  # fmt: skip
            trees = join_trees(parts, [share[0] for share in shares])
            own = take_trees(trees, self._own(self._plan(step))[3])
            self._drawn[step] = move_trees(own, self._target.device)

    def keep_states(self, steps: Iterable[int]) -> None:
        """Have the target's states along these steps' sequences at hand, as every epoch but the first finds them."""
        if self._drafter.feature_layers:
            own = {index for step in steps for index in self._own(self._plan(step))[0]}
            for index in sorted(own):
                self._target.states(self._drafter.feature_layers).of(self._sequences.tokens[index])

    # How a step is made.

    def _weight(self, step: int) -> float:
        return weight_at(step, self._loop.steps, self._loss.weight, self._loss.weight_warmup_ratio)

    def _plan(self, step: int) -> Plan:
        indices = batch_at(self._lengths, self._loop.batch_size, self._loop.seed, step)
        nothing = torch.zeros(0, dtype=torch.int64)
        if not self._loss.uses_trees:
            return Plan(indices, nothing, nothing)
        generator, count = generator_for(self._loop.seed, "anchors", step), self._loss.anchors_per_sequence
        if self._stored is not None:
            tree_sequence, rows = self._stored.choose(indices, count, generator)
            return Plan(indices, tree_sequence, self._stored.anchors[rows], rows)
        return Plan(indices, *choose_anchors([self._anchor_masks[i] for i in indices], count, generator))

    def _shares(self, plan: Plan) -> list[list[int]]:
        """Members of the batch in each of this rank's micro-batches."""
        world = world_size()
        return micro_batches(len(plan.indices), self._loop.num_micro_batches(world), rank(), world)

    def _own(self, plan: Plan) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """What this rank gets of a plan, all micro-batches together."""
        return plan.share([member for share in self._shares(plan) for member in share])

    def _trees_of(self, step: int) -> TreeBatch:
        """The trees of `_own(plan of the step)`; drawn `refresh_every` steps at a time."""
        if step not in self._drawn:
            loss, every = self._loss, self._loss.refresh_every
            block = range(step, min((step // every + 1) * every, self._loop.steps))
            sequences: list[Tensor] = []
            tree_sequence, anchors, generators = [], [], []
            for later in block:
                indices, local, positions, _ = self._own(self._plan(later))
                names = [self._sequences.ids[indices[i]] for i in local.tolist()]
                places = zip(names, positions.tolist(), strict=True)
                generators += tree_generators(loss.builder, places, self._loop.seed, "tree", later) or []
                tree_sequence.append(local + len(sequences))
                anchors.append(positions)
                sequences += [self._sequences.tokens[i] for i in indices]
            trees = draw_trees(
                self._drafter, sequences, torch.cat(tree_sequence), torch.cat(anchors),
                loss.shape, loss.sampling_at(step), loss.builder, generators or None,
            )  # fmt: skip
            rows = torch.split(torch.arange(len(trees)), [len(part) for part in anchors])
            self._drawn = {later: take_trees(trees, part) for later, part in zip(block, rows, strict=True)}
        return self._drawn.pop(step)

    def _stored_trees(self, plan: Plan, rows: Tensor) -> tuple[TreeBatch, Tensor]:
        assert self._stored is not None and plan.stored is not None  # the caller has looked
        chosen = plan.stored[rows]
        trees = move_trees(take_trees(self._stored.trees, chosen), self._target.device)
        edges = self._stored.edge_logprobs[chosen, : trees.token_ids.shape[1]]
        return trees, edges.to(self._target.device)

    def _without_trees(self, indices: list[int], sampling: Sampling, step: int) -> MicroBatch:
        """Sequences alone; without any, a stand-in that trains nothing but takes part in every reduction."""
        sequences = [self._sequences.tokens[i] for i in indices] or [self._sequences.tokens[0][:2]]
        along, features = self._along(sequences)
        return self._batch(indices, sequences, sampling, step, along, features, {}, None)

    def _with_trees(
        self, indices: list[int], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling, step: int,
        trees: TreeBatch, stored_edges: Tensor | None,
    ) -> MicroBatch:  # fmt: skip
        loss, target = self._loss, self._target
        sequences = [self._sequences.tokens[i] for i in indices]
        on_rows = get_objective(loss.objective).on == "rows"
        if stored_edges is not None and not on_rows:  # what the shards hold is enough
            along, features = self._along(sequences)
            labelled = LabelledTrees(trees, tree_edges(trees), stored_edges)
        else:
            apart = bool(self._drafter.feature_layers) or loss.token_loss != "kl"
            limit = loss.depth_limit if on_rows else None
            labelled, along = label_trees(target, sequences, trees, tree_sequence, anchors, sampling, limit, not apart)
            along, features = self._along(sequences) if apart else (along, None)
        law, num_nodes = batch_exit_law(labelled.trees, labelled.edge_logprobs), int((trees.depths > 0).sum())
        terms = node_terms(loss.objective, labelled.trees, law, loss.normaliser, loss.depth_limit, num_nodes)
        counts = {"nodes": terms.denominator, "trees": float(len(trees)), "coverage": float(law.coverage.sum())}
        depths = labelled.trees.depths
        masses = [torch.where(depths == depth, law.exit, 0.0).sum() for depth in range(len(self._exit_masses))]
        counts |= dict(zip(self._exit_masses, torch.stack(masses).tolist(), strict=True))
        made = TrainedTrees(labelled, tree_sequence, anchors, terms)
        return self._batch(indices, sequences, sampling, step, along, features, counts, made)

    def _along(self, sequences: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The target along the sequences: last hidden states [S, L, Ht] (None: not needed) and features [S, L, F]."""
        layers, use_kl = self._drafter.feature_layers, self._loss.token_loss == "kl"
        if layers:
            hidden, features = self._target.states(layers).batch(sequences)
            return (hidden if use_kl else None), features
        return (self._target.sequence_hidden(sequences, TARGET_TOKENS) if use_kl else None), None

    def _batch(
        self, indices: list[int], sequences: list[Tensor], sampling: Sampling, step: int, along: Tensor | None,
        features: Tensor | None, counts: Sums, trees: TrainedTrees | None,
    ) -> MicroBatch:  # fmt: skip
        trained = [self._sequences.trained[i] for i in indices] or [torch.zeros(2, dtype=torch.bool)]
        generators = [generator_for(self._loop.seed, "blocks", step, self._sequences.ids[i]) for i in indices]
        given = TrainingInputs(
            sequences, trained, features, generators=generators or [generator_for("stand-in")],
            first_step=step < self._loss.unroll_from * self._loop.steps,
        )  # fmt: skip
        if trees is not None:
            given = replace(
                given, trees=trees.labelled.edges.inner, tree_sequence=trees.tree_sequence, anchors=trees.anchors,
                places=trees.labelled.edges.places,
            )  # fmt: skip
        layout = self._drafter.lay_out(given)
        wanted, target_of = torch.unique_consecutive(layout.target_rows, dim=0, return_inverse=True)
        row, column = wanted.unbind(1)
        if self._loss.uses_trees:
            counts = dict.fromkeys(("nodes", "trees", "coverage", *self._exit_masses), 0.0) | counts
        weight = float(len(layout.labels)) if layout.weights is None else float(layout.weights.sum())
        return MicroBatch(
            sample_ids=[self._sequences.ids[i] for i in indices],
            num_tokens=sum(int(mask.sum()) for mask in trained),
            counts={"tokens": weight, **counts},
            sampling=sampling,
            layout=layout,
            target_of=target_of,
            token_hidden=None if along is None else along[row, column],
            nodes=None if trees is None else trees.targets(layout),
        )
