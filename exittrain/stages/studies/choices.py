"""Which serving choice is best: chosen on one half of the contexts, reported on the other. Pure.

Shapes: A contexts, the same ones in the same order for every option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exittrain.errors import InputError
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation.measures import Floats

EQUAL = 1e-6  # exact expectations closer than this are the same number
Family = Literal["fixed", "sampled"]
Half = Literal["calibration", "heldout", "all"]


@dataclass(frozen=True, eq=False)
class Option:
    """One way to serve at one temperature, and the block lengths it gives.

    trees: the builder, with its shape where that is not the measured one; family: whether the trees are chosen by score
    or drawn; expected [A]: exact given each tree; measured [A]: means of `draws` sampled verdicts on the same trees;
    num_nodes: drafted nodes, mean over contexts; round_seconds: wall clock, None where it was not measured.
    """

    temperature: float
    trees: str
    verifier: str
    budget: int
    family: Family
    expected: Floats
    measured: Floats | None = None
    num_nodes: float = 0.0
    round_seconds: float | None = None

    @property
    def name(self) -> str:
        """`sampled_wor + traversal, 64 nodes`."""
        return f"{self.trees} + {self.verifier}, {self.budget} nodes"

    def tokens_per_second(self, block_length: float) -> float | None:
        return None if not self.round_seconds else block_length / self.round_seconds


@dataclass(frozen=True, eq=False)
class Split:
    """Contexts in two halves by sequence. sequence_ids: of the A contexts; chooses [A] bool: the calibration half."""

    sequence_ids: tuple[str, ...]
    chooses: NDArray[np.bool_]

    @classmethod
    def alternate(cls, sequence_ids: Sequence[str]) -> Split:
        """Every other sequence chooses, the first one included. Raises InputError below two sequences."""
        order = list(dict.fromkeys(sequence_ids))
        if len(order) < 2:
            raise InputError(
                f"{len(sequence_ids)} contexts of {len(order)} sequence: one half of the sequences chooses and the "
                "other reports, so at least 2 are needed; take more contexts or more prompts"
            )
        choosing = set(order[::2])
        return cls(tuple(sequence_ids), np.array([name in choosing for name in sequence_ids]))

    def rows(self, half: Half) -> NDArray[np.bool_]:
        """[A] bool."""
        return {"calibration": self.chooses, "heldout": ~self.chooses, "all": np.ones_like(self.chooses)}[half]

    def mean(self, values: Floats, half: Half) -> float:
        return float(values[self.rows(half)].mean())

    def sums(self, values: Floats, half: Half) -> tuple[Floats, Floats]:
        """([U] sums, [U] counts) over the half's sequences: what a bootstrap resamples."""
        rows = self.rows(half)
        return iv.cluster_sums(values[rows], [name for name, row in zip(self.sequence_ids, rows, strict=True) if row])

    def estimate(self, values: Floats, half: Half, bootstrap: iv.Bootstrap) -> iv.Estimate:
        """The half's mean and its interval over sequences."""
        return bootstrap(iv.ratio, *self.sums(values, half))


def longest(options: Sequence[Option], split: Split) -> Option:
    """The longest expected block on the calibration half. Among equals (1e-6), as `Calibration.choose`: trees chosen by
    score before drawn ones, `tev` before others, the smaller budget, then by name."""
    means = [split.mean(option.expected, "calibration") for option in options]
    level = [option for option, mean in zip(options, means, strict=True) if mean >= max(means) - EQUAL]
    return min(level, key=_rank)


def _rank(option: Option) -> tuple[bool, bool, int, str, str]:
    return option.family != "fixed", option.verifier != "tev", option.budget, option.verifier, option.trees


def fastest(options: Sequence[Option], split: Split) -> Option | None:
    """The most tokens a second by the calibration half's expected blocks; None where no option was timed."""
    timed = [option for option in options if option.round_seconds]
    return max(timed, key=lambda o: split.mean(o.expected, "calibration") / (o.round_seconds or 1.0), default=None)


