"""What the study `verifiers` found, as tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exittrain.decoding.result import STAGES
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation.results import DecodeResult
from exittrain.stages.evaluation.schema import Interval
from exittrain.stages.evaluation.summary import FLOAT_NOISE, expected_beside_measured
from exittrain.stages.evaluation.tables import Table, interval, number
from exittrain.stages.studies.choices import Contest, Law, Option, Split, contests, fastest, laws_of, longest

AGREES = {True: "agrees", False: "differs", None: "no interval"}


@dataclass(frozen=True)
class Decoding:
    """Prompts decoded with one verifier on trees of one kind, at the study's budget for that."""

    temperature: float
    trees: str
    verifier: str
    result: DecodeResult


@dataclass(frozen=True, eq=False)
class Findings:
    """All that was measured. clock: (trees, verifier, budget) -> seconds a round by stage; decode_budget: nodes of the
    trees decoded; clock_temperature: at which rounds were timed, on `hardware`; draws: verdicts a tree."""

    drafter: str
    options: Sequence[Option]
    split: Split
    decoded: Sequence[Decoding]
    decode_budget: int
    clock: Mapping[tuple[str, str, int], Mapping[str, float]]
    clock_temperature: float
    hardware: str
    draws: int
    bootstrap: iv.Bootstrap

    @cached_property
    def laws(self) -> list[Law]:
        return laws_of(self.options)

    @cached_property
    def lengths(self) -> dict[tuple[Law, int], iv.Estimate]:
        """Of each law at each budget, over the contexts of both halves."""
        return {
            (law, budget): self.split.estimate(option.expected, "all", self.bootstrap)
            for law in self.laws
            for budget, option in law.options.items()
        }

    @cached_property
    def contests(self) -> list[Contest]:
        return contests(self.options, self.split, self.bootstrap)

    @cached_property
    def checks(self) -> list[DecodeCheck]:
        """One a decoding, then one a verifier over all its decodings."""
        rules = dict.fromkeys(one.verifier for one in self.decoded)
        pooled = [[one for one in self.decoded if one.verifier == rule] for rule in rules]
        return [check_decoding(group, self.bootstrap) for group in [*([one] for one in self.decoded), *pooled]]

    @cached_property
    def verdicts(self) -> list[VerdictCheck]:
        rules = dict.fromkeys(option.verifier for option in self.options if option.measured is not None)
        return [check_verdicts(self.options, self.split, rule, self.bootstrap) for rule in rules]

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(option.temperature for option in self.options))

    def at(self, temperature: float) -> list[Option]:
        return [option for option in self.options if option.temperature == temperature]

    def heldout(self, option: Option) -> iv.Estimate:
        return self.split.estimate(option.expected, "heldout", self.bootstrap)


@dataclass(frozen=True)
class DecodeCheck:
    """Pooled block length measured by decoding, beside what the verifier expected at the very same rounds. temperature
    and trees are None over all of them; agrees: measured lies in the interval of `expected`."""

    temperature: float | None
    trees: str | None
    verifier: str
    num_rounds: int
    measured: float
    expected: Interval
    agrees: bool | None


@dataclass(frozen=True)
class VerdictCheck:
    """Measured minus expected block length of sampled verdicts, over all trees of all temperatures and budgets."""

    verifier: str
    num_trees: int
    difference: iv.Estimate


def check_decoding(group: Sequence[Decoding], bootstrap: iv.Bootstrap) -> DecodeCheck:
    """Decodings of one verifier, pooled. Whatever came before, a round's deviation from what was expected of its own
    tree has mean zero, so deviations are uncorrelated and rounds are the bootstrap's units. Where all rounds brought
    the same length though none was sure of it, what is rare has not been seen yet: no interval."""
    traces = [trace for one in group for trace in one.result.traces]
    measured = np.array([length for t in traces for length in t.block_lengths], dtype=np.float64)
    expected = np.array([length for t in traces for length in t.expected_block_lengths or ()], dtype=np.float64)
    part, agrees = expected_beside_measured(measured, expected, np.ones_like(measured), bootstrap)
    if np.ptp(measured) == 0 and np.abs(measured - expected).max() > FLOAT_NOISE:
        part, agrees = Interval(value=float(expected.mean())), None
    alone = group[0] if len(group) == 1 else None
    return DecodeCheck(
        None if alone is None else alone.temperature, None if alone is None else alone.trees, group[0].verifier,
        len(measured), float(measured.mean()), part, agrees,
    )  # fmt: skip


def check_verdicts(options: Sequence[Option], split: Split, rule: str, bootstrap: iv.Bootstrap) -> VerdictCheck:
    gaps = [o.measured - o.expected for o in options if o.verifier == rule and o.measured is not None]
    sums, counts = split.sums(np.sum(gaps, axis=0), "all")
    return VerdictCheck(rule, len(gaps) * len(split.sequence_ids), bootstrap(iv.ratio, sums, counts * len(gaps)))


def show(estimate: iv.Estimate) -> str:
    return interval(Interval.of(estimate))


