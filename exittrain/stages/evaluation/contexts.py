"""The drafter's trees at fixed held-out contexts, scored by the target: exact given the trees, without decoding.

Shapes: S sequences, R contexts, M = N+1 nodes, D depth, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exittrain.build.base import Draft, TreeShape
from exittrain.build.registry import get_builder
from exittrain.law.exit_law import batch_exit_law
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.runtime.progress import Bar, progress_bar
from exittrain.runtime.signals import StopFlag
from exittrain.stages.coverage import coverage_of, reach_by_depth
from exittrain.stages.evaluation.results import ContextResult, VerifierResult
from exittrain.stages.evaluation.tasks import Context, HeldoutSequence
from exittrain.stages.training.trees import anchor_groups, group_inputs, join_trees, max_trees, move_trees
from exittrain.tree.batch import TreeBatch
from exittrain.verify.base import expected_block_lengths
from exittrain.verify.registry import get_verifier

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

LOGITS = 1 << 25  # float32 logits of whole trees held at once: 128 MiB
PIECE = 32  # contexts that are measured together, whatever the number of processes


@dataclass(frozen=True, eq=False)
class ContextSet:
    """Contexts as the models take them. sequences: S 1-D ids; tree_sequence, anchors [R]; ids: R sequence names."""

    sequences: list[Tensor]
    tree_sequence: Tensor
    anchors: Tensor
    ids: tuple[str, ...]

    @classmethod
    def of(cls, sequences: Sequence[HeldoutSequence], contexts: Sequence[Context]) -> ContextSet:
        return cls(
            [sequence.token_ids for sequence in sequences],
            torch.tensor([context.sequence for context in contexts]),
            torch.tensor([context.anchor for context in contexts]),
            tuple(sequences[context.sequence].id for context in contexts),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def group(self, rows: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """(sequences, tree_sequence, anchors) of some rows, only the sequences they need."""
        return group_inputs(self.sequences, self.tree_sequence, self.anchors, rows)

    def spread(self, count: int) -> Tensor:
        """[<= count] rows, evenly spaced over all contexts."""
        return torch.arange(len(self))[:: max(1, -(-len(self) // count))]

    def select(self, rows: Tensor) -> ContextSet:
        """The contexts at `rows`, as a set of their own."""
        sequences, tree_sequence, anchors = self.group(rows)
        return ContextSet(sequences, tree_sequence, anchors, tuple(self.ids[row] for row in rows.tolist()))

    def pieces(self) -> list[ContextSet]:
        """All contexts in order, PIECE at a time: what one process measures at once depends on nothing else."""
        return [self.select(rows) for rows in torch.split(torch.arange(len(self)), PIECE)]

    def places(self) -> list[tuple[str, int]]:
        """(sequence name, anchor) of every context."""
        return list(zip(self.ids, self.anchors.tolist(), strict=True))

    def result(self, reach: Tensor) -> ContextResult:
        return ContextResult(self.ids, tuple(self.anchors.tolist()), reach.numpy())


def measure_contexts(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, builder: str, shape: TreeShape, sampling: Sampling,
    stop: StopFlag, description: str,
) -> ContextResult:  # fmt: skip
    """Exact reach by depth of the drafter's trees at every context, under the serving distribution."""
    with progress_bar(len(contexts), description, "contexts") as bar:
        coverage = coverage_of(
            target, drafter, contexts.sequences, contexts.tree_sequence, contexts.anchors, shape, sampling, builder,
            progress=_advance(bar, stop),
        )  # fmt: skip
    return contexts.result(coverage.depth_reach)


def measure_oracle(
    target: TargetModel, contexts: ContextSet, shape: TreeShape, sampling: Sampling, stop: StopFlag, description: str
) -> ContextResult:
    """The same for the best tree of this budget: the target drafts for itself, so its edges are known."""
    trees = grow_oracles(target, contexts, shape, sampling, stop, description)
    assert trees.draft_logprobs is not None  # builders always set them
    law = batch_exit_law(trees, trees.draft_logprobs.double())
    return contexts.result(reach_by_depth(trees, law.reach, shape.budget))


@torch.no_grad()
def grow_oracles(
    target: TargetModel, contexts: ContextSet, shape: TreeShape, sampling: Sampling, stop: StopFlag, description: str,
    builder: str = "oracle",
) -> TreeBatch:  # fmt: skip
    """The target's own tree at every context (CPU), grown in groups of bounded memory; draft_logprobs are the target's.

    builder: `oracle` for the best tree of any depth; `best_first` keeps to shape.depth and shape.width.
    """
    groups, grown = [], []
    with progress_bar(len(contexts), description, "contexts") as bar:
        most = max_trees(target.vocab_size, shape)
        for rows in anchor_groups([len(s) for s in contexts.sequences], contexts.tree_sequence, most):
            trees = get_builder(builder)(target.session(*contexts.group(rows), sampling), shape).trees
            groups.append(rows)
            grown.append(move_trees(trees, torch.device("cpu")))
            _advance(bar, stop)(rows.numel())
    return join_trees(grown, groups)


def _advance(bar: Bar, stop: StopFlag) -> Callable[[int], None]:
    """Progress that also answers a signal: what is finished is on disk, what is not is redone."""

    def advance(units: int) -> None:
        stop.raise_if_set()
        bar.advance(units)

    return advance


