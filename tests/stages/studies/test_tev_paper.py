"""The study `tev-paper` on tiny models, its choice of drafters, its arithmetic, and the figures of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_study import entrant, sequences, tiny_target

from exittrain.errors import InputError, Interrupted
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.intervals import Bootstrap
from exittrain.stages.evaluation.schema import Interval
from exittrain.stages.evaluation.setup import Entrant
from exittrain.stages.studies import base, tev_timing
from exittrain.stages.studies.laws import LawResult
from exittrain.stages.studies.published import TevFigures, gain_percent, read_figures
from exittrain.stages.studies.run import study
from exittrain.stages.studies.settings import load_suite
from exittrain.stages.studies.tev_paper import Contender, Point, choose_drafters, disagreement, gains_of, points_of
from exittrain.stages.studies.tev_tables import gain_table, published_length, summary_lines, time_table
from exittrain.stages.studies.tev_timing import DDTREE, RuleTime

BOOT = Bootstrap(200, 0)
FIGURES = read_figures("tev-paper", TevFigures)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def entrants():
    return [
        entrant("warm start", "warm start", noise=0.6), entrant("control", "control", "token", noise=0.3),
        entrant("far", "arm", "reach_kl", noise=0.5), entrant("weighted", "arm", "exit", noise=0.1),
    ]  # fmt: skip


def run(target, entrants, folder: Path, stop: StopFlag | None = None, **changes):
    small = {
        "temperatures": [0.0, 1.0], "budgets": [8, 3], "contexts": 20, "draws": 24, "bootstrap": 60, "depth": 3,
        "width": 4, "timed": 3, "repeats": 2,
    }  # fmt: skip
    settings = load_suite("tev-paper").model_copy(update={**small, **changes})
    return study(target, entrants, settings, folder, lambda: None, sequences(), stop=stop)


@pytest.fixture(scope="module")
def folder(target, entrants, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tev")
    run(target, entrants, path)
    return path


def results(folder: Path) -> dict:
    return json.loads((folder / "study.json").read_text())["results"]


def test_drafters_tell_lengths_apart_and_verifiers_do_not(folder):
    points = {(p["drafter"], p["verifier"], p["budget"], p["temperature"]): p for p in results(folder)["points"]}
    assert len(points) == 3 * 2 * 2 * 2 and not any(name == "far" for name, *_ in points)
    for (drafter, verifier, budget, temperature), point in points.items():
        length = point["expected"]["value"]
        assert length == points[drafter, "tev", budget, temperature]["expected"]["value"]
        assert 1 <= length <= 4
        if temperature == 0:  # no randomness: the one verdict is the expectation
            assert point["verdicts"] == pytest.approx(length, abs=1e-6) and point["agrees"]
        else:
            assert point["verdicts"] == pytest.approx(length, abs=0.15)  # four standard errors of 480 verdicts
        assert length <= points[drafter, verifier, 8, temperature]["expected"]["value"]  # nested trees
    assert results(folder)["largest_difference_of_verifiers"] < 1e-9
    near, control, warm = (
        points[name, "tev", 8, 1.0]["expected"]["value"] for name in ("weighted", "control", "warm start")
    )
    assert near > control > warm
    gains = {(g["drafter"], g["control"], g["budget"], g["temperature"]): g for g in results(folder)["gains"]}
    assert len(gains) == 3 * 2 * 2
    assert gains["weighted", "control", 8, 1.0]["percent"]["value"] == pytest.approx(
        100 * (near / control - 1), abs=1e-4
    )
    assert gains["control", "warm start", 8, 1.0]["percent"]["value"] == pytest.approx(
        100 * (control / warm - 1), abs=1e-4
    )


def test_the_clock_is_beside_the_numbers_not_among_them(folder):
    timing = results(folder)["timing"]
    assert timing["trees"] == "weighted"
    rules = {(time["temperature"], time["budget"], time["verifier"]): time for time in timing["rules"]}
    assert set(rules) == {(1.0, budget, rule) for budget in (3, 8) for rule in (DDTREE, "predraw", "tev")}
    for (_, budget, rule), time in rules.items():
        base_time = rules[1.0, budget, DDTREE]["milliseconds"]
        assert time["milliseconds"] > 0
        if rule == DDTREE:
            assert time["ratio"] is None
        else:
            assert time["ratio"]["value"] == pytest.approx(time["milliseconds"] / base_time, rel=1e-3)
    text = (folder / "table.md").read_text()
    assert "The exit row is the arm 'weighted'." in text and "OPD" not in text
    assert "4.56" not in text  # figures of other targets
    assert "argmax" in text and "64 tokens only" in text  # what differs is said


def test_a_killed_study_goes_on_and_keeps_what_the_clock_said(target, entrants, folder, tmp_path, monkeypatch):
    made, stop, original = [], StopFlag(), base.measure_laws

    def stops_at_the_fourth(*args, **kwargs):
        made.append(1)
        if len(made) == 4:
            stop.set("SIGTERM")
        return original(*args, **kwargs)

    monkeypatch.setattr(base, "measure_laws", stops_at_the_fourth)
    with pytest.raises(Interrupted):
        run(target, entrants, tmp_path, stop)
    assert not (tmp_path / "study.json").exists()
    run(target, entrants, tmp_path)
    assert len(made) == 4 + (6 - 3)
    monkeypatch.setattr(tev_timing, "race", None)  # the clock is not started again
    before = (tmp_path / "study.json").read_bytes()
    run(target, entrants, tmp_path)
    assert len(made) == 7 and (tmp_path / "study.json").read_bytes() == before
    mine, theirs = results(tmp_path), results(folder)
    assert {**mine, "timing": None} == {**theirs, "timing": None}


def test_a_run_without_arms_gets_the_rows_it_has(target, entrants, tmp_path):
    report = run(target, entrants[:1], tmp_path, contexts=10, timed=0, draws=0, temperatures=[1.0])
    assert [point["drafter"] for point in report.data["points"]] == ["warm start"] * 4
    assert report.data["gains"] == [] and report.data["timing"]["rules"] == []
    assert all(point["verdicts"] is None for point in report.data["points"])
    assert "has no control" in report.advice[0] and "exit row is missing" in report.advice[1]


def test_an_unknown_drafter_is_named_before_anything_is_measured(target, entrants, tmp_path):
    with pytest.raises(InputError, match="no drafter 'contrl', did you mean 'control'"):
        run(target, entrants, tmp_path, drafters=["contrl"])
    assert list(tmp_path.iterdir()) == []


def of(name: str, role: str, objective: str | None = None, steps: int = 9) -> Entrant:
    return Entrant(name, lambda: pytest.fail("not to be loaded"), role, objective, steps)


WARM, CONTROL = of("w", "warm start"), of("c", "control", "token")


@pytest.mark.parametrize(
    ("arms", "row", "said"),
    [
        ([of("a", "arm", "reach"), of("b", "arm", "exit")], Contender("b", "exit"), "is the arm 'b'"),
        ([of("a", "arm", "exit", 5), of("b", "arm", "exit", 9)], Contender("b", "exit"), "is the arm 'b'"),
        ([of("a", "arm", "token"), of("b", "arm", "reach_kl")], Contender("b", "exit"), "'b' (reach_kl) takes its row"),
        ([of("b", "arm", "reach")], Contender("b", "reach"), "figures of `reach`"),
        ([of("e", "equal-time control", "token")], None, "exit row is missing"),
    ],
)
def test_the_exit_row_is_the_exit_arm_or_says_what_it_is(arms, row, said):
    rows, lines = choose_drafters([WARM, CONTROL, *arms], None, FIGURES)
    assert rows == [Contender("w", "warm"), Contender("c", "control"), *([row] if row else [])]
    assert said in " ".join(lines)


def test_named_drafters_and_folders_without_roles():
    rows, lines = choose_drafters([WARM, CONTROL, of("k", "arm", "exit_kl")], ["k", "w"], FIGURES)
    assert rows == [Contender("k", None), Contender("w", "warm")] and lines == []
    rows, lines = choose_drafters([of("x", "drafter"), of("y", "drafter")], None, FIGURES)
    assert rows == [Contender("x", None), Contender("y", None)] and "no roles" in lines[0]


def law(mean: float, noise: float = 1.0, other: float = 0.0) -> LawResult:
    """24 contexts of 12 sequences; predraw differs from tev by `other`."""
    values = mean * (1 + noise * np.random.default_rng(0).uniform(0, 0.5, 24))
    ids = tuple(f"s{i}" for i in range(12) for _ in range(2))
    return LawResult(ids, tuple(range(24)), 0, {"8": {"predraw": values + other, "tev": values}}, {}, {"8": 8.0})


def test_gains_are_paired_and_later_over_earlier():
    rows = [Contender("w", "warm"), Contender("c", "control"), Contender("e", "exit")]
    laws = {"w": law(2.0), "c": law(2.2), "e": law(2.75)}
    gains = {(g.drafter, g.control): g.percent for g in gains_of(rows, laws, 8, 1.0, BOOT)}
    assert list(gains) == [("c", "w"), ("e", "w"), ("e", "c")]
    assert (gains["e", "c"].low, gains["e", "c"].high) == pytest.approx((25, 25), abs=1e-5)
    assert gains["c", "w"].value == pytest.approx(10) and gains["e", "w"].value == pytest.approx(37.5)
    (point, _) = points_of(laws["w"], rows[0], 8, 1.0, BOOT)
    assert isinstance(point, Point) and point.expected.high > point.expected.low and point.agrees is None
    assert disagreement(law(2.0, other=1e-3)) == pytest.approx(1e-3)
    lines = summary_lines([], [], ["predraw", "tev"], 1e-3)
    assert "a fault" in lines[0] and "one expected" in summary_lines([], [], ["predraw", "tev"], 1e-15)[0]


def test_published_figures_stand_with_the_verifier_they_were_measured_with():
    assert published_length(FIGURES, "warm", 64, 1.0, "tev") == 7.09  # Table 4
    assert published_length(FIGURES, "exit", 64, 1.0, "predraw") == 8.05
    assert published_length(FIGURES, "warm", 32, 1.0, "predraw") == 6.77  # Table 5
    assert published_length(FIGURES, "warm", 32, 1.0, "tev") is None
    assert published_length(FIGURES, "exit", 128, 0.0, "tev") == 9.23
    assert published_length(FIGURES, "control", 64, 0.0, "tev") == 8.36  # Table 2
    assert published_length(FIGURES, "control", 32, 0.0, "tev") is None
    assert published_length(FIGURES, None, 64, 1.0) is None and published_length(FIGURES, "exit", 64, 0.6) is None
    rows = [Contender("w", "warm"), Contender("c", "control"), Contender("e", "exit")]
    laws = {name: LawResult(("s",), (1,), 0, {"64": {"tev": np.array([2.0])}}, {}, {}) for name in "wce"}
    table = gain_table(gains_of(rows, laws, 64, 1.0, BOOT), FIGURES)
    assert [row[-1] for row in table.rows] == ["+5.5 %", "+13.8 %", "+7.9 %"]
    times = [
        RuleTime(verifier=rule, budget=64, temperature=1.0, milliseconds=2.0, ratio=Interval(value=0.5))
        for rule in (DDTREE, "predraw", "tev")
    ]
    assert [row[-2:] for row in time_table(times, FIGURES, "").rows] == [("1.421", ""), ("", ""), ("1.222", "0.860")]


def test_the_papers_own_percentages_follow_from_its_figures():
    at = FIGURES.objectives
    assert [round(gain_percent(at[t]["exit"], at[t]["warm"]), 1) for t in (0.0, 1.0)] == [13.5, 13.8]
    assert [round(gain_percent(at[t]["exit"], at[t]["control"]), 1) for t in (0.0, 1.0)] == [5.9, 7.9]
    saved = {
        (t, budget): round(-gain_percent(times["tev"], times["predraw"]), 1)
        for t, budgets in FIGURES.milliseconds.items()
        for budget, times in budgets.items()
    }
    printed = {(0.6, 32): 12.9, (0.6, 64): 15.2, (0.6, 128): 24.3, (1.0, 32): 12.0, (1.0, 64): 14.0, (1.0, 128): 17.1}
    assert saved == pytest.approx(printed, abs=0.11)  # of milliseconds that were rounded
    for t, budgets in FIGURES.budgets.items():
        assert {name: budgets[64][name] for name in ("warm", "exit")} == {
            name: at[t][name] for name in ("warm", "exit")
        }