def signed(estimate: iv.Estimate, digits: int = 3) -> str:
    """`+0.120 [+0.050, +0.190]`."""
    known = estimate.low is not None and estimate.high is not None
    bounds = f" [{estimate.low:+.{digits}f}, {estimate.high:+.{digits}f}]" if known else ""
    return f"{estimate.value:+.{digits}f}{bounds}"


def tables(found: Findings) -> list[Table]:
    """In reading order: what to serve with, who wins, every expectation, and the cross-checks."""
    parts = [choice_table(found), contest_table(found), *(law_table(found, t) for t in found.temperatures)]
    return [table for table in [*parts, decode_table(found), verdict_table(found), clock_table(found)] if table.rows]


def choice_table(found: Findings) -> Table:
    rows = []
    for temperature in found.temperatures:
        best, quick = longest(found.at(temperature), found.split), fastest(found.at(temperature), found.split)
        cells = ["", "", ""]
        if quick is not None:
            length = found.heldout(quick)
            cells = [quick.name, number(quick.tokens_per_second(length.value), 1), show(length)]
        rows.append((f"{temperature:g}", best.name, show(found.heldout(best)), *cells))
    return Table(
        f"What to serve {found.drafter} with",
        "Chosen on one half of the sequences; block lengths (bonus counted) are those of the other half. Tokens/s: "
        f"block length over the seconds of a round, which were measured at temperature {found.clock_temperature:g}, "
        f"one prompt at a time: {found.hardware}.",
        ("temperature", "longest expected block", "block length", "most tokens/s", "tokens/s", "block length there"),
        tuple(rows),
    )


def contest_table(found: Findings) -> Table:
    rows = [
        (
            f"{one.temperature:g}", f"{one.budget}", one.fixed.name, show(one.fixed_length), one.sampled.name,
            show(one.sampled_length), signed(one.difference), one.verdict,
            one.picked.family + ("" if one.holds is not False else " (the other is better)"),
        )
        for one in found.contests
    ]  # fmt: skip
    return Table(
        "Trees chosen by score (fixed) against drawn trees (sampled)",
        "The best of each family within the budget, chosen on one half of the sequences, compared on the other: "
        "expected block length, and sampled minus fixed on the same contexts. verifier: auto takes the family with the "
        "longer block on the half that chooses.",
        ("temperature", "nodes at most", "best fixed", "block length", "best sampled", "block length",
         "difference", "verdict", "auto takes"),
        tuple(rows),
    )  # fmt: skip


def law_table(found: Findings, temperature: float) -> Table:
    laws = [law for law in found.laws if law.temperature == temperature]
    budgets = sorted({budget for law in laws for budget in law.options})
    rows = [
        (f"{law.trees} + {' = '.join(law.verifiers)}", *(show(found.lengths[law, budget]) for budget in budgets))
        for law in laws
    ]
    sequences = len(set(found.split.sequence_ids))
    return Table(
        f"Temperature {temperature:g}: expected block length by budget",
        f"Bonus counted; exact given each tree, one tree a context: mean over all {len(found.split.sequence_ids):,} "
        f"contexts of {sequences:,} sequences, 95 % intervals over sequences. Verifiers of one law share a row. "
        "static and sampled trees have the shape that is best for the acceptance by rank, measured on one half.",
        ("trees + verifier", *(f"{budget} nodes" for budget in budgets)),
        tuple(rows),
    )


def decode_table(found: Findings) -> Table:
    rows = [
        (
            "all" if one.temperature is None else f"{one.temperature:g}", one.trees or "all", one.verifier,
            f"{one.num_rounds:,}", number(one.measured), interval(one.expected), AGREES[one.agrees],
        )
        for one in found.checks
    ]  # fmt: skip
    return Table(
        f"Decoded block length beside the expected one, trees of at most {found.decode_budget} nodes",
        "Bonus counted, all rounds pooled. Expected: the verifier's own expectation given each round's tree, with the "
        "95 % interval over rounds in which the measured mean must lie; of twenty rows about one does not, by chance.",
        ("temperature", "trees", "verifier", "rounds", "measured", "expected", ""),
        tuple(rows),
    )


def verdict_table(found: Findings) -> Table:
    rows = [(one.verifier, f"{one.num_trees:,}", signed(one.difference, 4)) for one in found.verdicts]
    return Table(
        "Sampled verdicts beside their expectation",
        f"Measured minus expected block length: {found.draws} verdicts a tree (1 at temperature 0), all trees of all "
        "temperatures and budgets, 95 % intervals over sequences.",
        ("verifier", "trees", "measured - expected"),
        tuple(rows),
    )


def clock_table(found: Findings) -> Table:
    rows = [
        (
            f"{trees} + {rule}", f"{budget}", *(number(1e3 * seconds[stage], 2) for stage in STAGES),
            number(1e3 * sum(seconds.values()), 2),
        )
        for (trees, rule, budget), seconds in found.clock.items()
    ]  # fmt: skip
    return Table(
        f"Milliseconds of a round (wall clock, temperature {found.clock_temperature:g})",
        f"Mean over rounds, one prompt at a time. {found.hardware}.",
        ("trees + verifier", "nodes at most", *STAGES, "round"),
        tuple(rows),
    )
