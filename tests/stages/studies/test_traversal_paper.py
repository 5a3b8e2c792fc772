"""The study `traversal-paper` on tiny models, its arithmetic on made-up numbers, and the figures of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_study import entrant, sequences, tiny_target

from exittrain.build.static import EAGLE
from exittrain.errors import InputError, Interrupted
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.intervals import Bootstrap
from exittrain.stages.evaluation.schema import Interval
from exittrain.stages.studies import base
from exittrain.stages.studies.laws import LawResult
from exittrain.stages.studies.published import TraversalFigures, read_figures
from exittrain.stages.studies.run import study
from exittrain.stages.studies.settings import load_suite
from exittrain.stages.studies.traversal_paper import (
    Point,
    Side,
    Step,
    increase_of_gain,
    main_temperature,
    point_of,
    steps_of,
    tree_sources,
)
from exittrain.stages.studies.traversal_tables import at_paper_depth, depth_table, summary_lines, temperature_table

BOOT = Bootstrap(200, 0)
FIGURES = read_figures("traversal-paper", TraversalFigures)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def entrants():
    return [entrant("warm start", "warm start", noise=0.3), entrant("exit", objective="exit", noise=0.15)]


def run(target, entrants, folder: Path, stop: StopFlag | None = None, **changes):
    small = {
        "temperatures": [0.5, 1.0], "chain_depths": [4, 1, 2], "binary_depths": [2, 3], "contexts": 80, "draws": 4,
        "bootstrap": 60,
    }  # fmt: skip
    settings = load_suite("traversal-paper").model_copy(update={**small, **changes})
    return study(target, entrants, settings, folder, lambda: None, sequences(), stop=stop)


@pytest.fixture(scope="module")
def folder(target, entrants, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("traversal")
    run(target, entrants, path)
    return path


def points(folder: Path) -> list[Point]:
    found = json.loads((folder / "study.json").read_text())["results"]["points"]
    return [Point.model_validate(point) for point in found]


def cells(folder: Path) -> list[dict]:
    return [json.loads(path.read_text())["cell"] for path in (folder / "cells").iterdir()]


def test_gains_come_from_expectations_on_the_same_trees(folder):
    by_key = {(p.shape, p.depth, p.temperature): p for p in points(folder)}
    assert len(by_key) == (3 + 2 + 1) + 3  # all depths at temperature 1, the deepest or the paper's at the other
    for (_, depth, temperature), point in by_key.items():
        gain = 100 * (point.traversal.expected.value / point.token_level.expected.value - 1)
        assert point.gain.value == pytest.approx(gain, abs=1e-4)
        assert (point.traversal.verdicts is None) == (temperature != 1)  # draws are of the table by depth
        assert 1 < point.token_level.expected.value <= depth + 1
    assert by_key["chain", 1, 1.0].gain.value == pytest.approx(0, abs=1e-9)  # one draft: one rule
    assert by_key["chain", 4, 1.0].gain.value > by_key["chain", 2, 1.0].gain.value > 0
    assert by_key["chain", 4, 0.5].traversal.expected.value > by_key["chain", 4, 1.0].traversal.expected.value
    assert by_key["binary", 3, 1.0].num_nodes == 14 and by_key["eagle", 5, 1.0].num_nodes == 25
    sides = [side for p in by_key.values() if p.temperature == 1 for side in (p.token_level, p.traversal)]
    assert all(abs(side.verdicts - side.expected.value) < 0.3 for side in sides)
    assert sum(side.agrees for side in sides) >= len(sides) - 2
    means = {
        (part, rule): float(np.mean(values))
        for cell in cells(folder)
        if cell["draws"] and "4" in cell["expected"]  # the chains of temperature 1
        for part, rules in cell["expected"].items()
        for rule, values in rules.items()
    }
    assert means["4", "traversal"] == pytest.approx(by_key["chain", 4, 1.0].traversal.expected.value, abs=1e-6)
    assert means["2", "rrs_wor"] == pytest.approx(by_key["chain", 2, 1.0].token_level.expected.value, abs=1e-6)


def test_the_published_figures_stand_beside(folder):
    text = (folder / "table.md").read_text()
    depth = next(line for line in text.splitlines() if line.startswith("| chain | 4 | 4 |"))
    assert depth.endswith("3.47 / 3.56, +2.6 % |")
    assert next(line for line in text.splitlines() if line.startswith("| EAGLE's sparse tree | 5 | 25 |")).endswith(
        "4.49 / 4.60, +2.4 % |"
    )
    assert "disagree" in text and "per item" in text and "Llama-68M" in text  # what differs is said
    assert "published" in (folder / "gain-by-depth.svg").read_text()
    results = json.loads((folder / "study.json").read_text())["results"]
    assert results["drafter"] == "exit" and [s["deep"] for s in results["steps"]] == [2, 4, 4, 3]


def test_a_killed_study_goes_on_and_gives_the_same_bytes(target, entrants, folder, tmp_path, monkeypatch):
    made, stop, original = [], StopFlag(), base.measure_laws

    def stops_at_the_third(*args, **kwargs):
        made.append(1)
        if len(made) == 3:
            stop.set("SIGTERM")
        return original(*args, **kwargs)

    monkeypatch.setattr(base, "measure_laws", stops_at_the_third)
    with pytest.raises(Interrupted):
        run(target, entrants, tmp_path, stop)
    assert len(made) == 3 and not (tmp_path / "study.json").exists()
    run(target, entrants, tmp_path)
    assert len(made) == 3 + (6 - 2)
    for name in ("study.json", "table.md", "gain-by-depth.svg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_trees_are_nested_parts_of_the_deepest():
    sources = tree_sources([2, 5, 2], [3, 2])
    assert {name: len(part) - 1 for name, part in sources["chain"].parts.items()} == {"2": 2, "5": 5}
    assert {name: len(part) - 1 for name, part in sources["binary"].parts.items()} == {"2": 6, "3": 14}
    assert sources["binary"].parts["2"] < sources["binary"].parts["3"] and sources["binary"].shape.budget == 14
    assert sources["eagle"].parts == {"5": frozenset(EAGLE)}
    assert {source.builder for source in sources.values()} == {"sampled_wor"}
    with pytest.raises(InputError, match="tree budget is 8190"):
        tree_sources([2], [12])


def test_the_temperature_of_the_depth_table():
    assert main_temperature([0.2, 1.0, 1.5]) == 1.0 and main_temperature([0.2, 0.6]) == 0.6


def law(gains: dict[str, float], count: int = 12) -> LawResult:
    """Token level 2 plus noise shared by both rules; traversal better by `gains` percent at each depth."""
    noise = np.random.default_rng(0).uniform(0, 1, 2 * count)
    expected = {d: {"rrs_wor": 2 + noise, "traversal": (2 + noise) * (1 + g / 100)} for d, g in gains.items()}
    ids = tuple(f"s{i}" for i in range(count) for _ in range(2))
    return LawResult(ids, tuple(range(2 * count)), 0, expected, {}, dict.fromkeys(gains, 3.0))


def test_pairing_removes_what_both_rules_share():
    point = point_of(law({"4": 3.0}), "chain", "4", 1.0, BOOT)
    assert (point.gain.low, point.gain.value, point.gain.high) == pytest.approx((3, 3, 3), abs=1e-6)
    assert point.token_level.expected.high - point.token_level.expected.low > 0.1
    assert point.traversal.verdicts is None and point.traversal.agrees is None
    up, down, whole = steps_of(law({"10": 2.5, "2": 1.0, "4": 3.0}), "chain", BOOT)  # as a stored cell orders them
    assert [(s.shallow, s.deep) for s in (up, down, whole)] == [(2, 4), (4, 10), (2, 10)]
    assert [s.increase.low for s in (up, down, whole)] == pytest.approx([2.0, -0.5, 1.5], abs=1e-6)
    (only,) = steps_of(law({"2": 1.0, "4": 3.0}), "chain", BOOT)
    assert (only.shallow, only.deep) == (2, 4)
    assert increase_of_gain(*(np.array([x]) for x in (2.2, 2.0, 1.01, 1.0))) == pytest.approx(9.0)


def made_up(depth: int, gain: Interval, shape: str = "chain", temperature: float = 1.0) -> Point:
    side = Side(expected=Interval(value=2.0), verdicts=None, agrees=None)
    return Point(
        shape=shape, depth=depth, temperature=temperature, num_nodes=depth, token_level=side, traversal=side, gain=gain
    )


def test_sentences_say_what_holds_and_what_does_not():
    above, holds = Interval(value=2, low=1, high=3), Interval(value=0.1, low=-1, high=1)
    rows = [made_up(2, holds), made_up(4, above), made_up(2, above, "binary"), made_up(5, above, "eagle")]
    steps = [
        Step(shape=shape, shallow=shallow, deep=deep, increase=increase)
        for shape, shallow, deep, increase in (
            ("chain", 2, 4, above), ("chain", 4, 6, holds), ("chain", 2, 6, above),
            ("binary", 2, 3, above), ("binary", 3, 4, above), ("binary", 2, 4, above),
        )
    ]  # fmt: skip
    chain, binary, _, chain_growth, binary_growth = summary_lines(rows, steps, 1.0)
    assert "+0.10 % at depth 2, +2.00 % at depth 4" in chain
    assert chain.endswith("not above zero with its interval: depth 2 (interval holds zero).")
    assert binary.endswith("every interval above zero.")
    assert "from depth 2 to 6 the gain changes by +2.00 points [+1.00, +3.00] above zero" in chain_growth
    assert chain_growth.endswith("not every step is above zero with its interval: 4 to 6 (interval holds zero).")
    assert binary_growth.endswith("above zero; so is every step's.")
    (alone,) = summary_lines(rows, steps[:1], 1.0)[3:]
    assert alone.endswith("the gain changes by +2.00 points [+1.00, +3.00] above zero.")


def test_published_figures_are_only_beside_their_own_temperature_and_depth():
    gain = Interval(value=2)
    rows = [made_up(d, gain, s, t) for t in (0.4, 1.0) for d, s in ((4, "chain"), (5, "chain"), (5, "binary"))]
    assert [(p.shape, p.depth, p.temperature) for p in at_paper_depth([*rows, made_up(5, gain, "eagle")])] == [
        ("chain", 5, 0.4), ("chain", 5, 1.0), ("binary", 5, 0.4), ("binary", 5, 1.0), ("eagle", 5, 1.0),
    ]  # fmt: skip
    by_depth = [row[-1] for row in depth_table(rows[3:], FIGURES, "", 0).rows]
    assert by_depth == ["3.47 / 3.56, +2.6 %", "3.88 / 3.99, +2.8 %", "5.12 / 5.27, +2.9 %"]
    assert [row[-1] for row in depth_table(rows[:3], FIGURES, "", 0).rows] == ["", "", ""]
    by_temperature = [row[-1] for row in temperature_table(rows[:3], FIGURES, "").rows]
    assert by_temperature == ["", "4.14 / 4.20, +1.4 %", "5.00 / 5.06, +1.2 %"]


def test_the_papers_own_gains_follow_from_its_figures():
    """The paper prints gains beside its means; what it rounded must come out again."""
    printed = {"chain": (2.8, 5.7), "binary": (2.2, 4.9), "eagle": (2.4, 3.8)}
    for shape, gains in printed.items():
        found = [pair[shape].gain for pair in FIGURES.depth_5.values()]
        assert found == pytest.approx(gains, abs=0.36)  # both means are rounded to a hundredth
    by_temperature = {0.2: (1.0, 1.2, 1.5), 0.4: (1.4, 1.2, 1.5), 0.6: (1.5, 1.5, 1.5), 0.8: (2.2, 1.7, 1.7)}
    for temperature, gains in by_temperature.items():
        assert [pair.gain for pair in FIGURES.temperatures[temperature].values()] == pytest.approx(gains, abs=0.25)
    assert FIGURES.temperatures[1.0] == next(iter(FIGURES.depth_5.values()))
    assert FIGURES.depths["chain"][8] == (4.50, 4.67) and FIGURES.depths["binary"][2] == (3.12, 3.17)