def measure_sampled(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, verifier: str, builder: str, shape: TreeShape,
    sampling: Sampling, seed: int, stop: StopFlag, description: str,
) -> ContextResult:  # fmt: skip
    """P(accepted >= d) under a verifier at every context, exact given the one tree that is drawn there."""
    reach = torch.zeros(len(contexts), shape.depth, dtype=torch.float64)
    rule = get_verifier(verifier)
    with progress_bar(len(contexts), description, "contexts") as bar:
        for rows, draft, logits in _grown(target, drafter, contexts, builder, shape, sampling, seed):
            exits = rule.exit_probabilities(draft.trees, logits, sampling, draft.draft_rows)
            ends = torch.zeros((len(rows), shape.depth + 1), dtype=torch.float64, device=exits.device)
            ends.scatter_add_(1, draft.trees.depths, exits)
            reach[rows] = ends.flip(1).cumsum(1).flip(1)[:, 1:].cpu()
            _advance(bar, stop)(rows.numel())
    return contexts.result(reach)


def measure_verifiers(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, verifiers: Sequence[str], builder: str,
    shape: TreeShape, sampling: Sampling, draws: int, seed: int, stop: StopFlag,
    description: str,
) -> VerifierResult:  # fmt: skip
    """Every verifier on the same trees: its exact expectation, the mean of `draws` verdicts, and its cost."""
    expected: dict[str, list[float]] = {rule: [] for rule in verifiers}
    measured: dict[str, list[float]] = {rule: [] for rule in verifiers}
    seconds = dict.fromkeys(verifiers, 0.0)
    with progress_bar(len(contexts), description, "contexts") as bar:
        for rows, draft, logits in _grown(target, drafter, contexts, builder, shape, sampling, seed):
            names = [(contexts.ids[row], int(contexts.anchors[row])) for row in rows.tolist()]
            for rule in verifiers:
                exits = get_verifier(rule).exit_probabilities(draft.trees, logits, sampling, draft.draft_rows)
                expected[rule] += expected_block_lengths(exits, draft.trees).tolist()
                lengths, spent = _draw(rule, draft, logits, sampling, draws, seed, names)
                measured[rule] += lengths
                seconds[rule] += spent
            _advance(bar, stop)(rows.numel())
    count = len(contexts) * draws
    return VerifierResult(
        contexts.ids, draws,
        {rule: np.asarray(values) for rule, values in expected.items()},
        {rule: np.asarray(values) for rule, values in measured.items()},
        {rule: value / count for rule, value in seconds.items()},
    )  # fmt: skip


def _grown(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, builder: str, shape: TreeShape, sampling: Sampling,
    seed: int,
) -> Iterator[tuple[Tensor, Draft, Tensor]]:  # fmt: skip
    """(rows, their trees, the target's raw logits [R, M, V] there), group by group. A sampled tree is drawn from its
    context's own stream: the same for every drafter and verifier, whatever lies beside it."""
    step = max(1, LOGITS // (target.vocab_size * (shape.budget + 1)))
    for rows in torch.split(torch.arange(len(contexts)), min(step, 64)):
        generators = [
            generator_for(seed, "eval", "tree", contexts.ids[row], int(contexts.anchors[row])) for row in rows.tolist()
        ]
        yield rows, *grow_scored(target, drafter, contexts, rows, builder, shape, sampling, generators)


@torch.no_grad()
def grow_scored(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, rows: Tensor, builder: str, shape: TreeShape,
    sampling: Sampling, generators: Sequence[torch.Generator],
) -> tuple[Draft, Tensor]:  # fmt: skip
    """The drafter's trees at contexts `rows` [R] and the target's raw logits [R, M, V] at their nodes."""
    sequences, tree_sequence, anchors = contexts.group(rows)
    session = drafter.session(sequences, tree_sequence, anchors, sampling)
    draft = get_builder(builder)(session, shape, generators)
    return draft, target.head(target.tree_hidden(sequences, draft.trees, tree_sequence, anchors))


@torch.no_grad()
def _draw(
    rule: str, draft: Draft, logits: Tensor, sampling: Sampling, draws: int, seed: int,
    names: Sequence[tuple[str, int]],
) -> tuple[list[float], float]:  # fmt: skip
    """(mean block length of each tree's verdicts, seconds). Every verifier gets the same random streams."""
    verifier, trees = get_verifier(rule), draft.trees
    generators = [generator_for(seed, "eval", "verdict", *name) for name in names]
    began, lengths = time.perf_counter(), torch.zeros(len(trees), dtype=torch.float64, device=logits.device)
    for draw in range(draws + 1):
        if draw == 1:  # the first call pays for allocations: not timed, not counted
            began, lengths = time.perf_counter(), torch.zeros_like(lengths)
        verdict = verifier.verify_batch(trees, logits, sampling, generators, draft.draft_rows)
        lengths += 1 + trees.depths.gather(1, verdict.nodes.to(trees.depths.device)[:, None])[:, 0]
    means: list[float] = (lengths / draws).tolist()  # waits for the device
    return means, time.perf_counter() - began
