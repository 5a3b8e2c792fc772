"""Every recipe loads, plans, and names only what exists; DeepSpeed files hold ZeRO and precision only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exittrain.config.load import load_recipe
from exittrain.stages.plan import make_plan, render

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "recipes" / "deepspeed").glob("*.json"))


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "tests/fixtures/tiny.yaml"], ids=lambda path: path.stem)
def test_recipe_loads_and_plans(path: Path) -> None:
    recipe = load_recipe(path)
    plan = make_plan(recipe)
    assert {row.stage.partition("/")[0] for row in plan.rows} >= {"data"}
    assert "nothing was started" in render(plan, recipe)
    if recipe.train is not None:
        names = [config.stem for config in DEEPSPEED]
        assert recipe.train.deepspeed in names
        assert recipe.train.arms[recipe.train.control].objective == "token"


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if load_recipe(path).train is not None], ids=lambda p: p.stem
)
def test_every_recipe_has_both_controls(path: Path) -> None:
    train = load_recipe(path).train
    assert train is not None
    assert any(arm.objective == "token" and arm.match_time is not None for arm in train.arms.values())


@pytest.mark.parametrize("path", [path for path in RECIPES if load_recipe(path).eval is not None], ids=lambda p: p.stem)
def test_tasks_exist(path: Path) -> None:
    from exittrain.stages.prompts import expand_tasks, known_sets

    evaluation = load_recipe(path).eval
    assert evaluation is not None
    assert [t for t in expand_tasks(evaluation.tasks) if t != "heldout" and t not in known_sets()] == []


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_deepspeed_files_hold_zero_and_precision_only(path: Path) -> None:
    assert set(json.loads(path.read_text())) <= {"zero_optimization", "bf16", "fp16", "torch_autocast"}


def test_recipe_files_are_found_by_bare_name() -> None:
    assert load_recipe("quickstart").name == "quickstart"
