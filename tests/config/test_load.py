"""Recipe loading: every mistake is one line that names the key and the remedy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
import yaml

from exittrain.build.base import MAX_BUDGET, TreeShape
from exittrain.build.registry import BUILDERS, drawn_by
from exittrain.config.checks import EXACT_VERIFIERS
from exittrain.config.load import load_recipe
from exittrain.config.schema import Builder, Objective
from exittrain.errors import InputError
from exittrain.law.objectives import OBJECTIVES
from exittrain.verify.registry import VERIFIERS

BASE = {
    "name": "unit",
    "target": {"model": "some/model"},
    "drafter": {"layers": 2},
    "data": {"train": {"kind": "conversations", "path": "x.jsonl"}},
    "train": {"arms": {"token": {}, "reach": {"objective": "reach"}}},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "unit.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def fail(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_overrides_go_through_the_same_validation(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["train.arms.token.steps=5", "train.lr=1e-4", "drafter.layers=[0, 3]"])
    assert recipe.train is not None and recipe.train.arms["token"].steps == 5
    assert recipe.train.lr == 1e-4 and recipe.drafter.layers == [0, 3]
    assert "'train.arms.token.steps' cannot be -1" in fail(recipe_file, "train.arms.token.steps=-1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stpes=5", "unknown key 'train.stpes', did you mean 'steps'?"),
        ("train.arms.token.wieght=5", "unknown key 'train.arms.token.wieght', did you mean 'weight'?"),
        ("tree.budgte=5", "unknown key 'tree.budgte', did you mean 'budget'?"),
        ("data.train.cuont=5", "unknown key 'data.train.cuont', did you mean 'count'?"),
        (
            "target.scratch.shape.hiden_size=5",
            "unknown key 'target.scratch.shape.hiden_size', did you mean 'hidden_size'?",
        ),
        ("trian={}", "unknown key 'trian', did you mean 'train'?"),
        ("train.lr=fast", "'train.lr' cannot be 'fast'"),
        ("train.lr='1'", "'train.lr' cannot be '1'"),
        ("train.steps=true", "'train.steps' cannot be True"),
        ("train.steps=1.5", "'train.steps' cannot be 1.5"),
        ("sampling.temperature=-1", "'sampling.temperature' cannot be -1"),
        ("sampling.temperature=.nan", "'sampling.temperature' cannot be nan"),
        ("tree.builder=bset_first", "'tree.builder' cannot be 'bset_first'"),
        ("train.lr.x=1", "unknown key|a value|lr"),
        ("nonsense", "override 'nonsense' is not of the form key.subkey=value"),
        ("drafter.layers=[1, two]", "'drafter.layers"),
    ],
)
def test_one_line_names_the_key(recipe_file: Path, override: str, expected: str) -> None:
    line = fail(recipe_file, override)
    assert any(part in line for part in expected.split("|")), line


def test_yaml_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: x\ntarget: {model: y\ndrafter: [\n")
    assert "line" in fail(path)
    path.write_text("name: x\ntrain:\n  steps: 1\n  steps: 2\n")
    assert "line 4: key 'steps' is given twice" in fail(path)
    path.write_text("- a\n- b\n")
    assert "is no recipe" in fail(path)


def test_missing_sections_and_files(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("name: x\n")
    assert "is missing" in fail(path)
    assert "does not exist" in fail(tmp_path / "none.yaml")
    assert "folder without recipe.yaml" in fail(tmp_path)
    assert "did you mean 'quickstart'" in fail(Path("quikstart"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("target.model=null", "exactly one of 'target.model'"),
        ("drafter.layers=null", "'drafter.layers' is missing"),
        ("drafter.model=x", "'drafter.model' belongs to kind 'causal_lm', not 'layers'"),
        ("drafter.init=x", "remove 'drafter.layers'"),
        ("drafter.kind=causal_lm", "belongs to kind 'layers'"),
        ("data.train.path=null", "'data.train.path' is missing"),
        ("data.train.kind=magpie", "'data.train.count' is missing"),
        ("train.control=tokn", "did you mean 'token'?"),
        ("train.arms.token.objective=reach", "must have objective 'token'"),
        ("train.arms.reach.source=shards", "needs a 'collect' section"),
        ("train.arms.reach.match_time=tokne", "did you mean 'token'?"),
        ("train.arms.reach.weight=0", "is the control"),
        ("train.micro_batch_size=3", "no multiple"),
        ("train.arms={}", "names no arm"),
        ("eval={tasks: [heldout], verifiers: [tve]}", "did you mean 'tev'?"),
        ("eval={tasks: [heldout], verifiers: [greedy]}", "exact at temperature 0 only"),
        (
            "eval={tasks: [heldout], verifiers: [traversal]}",
            "'traversal', which is biased on trees of 'best_first': set 'eval.builder' to sampled_iid or sampled_wor",
        ),
        ("eval={tasks: [heldout], builder: sampled_wor, verifiers: [tev, rrs]}", "set 'eval.builder' to sampled_iid,"),
        ("eval={tasks: [heldout], builder: sampled_iid, branching: 2-ary, verifiers: [block]}", "for chains alone"),
        ("eval={tasks: [heldout], builder: static, branching: []}", "'eval.branching' is empty"),
        ("eval={tasks: [heldout], builder: sampled}", "'eval.builder' cannot be 'sampled'"),
        ("eval={tasks: []}", "'eval.tasks' is empty"),
        ("eval={decode: false}", "measures nothing"),
        ("name=../x", "becomes a folder"),
        ("train.arms.reach.temperature=[]", "'train.arms.reach.temperature' cannot be"),
    ],
)
def test_contradictions_are_found_before_anything_runs(recipe_file: Path, override: str, expected: str) -> None:
    assert expected in fail(recipe_file, override)


@pytest.mark.parametrize(
    "section",
    [
        "{tasks: [heldout], verifiers: [tev, auto]}",
        "{tasks: [heldout], builder: sampled_iid, verifiers: [tev, rrs, traversal, block, auto]}",
        "{tasks: [heldout], builder: sampled_wor, branching: [[0], [0, 0]], verifiers: [rrs_wor, block]}",
        "{tasks: [heldout], builder: sampled_wor, branching: 2-ary, verifiers: [residual, traversal]}",
    ],
)
def test_eval_has_trees_of_its_own(recipe_file: Path, section: str) -> None:
    recipe = load_recipe(recipe_file, [f"eval={section}"])
    assert recipe.eval is not None and recipe.tree.builder == "best_first"


def test_the_serving_tree_may_be_sampled(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        ["tree={builder: sampled_iid, branching: 2-ary}", "train.arms.reach.objective=accept_lk",
         "eval={tasks: [heldout], verifiers: [rrs, traversal]}"],
    )  # fmt: skip
    assert recipe.train is not None and recipe.train.arms["reach"].objective == "accept_lk"
    line = fail(recipe_file, "tree={builder: sampled_wor}", "eval={tasks: [heldout], verifiers: [rrs]}")
    assert "biased on trees of 'sampled_wor'" in line


def test_objectives_and_builders_are_those_of_the_registries() -> None:
    assert get_args(Objective) == tuple(OBJECTIVES)
    assert set(get_args(Builder)) == set(BUILDERS) - {"oracle"}


def test_what_is_exact_for_what_is_as_the_registries_say() -> None:
    assert set(EXACT_VERIFIERS) == set(BUILDERS) - {"oracle"}
    for builder, exact in EXACT_VERIFIERS.items():
        found = []
        for name, verifier in VERIFIERS.items():
            with suppress(InputError):
                verifier.check(drawn_by(builder))
                found.append(name)
        assert sorted(found) == sorted(exact), builder


TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("target.scratch.vocab_size=256", "at least 257"),
        ("eval.tasks=[gsm8k]", "has no chat template"),
        ("data.train={kind: prompts, path: everyday}", "has no chat template"),
    ],
)
def test_limits_of_a_target_made_from_nothing(override: str, expected: str) -> None:
    assert expected in fail(TINY, override)


def test_resolved_recipe_loads_again(recipe_file: Path, tmp_path: Path) -> None:
    from exittrain.records.run_folder import RunFolder

    recipe = load_recipe(recipe_file)
    RunFolder(tmp_path / "run").write_recipe(recipe)
    again = load_recipe(tmp_path / "run")
    assert again == recipe.model_copy(update={"run_dir": str(tmp_path / "run")})


def test_a_run_folder_is_where_it_is_now(recipe_file: Path, tmp_path: Path) -> None:
    from exittrain.records.run_folder import RunFolder

    RunFolder(tmp_path / "old").write_recipe(load_recipe(recipe_file, [f"run_dir={tmp_path / 'old'}"]))
    (tmp_path / "old").rename(tmp_path / "new")
    assert load_recipe(tmp_path / "new").run_dir == str(tmp_path / "new")
    assert load_recipe(tmp_path / "new", ["run_dir=other"]).run_dir == "other"


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"name: \xff", "no UTF-8"), (b"[a]: 3", "line 1: key ['a'] is no word"), (b"on: 3", "key True is no word")],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    assert expected in fail(tmp_path / "bad.yaml")


def test_the_largest_budget_is_the_builders_own(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, [f"tree.budget={MAX_BUDGET}"]).tree.budget == MAX_BUDGET
    assert "'tree.budget'" in fail(recipe_file, f"tree.budget={MAX_BUDGET + 1}")
    with pytest.raises(InputError, match="budget"):
        TreeShape(budget=MAX_BUDGET + 1)