def candidates(options: Sequence[Option], split: Split) -> list[Option]:
    """For each temperature, budget and kind of trees the option of the verifier that is best for it."""
    groups: dict[tuple[float, int, str], list[Option]] = {}
    for option in options:
        groups.setdefault((option.temperature, option.budget, option.trees), []).append(option)
    return [longest(group, split) for group in groups.values()]


@dataclass(frozen=True, eq=False)
class Law:
    """Verifiers that give the same blocks on the same trees, and the first one's option at each budget."""

    temperature: float
    trees: str
    verifiers: tuple[str, ...]
    family: Family
    options: dict[int, Option]

    def agrees(self, other: Law) -> bool:
        """Equal expectations (1e-6) at every context and budget."""
        gaps = [np.abs(one.expected - other.options[budget].expected).max() for budget, one in self.options.items()]
        return bool(max(gaps) <= EQUAL)


def laws_of(options: Sequence[Option]) -> list[Law]:
    """One a temperature, kind of trees and set of verifiers that agree, in the order listed."""
    columns: dict[tuple[float, str], dict[str, dict[int, Option]]] = {}
    for option in options:
        by_rule = columns.setdefault((option.temperature, option.trees), {})
        by_rule.setdefault(option.verifier, {})[option.budget] = option
    found: list[Law] = []
    for (temperature, trees), by_rule in columns.items():
        laws: list[Law] = []
        for rule, by_budget in by_rule.items():
            law = Law(temperature, trees, (rule,), next(iter(by_budget.values())).family, by_budget)
            home = next((index for index, known in enumerate(laws) if known.agrees(law)), None)
            if home is None:
                laws.append(law)
            else:
                laws[home] = replace(laws[home], verifiers=(*laws[home].verifiers, rule))
        found += laws
    return found


@dataclass(frozen=True, eq=False)
class Contest:
    """Both families' best options of at most `budget` nodes, chosen on the calibration half, beside each other on the
    held-out half. difference: sampled minus fixed, paired over the held-out sequences; picked: what `verifier: auto`
    takes at this temperature and budget.
    """

    temperature: float
    budget: int
    fixed: Option
    sampled: Option
    fixed_length: iv.Estimate
    sampled_length: iv.Estimate
    difference: iv.Estimate
    picked: Option

    @property
    def verdict(self) -> str:
        low, high = self.difference.low, self.difference.high
        if low is None or high is None:
            return "no interval"
        if low > EQUAL:
            return "sampled wins"
        return "fixed wins" if high < -EQUAL else "too close to call"

    @property
    def holds(self) -> bool | None:
        """Whether the picked family is no worse than the other beyond the interval; None without one."""
        if self.verdict == "no interval":
            return None
        return self.verdict in (f"{self.picked.family} wins", "too close to call")


def contest(options: Sequence[Option], split: Split, bootstrap: iv.Bootstrap, budget: int) -> Contest | None:
    """The two families among options of one temperature; None where there is only one."""
    within = [option for option in options if option.budget <= budget]
    families = [[option for option in within if option.family == family] for family in ("fixed", "sampled")]
    if not all(families):
        return None
    fixed, sampled = (longest(family, split) for family in families)
    fixed_sums, counts = split.sums(fixed.expected, "heldout")
    sampled_sums, _ = split.sums(sampled.expected, "heldout")
    return Contest(
        fixed.temperature, budget, fixed, sampled,
        bootstrap(iv.ratio, fixed_sums, counts), bootstrap(iv.ratio, sampled_sums, counts),
        bootstrap(iv.difference_of_ratios, sampled_sums, fixed_sums, counts), longest([fixed, sampled], split),
    )  # fmt: skip


def contests(options: Sequence[Option], split: Split, bootstrap: iv.Bootstrap) -> list[Contest]:
    """Of every temperature and budget, in that order; none where all trees are of one family."""
    found = []
    for temperature in dict.fromkeys(option.temperature for option in options):
        here = [option for option in options if option.temperature == temperature]
        found += [contest(here, split, bootstrap, budget) for budget in sorted({option.budget for option in here})]
    return [one for one in found if one is not None]
