"""Verifier milliseconds on the study's own trees: everything from logits to (path, bonus), all rules in turn.

One tree at a time, as the paper measures. Beside the rules of the study runs DDTree's predraw, which draws at every
node; the project's own draws only on the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exittrain.build.base import Draft
from exittrain.build.parts import sub_draft
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.runtime.progress import progress_bar
from exittrain.stages.benchmarks.timing import race
from exittrain.stages.benchmarks.verify import DDTREE, child_maps, ddtree_predraw
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation.measures import Floats
from exittrain.stages.evaluation.output import hardware
from exittrain.stages.evaluation.schema import Interval, Number, Part
from exittrain.stages.studies.base import contexts_hash
from exittrain.stages.studies.laws import TreeSource, grow_and_score
from exittrain.verify.base import BatchVerdict
from exittrain.verify.registry import get_verifier

if TYPE_CHECKING:
    from exittrain.stages.evaluation.contexts import ContextSet
    from exittrain.stages.studies.base import Bench
    from exittrain.stages.studies.settings import TevStudy


class RuleTime(Part):
    """milliseconds: mean over trees of each tree's median; ratio: over DDTree's predraw on the same trees, paired (None
    for itself)."""

    verifier: str
    budget: int
    temperature: Number
    milliseconds: Number
    ratio: Interval | None


@dataclass(frozen=True, eq=False)
class TimingResult:
    """milliseconds: part -> rule -> the median of each timed tree's rounds, in the order of sequence_ids."""

    sequence_ids: tuple[str, ...]
    milliseconds: dict[str, dict[str, list[float]]]

    def to_json(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TimingResult:
        return cls(tuple(data["sequence_ids"]), dict(data["milliseconds"]))


def time_verifiers(
    bench: Bench, settings: TevStudy, drafter: str, contexts: ContextSet, source: TreeSource, temperature: float
) -> list[RuleTime]:
    """Every rule at every budget. Top-k and top-p are off: DDTree's way has none."""
    some = contexts.select(contexts.spread(settings.timed))
    parts = {
        "drafter": bench.subject(drafter).fingerprint, "contexts": contexts_hash(some), "source": source.key(),
        "verifiers": settings.verifiers, "temperature": temperature, "repeats": settings.repeats,
        "hardware": hardware(bench.target.device),
    }  # fmt: skip
    result = bench.get(
        TimingResult, parts, lambda: _measure(bench, settings, drafter, some, source, Sampling(temperature))
    )
    return [
        _rule_time(rule, int(part), temperature, result.milliseconds[part], result.sequence_ids, bench.bootstrap)
        for part in source.parts
        for rule in (DDTREE, *settings.verifiers)
    ]


@torch.no_grad()
def _measure(
    bench: Bench, settings: TevStudy, drafter: str, contexts: ContextSet, source: TreeSource, sampling: Sampling
) -> TimingResult:
    rules = [DDTREE, *settings.verifiers]
    found: dict[str, dict[str, list[float]]] = {part: {rule: [] for rule in rules} for part in source.parts}
    model, device = bench.subject(drafter).drafter, bench.target.device
    with progress_bar(len(contexts), f"{settings.name}: clock, temperature {sampling.temperature:g}", "trees") as bar:
        for row in range(len(contexts)):
            rows = torch.tensor([row])
            draft, logits = grow_and_score(bench.target, model, contexts, rows, source, sampling, bench.seed)
            for label, part in source.parts.items():
                tree, columns = sub_draft(draft, part)
                for rule, runs in race(
                    _jobs(tree, logits[:, columns[0]], rules, sampling, bench.seed), settings.repeats, device
                ).items():
                    found[label][rule].append(runs.median)
            bench.stop.raise_if_set()
            bar.advance()
    return TimingResult(contexts.ids, found)


def _jobs(
    draft: Draft, logits: Tensor, rules: Sequence[str], sampling: Sampling, seed: int
) -> dict[str, Callable[[], BatchVerdict]]:
    """Each rule on one tree without padding, logits [1, M, V]; new draws at every call."""
    jobs: dict[str, Callable[[], BatchVerdict]] = {}
    for rule in rules:
        if rule == DDTREE:
            generator = generator_for(seed, "study", "clock", rule, device=logits.device)
            maps = child_maps(draft.trees)
            jobs[rule] = partial(ddtree_predraw, maps, logits, generator, sampling.temperature)
        else:
            generators = [generator_for(seed, "study", "clock", rule)]
            jobs[rule] = partial(get_verifier(rule).verify_batch, draft.trees, logits, sampling, generators)
    return jobs


def _rule_time(
    rule: str, budget: int, temperature: float, times: Mapping[str, Sequence[float]], sequence_ids: Sequence[str],
    bootstrap: iv.Bootstrap,
) -> RuleTime:  # fmt: skip
    def sums(name: str) -> Floats:
        return iv.cluster_sums(np.asarray(times[name]), sequence_ids)[0]

    ratio = None if rule == DDTREE else Interval.of(bootstrap(iv.ratio, sums(rule), sums(DDTREE)))
    milliseconds = float(np.mean(times[rule]))
    return RuleTime(verifier=rule, budget=budget, temperature=temperature, milliseconds=milliseconds, ratio=ratio)
