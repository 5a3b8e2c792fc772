"""Two and three ranks at every ZeRO stage against one: gradients, resuming, and going on with other numbers of ranks.

All scenarios of a number of ranks share its processes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from launching import launch_ranks
from zero_checks import WORKER, assert_bit_equal, assert_close, assert_equal_steps, in_ranks
from zero_scenarios import Scenario, first_step, read_lines, trained

pytestmark = pytest.mark.slow

STEPS = [
    *(Scenario(config) for config in ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")),
    *(Scenario(config, micro=None) for config in ("zero0", "zero3")),
    *(Scenario(config, "draft_lm", "token") for config in ("zero1", "zero3")),
    *(Scenario(config, "lora") for config in ("zero0", "zero1", "zero2", "zero3")),
    *(Scenario(config, "eagle3") for config in ("zero0", "zero2", "zero3")),
    *(Scenario(config, "block") for config in ("zero1", "zero3")),
    *(Scenario("zero3", kind, sequences=1) for kind in ("draft_lm", "lora", "block")),
    *(Scenario(config, sequences=1) for config in ("zero0", "zero1", "zero2")),
]
WHOLE = Scenario(steps=10, objective="reach")
RESUMED = [
    replace(WHOLE, config=config, stops=(4, 7))
    for config in ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero1-bf16", "zero3-bf16")
]
BEGUN = replace(WHOLE, config="zero2", stops=(4,), ends=False, place="moving")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def by_two(places: Path) -> dict[str, Any]:
    both = [pair for scenario in RESUMED for pair in (scenario, replace(scenario, stops=()))]
    trainings = [("trained", scenario) for scenario in (*both, BEGUN)]
    return in_ranks(places, 2, *(("first_step", scenario) for scenario in STEPS), *trainings)


@pytest.fixture(scope="module")
def by_three(places: Path, by_two: dict[str, Any]) -> dict[str, Any]:
    goes_on = replace(BEGUN, config="zero3", stops=(7,))
    cut = replace(WHOLE, config="zero3", stops=(4, 7))
    trainings = [("trained", scenario) for scenario in (goes_on, cut, replace(cut, stops=()))]
    return in_ranks(places, 3, *(("first_step", scenario) for scenario in STEPS), *trainings)


@pytest.fixture(scope="module")
def by_one() -> dict[str, Any]:
    """What plain float32 in one process finds, by what the loss is of."""
    found: dict[str, Any] = {}
    for scenario in STEPS:
        alone = replace(scenario, config="zero0", micro=None)
        if alone.name not in found:
            found[alone.name] = first_step(alone)
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", STEPS, ids=lambda scenario: scenario.name)
def test_losses_and_gradients_are_those_of_one_rank(
    scenario: Scenario, world: int, by_one: dict, request: pytest.FixtureRequest
) -> None:
    """Before clipping, within 1e-6 in float32: uneven shares and accumulation (cases.md 7, 69, 71, 88, 90)."""
    found = request.getfixturevalue({2: "by_two", 3: "by_three"}[world])[f"first_step {scenario.name}"]
    expected = by_one[replace(scenario, config="zero0", micro=None).name]
    assert_equal_steps(found, expected)
    assert_close(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("scenario", RESUMED, ids=lambda scenario: scenario.config)
def test_resumed_twice_by_two_ranks_is_bit_equal(scenario: Scenario, by_two: dict, places: Path) -> None:
    """Ten steps, or four, three and three (cases.md 74 to 76, 81): parameters, learning rates, order, moments."""
    whole = replace(scenario, stops=())
    parts, expected = by_two[f"trained {scenario.name}"], by_two[f"trained {whole.name}"]
    assert_bit_equal(parts["parameters"], expected["parameters"])
    assert parts["order"] == expected["order"]
    assert [(found["same"], found["updates"]) for found in parts["loaded"]] == [(True, 4), (True, 7)]
    lines = [without_clock(places / name / "lines.json") for name in (scenario.name, whole.name)]
    assert lines[0] == lines[1] and [line["step"] for line in lines[0]] == list(range(1, 11))


def test_resumed_twice_by_three_ranks_is_bit_equal(by_three: dict) -> None:
    """Sizes that three does not divide: parts reach past the end of parameters."""
    cut = replace(WHOLE, config="zero3", stops=(4, 7))
    assert_bit_equal(
        by_three[f"trained {cut.name}"]["parameters"],
        by_three[f"trained {replace(cut, stops=()).name}"]["parameters"],
    )


@pytest.mark.parametrize("config", ["zero0", "zero3"])
def test_going_on_with_other_numbers_of_ranks(
    config: str, by_three: dict, places: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Begun by two at ZeRO 2, gone on by three at ZeRO 3, ended by one (cases.md 80): the end of one rank's own."""
    shutil.copytree(places / "moving", tmp_path / "moving")
    assert sorted(path.name for path in (tmp_path / "moving").glob("step-*")) == ["step-000004", "step-000007"]
    ended = trained(replace(WHOLE, config=config), tmp_path / "moving")
    assert "step-000007 was written by 3 ranks, going on with 1" in capsys.readouterr().out
    expected = trained(WHOLE, tmp_path / "whole")
    assert_close(ended["parameters"], expected["parameters"])
    ours, theirs = (without_clock(tmp_path / name / "lines.json") for name in ("moving", "whole"))
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_rank_that_is_killed_while_saving_ends_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, the checkpoint before is whole, and both go on from it to the same end (cases.md 78)."""
    whole = replace(WHOLE, config="zero3")
    scenario = replace(whole, save_every=4, place="killed")
    with monkeypatch.context() as patch:
        patch.setenv("KILLED_RANK", "1")
        text = json.dumps({"folder": str(tmp_path), "scenarios": [("trained", asdict(scenario))]})
        codes = launch_ranks(WORKER, text, 2)
    assert codes[1] == -9 and codes[0] not in (0, -9)  # the last is launch_ranks' own, had it waited in vain
    assert [path.name for path in (tmp_path / "killed").glob("step-*")] == ["step-000004"]
    found = in_ranks(tmp_path, 2, ("trained", scenario), ("trained", whole))
    assert_bit_equal(found["trained killed"]["parameters"], found[f"trained {whole.name}"]["parameters"])


def without_clock(file: Path) -> list[dict[str, float]]:
    lines = read_lines(file)
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]
