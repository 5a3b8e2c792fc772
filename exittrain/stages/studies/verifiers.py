"""Every builder and verifier on the same contexts: which trees and which verifier serve this drafter best.

Half of the sequences measure the shapes and choose; what was chosen is reported on the other half.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import torch

from exittrain.drafters.calibration import Calibration, Choice
from exittrain.errors import InputError
from exittrain.law.seeding import seed_for
from exittrain.stages.evaluation.contexts import ContextSet
from exittrain.stages.evaluation.decoding import DecodeSettings, decode_cell, why_skipped
from exittrain.stages.evaluation.intervals import Estimate
from exittrain.stages.evaluation.output import hardware
from exittrain.stages.evaluation.results import DecodeResult
from exittrain.stages.evaluation.schema import Interval
from exittrain.stages.evaluation.tasks import EvalPrompt, Task
from exittrain.stages.studies.base import Bench, StudyReport
from exittrain.stages.studies.choices import Option, Split, candidates, fastest, longest
from exittrain.stages.studies.forests import Forest, plant
from exittrain.stages.studies.settings import VerifierStudy
from exittrain.stages.studies.verifier_tables import Decoding, Findings, tables
from exittrain.stages.studies.verifier_words import advice, plot

CLOCK_PROMPTS = 2  # decoded for the seconds of a round
BATCH = 8  # prompts side by side where nothing is timed
WARM_TOKENS = 4  # decoded first and thrown away: first rounds pay for allocations


def run_verifiers(bench: Bench) -> StudyReport:
    """The study `verifiers`; its calibration is saved beside the drafter, for `verifier: auto`.

    Raises:
        InputError: contexts of one sequence only, a builder without a verifier, no prompt with room for its answer.
        Interrupted: a signal came; finished cells are on disk.
    """
    settings, drafter = bench.settings, bench.default_drafter()
    assert isinstance(settings, VerifierStudy)
    contexts = bench.contexts([drafter], settings.depth)
    split = Split.alternate(contexts.ids)
    choosing = contexts.select(torch.from_numpy(split.rows("calibration").nonzero()[0]))
    prompts = choose_prompts(bench, drafter, settings, set(choosing.ids))
    forests = plant(bench, settings, drafter, choosing)
    options = [option for forest in forests for option in _options(bench, drafter, contexts, forest)]
    budget, warmest = sorted(set(settings.budgets))[:2][-1], _warmest(settings.temperatures)
    decoded = [
        Decoding(forest.temperature, forest.name, rule, _decode(bench, drafter, prompts, forest, rule, budget))
        for forest in forests
        if forest.temperature in check_temperatures(settings.temperatures)
        for rule in forest.verifiers
    ]
    at_warmest = {forest.name: forest for forest in forests if forest.temperature == warmest}
    clock = _clock(bench, drafter, prompts, at_warmest, candidates(options, split))
    options = [replace(o, round_seconds=_round_seconds(clock, o)) for o in options]
    found = Findings(
        drafter, options, split, decoded, budget, clock, warmest, hardware(bench.target.device), settings.draws,
        bench.bootstrap,
    )  # fmt: skip
    saved = _save_calibration(bench, forests, found)
    return StudyReport(tables(found), {"block-length": plot(found)}, _data(found, forests), [*advice(found), saved])


def _options(bench: Bench, drafter: str, contexts: ContextSet, forest: Forest) -> list[Option]:
    """Every verifier at every budget. At temperature 0 a verdict is no draw: one shows all."""
    draws = min(1, bench.settings.draws) if bench.at(forest.temperature).greedy else bench.settings.draws
    options = []
    for source in forest.sources():
        law = bench.laws(drafter, contexts, source, forest.verifiers, forest.temperature, draws)
        options += [
            Option(
                forest.temperature, forest.name, rule, int(part), forest.family, law.expected[part][rule],
                law.measured[part][rule] if law.draws else None, law.num_nodes[part],
            )
            for rule in forest.verifiers
            for part in source.parts
        ]  # fmt: skip
    return options


def _warmest(temperatures: Sequence[float]) -> float:
    """Temperature 1 where it is asked for, else the highest."""
    return 1.0 if 1.0 in temperatures else max(temperatures)


def check_temperatures(temperatures: Sequence[float]) -> set[float]:
    """Where prompts are decoded: the warmest and the lowest positive one; all of two."""
    if len(set(temperatures)) <= 2:
        return set(temperatures)
    return {_warmest(temperatures), min(t for t in temperatures if t > 0)}


def choose_prompts(bench: Bench, drafter: str, settings: VerifierStudy, calibrated: Collection[str]) -> Task:
    """Prompts of all tasks in turn, with room for their answers; of calibrated sequences only where no other is left.

    Raises InputError where no prompt has room.
    """
    positions = min(bench.target.max_positions, bench.subject(drafter).drafter.max_positions)
    columns = [[(task.name, prompt) for prompt in task.prompts] for task in bench.tasks]
    turns = [one for one in chain.from_iterable(zip_longest(*columns)) if one is not None]
    usable = [(n, p) for n, p in turns if why_skipped(p, positions, settings.max_new_tokens) is None]
    if not usable:
        raise InputError(
            f"no prompt leaves room for {settings.max_new_tokens} new tokens in {positions} positions: set "
            "suite.max_new_tokens lower"
        )
    usable.sort(key=lambda one: one[1].id in calibrated)
    chosen = [EvalPrompt(f"{name}/{prompt.id}", prompt.token_ids) for name, prompt in usable[: settings.prompts]]
    return Task("verifiers", tuple(chosen), ", ".join(task.source for task in bench.tasks))


def _decode(
    bench: Bench, drafter: str, prompts: Task, forest: Forest, rule: str, budget: int, clock: bool = False
) -> DecodeResult:
    """A stored cell: the prompts decoded from random streams of its own, so that no two cells deviate together.
    clock: the rounds are there to be timed, warm and of one prompt at a time."""
    subject, study = bench.subject(drafter), bench.settings
    seed = seed_for(bench.seed, "study", "decode", forest.name, rule, forest.temperature)
    settings = DecodeSettings(
        forest.builder, forest.shapes[budget], bench.at(forest.temperature), rule, study.max_new_tokens,
        1 if clock else BATCH, seed,
    )  # fmt: skip
    description = f"{study.name}: {forest.name} + {rule}, {budget} nodes, temperature {forest.temperature:g}"

    def make() -> DecodeResult:
        if clock:
            warm = replace(prompts, prompts=prompts.prompts[:1])
            short = replace(settings, max_new_tokens=WARM_TOKENS)
            decode_cell(bench.target, subject.drafter, warm, short, bench.stop, f"{description}, warming up")
        return decode_cell(bench.target, subject.drafter, prompts, settings, bench.stop, description)

    parts = {
        "drafter": subject.fingerprint, "prompts": prompts.fingerprint(), "clock": clock, "stream": seed,
        **settings.arguments(),
    }  # fmt: skip
    return bench.get(DecodeResult, parts, make)


def _clock(
    bench: Bench, drafter: str, prompts: Task, forests: Mapping[str, Forest], options: Sequence[Option]
) -> dict[tuple[str, str, int], dict[str, float]]:
    """Seconds a round by stage of every (trees, verifier, budget) that is best for its trees at some temperature."""
    few = replace(prompts, prompts=prompts.prompts[:CLOCK_PROMPTS])
    clock = {}
    for trees, rule, budget in sorted({(o.trees, o.verifier, o.budget) for o in options}):
        result = _decode(bench, drafter, few, forests[trees], rule, budget, clock=True)
        rounds = max(1, sum(len(trace.block_lengths) for trace in result.traces))
        clock[trees, rule, budget] = {stage: spent / rounds for stage, spent in result.stage_seconds.items()}
    return clock


def _round_seconds(clock: Mapping[tuple[str, str, int], Mapping[str, float]], option: Option) -> float | None:
    stages = clock.get((option.trees, option.verifier, option.budget))
    return None if stages is None else sum(stages.values())


def _save_calibration(bench: Bench, forests: Sequence[Forest], found: Findings) -> str:
    """Write the candidates beside the drafter; returns the sentence that says so."""
    folder = next(entrant.folder for entrant in bench.entrants if entrant.name == found.drafter)
    if folder is None:
        return f"The calibration is not saved: {found.drafter} has no folder. Save the drafter for verifier: auto."
    homes = {(forest.temperature, forest.name): forest for forest in forests}
    choices = []
    for option in candidates(found.options, found.split):
        forest = homes[option.temperature, option.trees]
        length = found.split.estimate(option.expected, "calibration", bench.bootstrap)
        shape = forest.shapes[option.budget]
        choices.append(
            Choice(
                option.temperature, option.budget, forest.builder, shape.depth, shape.width, shape.branching,
                option.verifier, length.value, length.low, length.high, option.round_seconds,
            )
        )  # fmt: skip
    sampling, fingerprint = bench.sampling, bench.subject(found.drafter).fingerprint
    made = Calibration(
        bench.target.fingerprint(), fingerprint, sampling.top_k, sampling.top_p, found.hardware, tuple(choices)
    )
    try:
        made.save(folder)
    except OSError as error:  # a folder that may not be written must not cost the study
        return (
            f"The calibration is not saved: {folder} cannot be written ({error.strerror}). Copy the drafter for auto."
        )
    return f"verifier: auto now serves {found.drafter} by this calibration ({folder})."


def _data(found: Findings, forests: Sequence[Forest]) -> dict[str, Any]:
    """Numbers alone; what a clock had a part in stands under "timing"."""
    split = found.split
    return {
        "drafter": found.drafter,
        "contexts": {half: int(split.rows(half).sum()) for half in ("calibration", "heldout")},
        "sequences": len(set(split.sequence_ids)),
        "acceptance_by_rank": [
            {"temperature": forest.temperature, "trees": forest.name, "acceptance": forest.acceptance}
            for forest in forests
            if forest.acceptance
        ],
        "laws": [
            {
                "temperature": law.temperature, "trees": law.trees, "verifiers": law.verifiers, "family": law.family,
                "budget": budget, "num_nodes": law.options[budget].num_nodes, "expected_block_length": _numbers(length),
            }
            for (law, budget), length in found.lengths.items()
        ],
        "longest": [
            _served(found, longest(found.at(temperature), found.split)) for temperature in found.temperatures
        ],
        "contests": [
            {
                "budget": one.budget, "fixed": _served(found, one.fixed), "sampled": _served(found, one.sampled),
                "difference": _numbers(one.difference), "verdict": one.verdict, "picked": one.picked.family,
                "holds": one.holds,
            }
            for one in found.contests
        ],
        "decoded": [{**vars(one), "expected": one.expected.model_dump()} for one in found.checks],
        "verdicts": [{**vars(one), "difference": _numbers(one.difference)} for one in found.verdicts],
        "timing": _timing(found),
    }  # fmt: skip


def _timing(found: Findings) -> dict[str, Any]:
    quickest = [option for t in found.temperatures if (option := fastest(found.at(t), found.split)) is not None]
    return {
        "hardware": found.hardware,
        "temperature": found.clock_temperature,
        "rounds": [
            {"trees": trees, "verifier": rule, "budget": budget, "seconds": dict(seconds)}
            for (trees, rule, budget), seconds in found.clock.items()
        ],
        "fastest": [
            {**_served(found, one), "tokens_per_second": one.tokens_per_second(found.heldout(one).value)}
            for one in quickest
        ],
    }


def _served(found: Findings, option: Option) -> dict[str, Any]:
    return {
        "temperature": option.temperature, "trees": option.trees, "verifier": option.verifier,
        "budget": option.budget, "heldout_block_length": _numbers(found.heldout(option)),
    }  # fmt: skip


def _numbers(estimate: Estimate) -> dict[str, float | None]:
    return Interval.of(estimate).model_dump()
