"""Choosing on one half, reporting on the other: made-up expectations with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from exittrain.errors import InputError
from exittrain.stages.evaluation.intervals import Bootstrap, Estimate
from exittrain.stages.studies.choices import (
    Option,
    Split,
    candidates,
    contest,
    contests,
    fastest,
    laws_of,
    longest,
)

SEQUENCES = 24  # two contexts each, so 12 sequences and 24 contexts a half
IDS = tuple(f"s{i}" for i in range(SEQUENCES) for _ in range(2))
SPLIT = Split.alternate(IDS)
BOOT = Bootstrap(200, 0)


def option(mean: float, name: str = "best_first + tev", budget: int = 8, temperature: float = 1.0, **more) -> Option:
    """Expectations around `mean`; heldout=: what the held-out half has instead; noise=: spread, by a seed."""
    trees, verifier = name.split(" + ")
    rng = np.random.default_rng(more.pop("seed", 0))
    values = mean + more.pop("noise", 0.1) * rng.standard_normal(len(IDS))
    values[SPLIT.chooses] += mean - values[SPLIT.chooses].mean()
    heldout = more.pop("heldout", mean)
    values[~SPLIT.chooses] += heldout - values[~SPLIT.chooses].mean()
    family = "sampled" if trees.startswith("sampled") else "fixed"
    return Option(temperature, trees, verifier, budget, family, values, **more)


def test_halves_alternate_by_sequence_and_keep_a_sequence_whole():
    split = Split.alternate(["a", "a", "b", "c", "c", "c", "d"])
    assert split.chooses.tolist() == [True, True, False, True, True, True, False]
    values = np.arange(7.0)
    assert split.mean(values, "calibration") == 2.6 and split.mean(values, "heldout") == 4.0
    sums, counts = split.sums(values, "calibration")
    assert (sums.tolist(), counts.tolist()) == ([1.0, 12.0], [2.0, 3.0])
    with pytest.raises(InputError, match="5 contexts of 1 sequence"):
        Split.alternate(["a"] * 5)


def test_the_longest_is_chosen_on_the_calibration_half_alone():
    lucky = option(2.0, heldout=9.0)
    good = option(2.1, "sampled_wor + traversal", heldout=1.0)
    assert longest([lucky, good], SPLIT) is good
    assert longest([good, lucky], SPLIT) is good


def test_equal_expectations_go_to_fixed_trees_then_tev_then_the_smaller_budget():
    names = ["sampled_wor + tev", "static + residual", "static + tev", "sampled_wor + traversal"]
    options = [option(2.0, name, budget) for name in names for budget in (16, 8)]
    best = longest(options, SPLIT)
    assert (best.name, best.family) == ("static + tev, 8 nodes", "fixed")
    assert longest([option(2.0, "static + residual", 16), option(2.0, "sampled_wor + tev", 8)], SPLIT).budget == 16
    assert longest([option(2.0, "static + residual", 8), option(2.0, "static + tev", 16)], SPLIT).budget == 16
    nudged = [*options, option(2.0 + 1e-5, "sampled_wor + traversal", 64)]
    assert longest(nudged, SPLIT) is nudged[-1]


def test_the_fastest_weighs_blocks_by_seconds_and_skips_what_was_not_timed():
    slow = option(4.0, budget=64, round_seconds=2.0)
    quick = option(2.5, budget=8, round_seconds=1.0)
    assert fastest([slow, quick, option(9.0)], SPLIT) is quick
    assert fastest([option(9.0)], SPLIT) is None
    assert slow.tokens_per_second(3.0) == 1.5 and option(1.0).tokens_per_second(3.0) is None


def test_candidates_are_the_best_verifier_of_each_temperature_budget_and_kind_of_trees():
    options = [
        option(base + 0.01 * budget + 0.2 * rule, f"{trees} + {name}", budget, temperature)
        for temperature, base in ((0.3, 1.0), (1.0, 2.0))
        for trees in ("static", "sampled_iid")
        for rule, name in enumerate(("tev", "rrs"))
        for budget in (8, 16)
    ]
    found = candidates(options, SPLIT)
    assert len(found) == 8 and all(one.verifier == "rrs" for one in found)
    assert len({(one.temperature, one.trees, one.budget) for one in found}) == 8


def test_verifiers_of_one_law_share_a_row_only_if_they_agree_everywhere():
    same = [option(2.0 + budget, f"sampled_iid + {rule}", budget) for rule in ("tev", "predraw") for budget in (8, 16)]
    other = [option(2.0 + 8, "sampled_iid + rrs", 8), option(2.0 + 16.1, "sampled_iid + rrs", 16)]
    elsewhere = [option(2.0 + budget, "static + tev", budget) for budget in (8, 16)]
    assert [(law.trees, law.verifiers) for law in laws_of([*same, *other, *elsewhere])] == [
        ("sampled_iid", ("tev", "predraw")), ("sampled_iid", ("rrs",)), ("static", ("tev",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heldout", "verdict", "holds"),
    [(2.5, "sampled wins", True), (2.0, "too close to call", True), (1.5, "fixed wins", False)],
)
def test_the_contest_is_judged_on_the_held_out_half(heldout, verdict, holds):
    fixed = option(2.0, "static + tev", seed=1)
    sampled = option(2.2, "sampled_wor + traversal", seed=2, heldout=heldout)
    found = contest([fixed, sampled], SPLIT, BOOT, 8)
    assert (found.verdict, found.holds, found.picked) == (verdict, holds, sampled)
    assert found.difference.value == pytest.approx(heldout - 2.0)
    assert found.sampled_length.value == pytest.approx(heldout) and found.fixed_length.value == pytest.approx(2.0)


def test_pairing_removes_what_contexts_have_in_common():
    """Contexts differ by far more than the families do: unpaired intervals overlap, the paired one is clear."""
    fixed = option(5.0, "static + tev", noise=2.0, seed=3)
    sampled = Option(1.0, "sampled_wor", "traversal", 8, "sampled", fixed.expected + 0.1)
    found = contest([fixed, sampled], SPLIT, BOOT, 8)
    assert found.verdict == "sampled wins"
    assert found.difference == Estimate(pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
    assert found.fixed_length.high > found.sampled_length.low


def test_contests_take_the_best_within_each_budget_and_need_both_families():
    fixed = [option(2.5, "static + tev", 8), option(2.4, "static + tev", 16)]
    sampled = [option(2.0, "sampled_wor + rrs_wor", 8), option(3.0, "sampled_wor + rrs_wor", 16)]
    small, large = contests([*fixed, *sampled], SPLIT, BOOT)
    assert (small.budget, small.fixed, small.sampled, small.picked) == (8, fixed[0], sampled[0], fixed[0])
    assert (large.budget, large.fixed, large.sampled, large.picked) == (16, fixed[0], sampled[1], sampled[1])
    assert contests(fixed, SPLIT, BOOT) == []


def test_few_sequences_give_no_verdict():
    split = Split.alternate(["a", "b", "c"])
    values = np.array([1.0, 2.0, 3.0])
    options = [Option(1.0, "x", "tev", 8, "fixed", values), Option(1.0, "y", "rrs", 8, "sampled", values + 1)]
    found = contest(options, split, BOOT, 8)
    assert (found.verdict, found.holds, found.difference.low) == ("no interval", None, None)
