"""Verifiers on the same trees at the same contexts: exact conditional expectations, and sampled verdicts beside them.

Shapes: A contexts, R contexts of one group, M = N+1 nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exittrain.build.base import Draft, TreeShape
from exittrain.build.parts import sub_draft
from exittrain.build.static import Path
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.runtime.progress import progress_bar
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.contexts import LOGITS, ContextSet, grow_scored
from exittrain.stages.evaluation.measures import Floats
from exittrain.verify.base import expected_block_lengths
from exittrain.verify.registry import get_verifier

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

Part = int | frozenset[Path]  # the first n drafted nodes, or the nodes of these rank paths (see build.parts)
Columns = dict[str, dict[str, Floats]]  # part -> verifier -> [A]


@dataclass(frozen=True)
class TreeSource:
    """The trees of one cell: grown once, at their largest, and read at every part (a part is a tree of its own: fixed
    before anything is drawn). parts: label -> which nodes; "all" is not added by itself."""

    builder: str
    shape: TreeShape
    parts: Mapping[str, Part]

    def key(self) -> dict[str, Any]:
        parts = {name: part if isinstance(part, int) else sorted(part) for name, part in self.parts.items()}
        return {"builder": self.builder, "shape": vars(self.shape), "parts": parts}


@dataclass(frozen=True, eq=False)
class LawResult:
    """expected: block length given the tree, exact, bonus counted; measured: mean of `draws` verdicts on the same tree
    (no entries when draws is 0); num_nodes: drafted nodes of each part's trees, mean over contexts."""

    sequence_ids: tuple[str, ...]
    anchors: tuple[int, ...]
    draws: int
    expected: Columns
    measured: Columns
    num_nodes: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        tables = {
            name: {part: {rule: list(map(float, v)) for rule, v in rules.items()} for part, rules in table.items()}
            for name, table in (("expected", self.expected), ("measured", self.measured))
        }
        return {
            "sequence_ids": self.sequence_ids, "anchors": self.anchors, "draws": self.draws,
            "num_nodes": self.num_nodes, **tables,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LawResult:
        expected, measured = (
            {part: {rule: np.asarray(v, dtype=np.float64) for rule, v in rules.items()} for part, rules in t.items()}
            for t in (data["expected"], data["measured"])
        )
        return cls(
            tuple(data["sequence_ids"]), tuple(data["anchors"]), data["draws"], expected, measured,
            dict(data["num_nodes"]),
        )  # fmt: skip


@torch.no_grad()
def measure_laws(
    target: TargetModel,
    drafter: Drafter,
    contexts: ContextSet,
    source: TreeSource,
    verifiers: Sequence[str],
    sampling: Sampling,
    draws: int,
    seed: int,
    stop: StopFlag,
    description: str,
) -> LawResult:
    """Grow every context's tree once, score it once, and ask every verifier at every part.

    A context's tree depends on its own stream (seed, sequence, anchor) alone: equal for all verifiers and parts.
    Raises InputError where a verifier is not exact for the builder's trees.
    """
    expected: dict[str, dict[str, list[float]]] = {part: {rule: [] for rule in verifiers} for part in source.parts}
    measured: dict[str, dict[str, list[float]]] = {part: {rule: [] for rule in verifiers} for part in source.parts}
    num_nodes = dict.fromkeys(source.parts, 0.0)
    step = max(1, LOGITS // (target.vocab_size * (source.shape.budget + 1)))
    with progress_bar(len(contexts), description, "contexts") as bar:
        for rows in torch.split(torch.arange(len(contexts)), min(step, 64)):
            names = [(contexts.ids[row], int(contexts.anchors[row])) for row in rows.tolist()]
            draft, logits = grow_and_score(target, drafter, contexts, rows, source, sampling, seed)
            for label, part in source.parts.items():
                some, columns = sub_draft(draft, part)
                part_logits = _gather(logits, columns)
                num_nodes[label] += float(some.trees.valid.sum() - len(rows)) / len(contexts)
                for rule in verifiers:
                    means, verdicts = ask(rule, some, part_logits, sampling, draws, seed, names)
                    expected[label][rule] += means
                    measured[label][rule] += verdicts
            stop.raise_if_set()
            bar.advance(len(rows))
    found, drawn = (
        {part: {rule: np.asarray(v) for rule, v in rules.items()} for part, rules in table.items()}
        for table in (expected, measured if draws else {})
    )
    return LawResult(contexts.ids, tuple(contexts.anchors.tolist()), draws, found, drawn, num_nodes)


def grow_and_score(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, rows: Tensor, source: TreeSource, sampling: Sampling,
    seed: int,
) -> tuple[Draft, Tensor]:  # fmt: skip
    """The trees at contexts `rows` and the target's raw logits [R, M, V] at their nodes."""
    generators = [
        generator_for(seed, "study", "tree", contexts.ids[row], int(contexts.anchors[row])) for row in rows.tolist()
    ]
    return grow_scored(target, drafter, contexts, rows, source.builder, source.shape, sampling, generators)


def ask(
    rule: str, draft: Draft, logits: Tensor, sampling: Sampling, draws: int, seed: int,
    names: Sequence[tuple[str, int]],
) -> tuple[list[float], list[float]]:  # fmt: skip
    """(expected block length, mean block length of `draws` verdicts or nothing) of each tree under one verifier."""
    verifier, trees = get_verifier(rule), draft.trees
    exits = verifier.exit_probabilities(trees, logits, sampling, draft.draft_rows)
    expected: list[float] = expected_block_lengths(exits, trees).tolist()
    if not draws:
        return expected, []
    generators = [generator_for(seed, "study", "verdict", *name) for name in names]
    lengths = torch.zeros(len(trees), dtype=torch.float64, device=trees.depths.device)
    for _ in range(draws):
        verdict = verifier.verify_batch(trees, logits, sampling, generators, draft.draft_rows)
        lengths += 1 + trees.depths.gather(1, verdict.nodes.to(trees.depths.device)[:, None])[:, 0]
    return expected, (lengths / draws).tolist()


def _gather(logits: Tensor, columns: Tensor) -> Tensor:
    """logits [R, M, V] at columns [R, M'] (padding reads the root's row, which is harmless)."""
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits[rows, columns.clamp(min=0)]
