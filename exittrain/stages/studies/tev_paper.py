"""`tev-paper`: drafter x verifier on best-first trees, the crossed table of the TEV paper.

Every drafter's trees stand at the same contexts. predraw and tev have one law there (math.md section 2), so block
lengths tell drafters apart and milliseconds tell verifiers apart; verdicts are drawn as the check of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from exittrain.build.base import TreeShape
from exittrain.errors import InputError, nearest
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation.output import hardware
from exittrain.stages.evaluation.schema import Interval, Number, Part
from exittrain.stages.evaluation.summary import expected_beside_measured
from exittrain.stages.studies import tev_tables as tables
from exittrain.stages.studies.base import StudyReport
from exittrain.stages.studies.laws import LawResult, TreeSource
from exittrain.stages.studies.published import TevFigures, differs_table, read_figures
from exittrain.stages.studies.settings import TevStudy
from exittrain.stages.studies.tev_timing import RuleTime, time_verifiers

if TYPE_CHECKING:
    from exittrain.stages.evaluation.contexts import ContextSet
    from exittrain.stages.evaluation.setup import Entrant
    from exittrain.stages.studies.base import Bench


@dataclass(frozen=True)
class Contender:
    """A drafter of the table. published: its name among the published figures, or none."""

    name: str
    published: str | None


class Point(Part):
    """One drafter, verifier, budget and temperature; expected is exact, verdicts the mean of draws on the same trees.

    agrees: the verdicts lie where they must 95 times in 100 (None: none were drawn, or too few sequences).
    """

    drafter: str
    published: str | None
    verifier: str
    budget: int
    temperature: Number
    expected: Interval
    verdicts: Number | None
    agrees: bool | None


class DrafterGain(Part):
    """Of one drafter's block length over another's, in percent, sequences paired."""

    drafter: str
    control: str
    published: tuple[str | None, str | None]
    budget: int
    temperature: Number
    percent: Interval


def run_tev_paper(bench: Bench) -> StudyReport:
    """Warm start, control and exit arm, each at every budget and temperature, and the verifiers against the clock."""
    settings = bench.settings
    assert isinstance(settings, TevStudy)
    figures = read_figures("tev-paper", TevFigures)
    rows, said = choose_drafters(bench.entrants, settings.drafters, figures)
    shape = TreeShape(max(settings.budgets), settings.depth, settings.width)
    source = TreeSource("best_first", shape, {str(budget): budget for budget in sorted(set(settings.budgets))})
    contexts = bench.contexts([row.name for row in rows], settings.depth)
    temperatures = list(dict.fromkeys(settings.temperatures))
    laws = {}
    for row in rows:  # one drafter in memory at a time
        for t in temperatures:
            draws = settings.draws if t > 0 else min(1, settings.draws)  # at 0 every verdict is the same
            laws[row.name, t] = bench.laws(row.name, contexts, source, settings.verifiers, t, draws)
    points = [
        point
        for t in temperatures
        for budget in source.parts
        for row in rows
        for point in points_of(laws[row.name, t], row, int(budget), t, bench.bootstrap)
    ]
    gains = [
        gain
        for t in temperatures
        for budget in source.parts
        for gain in gains_of(rows, {row.name: laws[row.name, t] for row in rows}, int(budget), t, bench.bootstrap)
    ]
    times = _times(bench, settings, rows[-1].name, contexts, source)
    spread = max(disagreement(law) for law in laws.values())
    note = (
        f"Target {bench.target.name}: {len(contexts):,} contexts of {len(set(contexts.ids)):,} sequences, trees of "
        f"best_first, depth {shape.depth}, width {shape.width}. Exact given each tree; intervals over sequences."
    )
    clock = (
        f"{settings.timed} trees of {rows[-1].name}, one at a time, {settings.repeats} rounds, all rules in turn in "
        f"one process; everything from logits to (path, bonus). {hardware(bench.target.device)}."
    )
    return StudyReport(
        [
            *(tables.crossed_table([p for p in points if p.temperature == t], figures, note) for t in temperatures),
            *([tables.gain_table(gains, figures)] if gains else []),
            *([tables.time_table(times, figures, clock)] if times else []),
            differs_table(figures),
        ],
        {"block-length": tables.budget_plot(points)},
        {
            "points": [point.model_dump(mode="json") for point in points],
            "gains": [gain.model_dump(mode="json") for gain in gains],
            "largest_difference_of_verifiers": spread,
            "timing": {"trees": rows[-1].name, "rules": [time.model_dump(mode="json") for time in times]},
            "published": figures.model_dump(mode="json"),
        },
        [*said, *tables.summary_lines(gains, times, settings.verifiers, spread)],
    )


def choose_drafters(
    entrants: Sequence[Entrant], named: Sequence[str] | None, figures: TevFigures
) -> tuple[list[Contender], list[str]]:
    """The rows, earliest first (a later one's gain is over an earlier), and sentences on what stands for what.

    named: these instead of the study's own choice: warm start, control, and the arm trained with `exit` (else the first
    with a node objective; equal steps with the control preferred). Raises InputError on an unknown name.
    """
    if named:
        known = {entrant.name: entrant for entrant in entrants}
        wrong = next((name for name in named if name not in known), None)
        if wrong is not None:
            raise InputError(f"no drafter {wrong!r}{nearest(wrong, list(known))} (there are: {', '.join(known)})")
        return [Contender(name, _published_as(known[name], figures)) for name in dict.fromkeys(named)], []
    if all(entrant.role == "drafter" for entrant in entrants):
        note = (
            "Drafters given by folder have no roles (warm start, control, exit): no published block length is beside."
        )
        return [Contender(entrant.name, None) for entrant in entrants], [note]
    starts = [entrant for entrant in entrants if entrant.role == "warm start"][:1]
    controls = [entrant for entrant in entrants if entrant.role == "control"][:1]
    arms = _node_arms(entrants, controls)[:1]
    said = ["The run has no control: what training with a node term gained is not told apart."] if not controls else []
    if not arms:
        said.append("The run has no arm with a node objective, so the exit row is missing.")
    elif arms[0].objective == "exit":
        said.append(f"The exit row is the arm {arms[0].name!r}.")
    else:
        beside = _published_as(arms[0], figures) or "exit"
        said.append(
            f"No arm was trained with `exit`: {arms[0].name!r} ({arms[0].objective}) takes its row, with the published "
            f"figures of `{beside}` beside it."
        )
    rows = [Contender(entrant.name, _published_as(entrant, figures)) for entrant in (*starts, *controls)]
    return rows + [Contender(arm.name, _published_as(arm, figures) or "exit") for arm in arms], said


def _node_arms(entrants: Sequence[Entrant], controls: Sequence[Entrant]) -> list[Entrant]:
    """Arms with a node objective, the likeliest exit row first."""
    steps = [control.steps for control in controls]
    arms = [e for e in entrants if e.role == "arm" and e.objective not in (None, "token")]
    return sorted(arms, key=lambda arm: (arm.objective != "exit", arm.steps not in steps))


def _published_as(entrant: Entrant, figures: TevFigures) -> str | None:
    roles = {"warm start": "warm", "control": "control"}
    known = {name for block in figures.objectives.values() for name in block}
    return roles.get(entrant.role) or (entrant.objective if entrant.objective in known else None)


def points_of(law: LawResult, row: Contender, budget: int, temperature: float, bootstrap: iv.Bootstrap) -> list[Point]:
    points = []
    for verifier, values in law.expected[str(budget)].items():
        sums, counts = iv.cluster_sums(values, law.sequence_ids)
        verdicts, agrees = None, None
        if law.measured:
            drawn = law.measured[str(budget)][verifier]
            drawn_sums, _ = iv.cluster_sums(drawn, law.sequence_ids)
            verdicts, agrees = float(drawn.mean()), expected_beside_measured(drawn_sums, sums, counts, bootstrap)[1]
        expected = Interval.of(bootstrap(iv.ratio, sums, counts))
        points.append(
            Point(
                drafter=row.name, published=row.published, verifier=verifier, budget=budget, temperature=temperature,
                expected=expected, verdicts=verdicts, agrees=agrees,
            )
        )  # fmt: skip
    return points


def gains_of(
    rows: Sequence[Contender], laws: dict[str, LawResult], budget: int, temperature: float, bootstrap: iv.Bootstrap
) -> list[DrafterGain]:
    """Every later drafter over every earlier, by the law that all fixed verifiers share."""

    def sums(row: Contender) -> tuple[Any, Any]:
        law = laws[row.name]
        return iv.cluster_sums(next(iter(law.expected[str(budget)].values())), law.sequence_ids)

    return [
        DrafterGain(
            drafter=late.name, control=early.name, published=(late.published, early.published), budget=budget,
            temperature=temperature, percent=Interval.of(bootstrap(iv.gain_of_ratios, *sums(late), *sums(early))),
        )
        for early, late in combinations(rows, 2)
    ]  # fmt: skip


def disagreement(law: LawResult) -> float:
    """The largest difference between two verifiers' expectations of one tree: theory says none."""
    return max(float(np.ptp(np.stack(list(rules.values())), axis=0).max()) for rules in law.expected.values())


def _times(bench: Bench, settings: TevStudy, drafter: str, contexts: ContextSet, source: TreeSource) -> list[RuleTime]:
    """At temperature 0 there is nothing to compare: every rule follows the argmax."""
    if not settings.timed:
        return []
    warm = [temperature for temperature in dict.fromkeys(settings.temperatures) if temperature > 0]
    return [time for t in warm for time in time_verifiers(bench, settings, drafter, contexts, source, t)]
