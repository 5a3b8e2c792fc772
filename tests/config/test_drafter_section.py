"""The drafter section: fields of its kind alone, trees no deeper than a block, keys that other kinds leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from exittrain.build.base import TreeShape
from exittrain.build.static import rank_paths
from exittrain.config.drafter_checks import tree_depth
from exittrain.config.load import load_recipe
from exittrain.config.schema import DIAL_FIELDS, SHAPE_FIELDS, DrafterSection
from exittrain.drafters.base import Dials
from exittrain.errors import InputError
from exittrain.records.run_folder import RunFolder

BASE = {
    "name": "unit",
    "target": {"model": "some/model"},
    "data": {"train": {"kind": "conversations", "path": "x.jsonl"}},
    "train": {"arms": {"token": {}}},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "unit.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def fail(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        "{kind: eagle3}",
        "{kind: eagle3, feature_layers: [2, 5], draft_vocab: 9, num_layers: 2, norm_output: true, unroll_steps: 1}",
        "{kind: block}",
        "{kind: block, block_size: 7, mask_token_id: 0, feature_layers: [1], num_layers: 1, block_decay: 2.0}",
        "{kind: block, init: x, block_anchors: 4}",
        "{kind: eagle3, init: x, unroll_steps: 7, unroll_decay: 0.9}",
        "{kind: layers, layers: 2, unroll_steps: 3}",  # its default: as in the recipe that a run folder keeps
    ],
)
def test_sections_that_are_right(recipe_file: Path, tmp_path: Path, section: str) -> None:
    recipe = load_recipe(recipe_file, [f"drafter={section}"])
    RunFolder(tmp_path / "run").write_recipe(recipe)
    assert load_recipe(tmp_path / "run").drafter == recipe.drafter


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{kind: layers, layers: 2, block_size: 8}", "'drafter.block_size' belongs to kind 'block', not 'layers'"),
        ("{layers: 2, num_layers: 2}", "'drafter.num_layers' belongs to kind 'eagle3' or 'block', not 'layers'"),
        ("{kind: causal_lm, model: x, unroll_steps: 2}", "'drafter.unroll_steps' belongs to kind 'eagle3'"),
        ("{kind: eagle3, block_anchors: 2}", "'drafter.block_anchors' belongs to kind 'block', not 'eagle3'"),
        ("{kind: eagle3, model: x}", "'drafter.model' belongs to kind 'causal_lm', not 'eagle3'"),
        ("{kind: block, layers: 2}", "'drafter.layers' belongs to kind 'layers', not 'block'"),
        ("{kind: block, fc_norm: true}", "'drafter.fc_norm' belongs to kind 'eagle3', not 'block'"),
        ("{kind: block, layer_style: qwen3}", "'drafter.layer_style' belongs to kind 'eagle3', not 'block'"),
        ("{kind: block, init: x, block_size: 8}", "whose shape is its own: remove 'drafter.block_size'"),
        ("{kind: eagle3, init: x, draft_vocab: 8}", "whose shape is its own: remove 'drafter.draft_vocab'"),
        ("{kind: eagle3, norm_before_fc: true, fc_norm: true}", "exclude each other"),
        ("{kind: block, feature_layers: [2, 3, 2]}", "'drafter.feature_layers' names 2 twice"),
        ("{kind: block, feature_layers: []}", "'drafter.feature_layers'"),
        ("{kind: block, feature_layers: [0]}", "'drafter.feature_layers.0' cannot be 0"),
        ("{kind: block, block_size: 1}", "'drafter.block_size' cannot be 1"),
        ("{kind: medusa}", "'drafter.kind' cannot be 'medusa'"),
        ("{kind: block, block_sise: 8}", "did you mean 'block_size'?"),
    ],
)
def test_what_a_section_may_not_say(recipe_file: Path, section: str, expected: str) -> None:
    assert expected in fail(recipe_file, f"drafter={section}")


@pytest.mark.parametrize("kind", ["block", "layers"])
def test_only_an_eagle_head_unrolls(recipe_file: Path, kind: str) -> None:
    warmup = "warmup={steps: 4, unroll_from: 0.5}"
    own = ", layers: 2" if kind == "layers" else ""
    assert f"'warmup.unroll_from' is of kind 'eagle3', which alone unrolls, not '{kind}'" in fail(
        recipe_file, f"drafter={{kind: {kind}{own}}}", warmup
    )
    assert load_recipe(recipe_file, ["drafter={kind: eagle3}", warmup]).warmup.unroll_from == 0.5


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_heads_are_trained_whole(recipe_file: Path, kind: str) -> None:
    assert "a head is small" in fail(recipe_file, f"drafter={{kind: {kind}}}", "train.lora={}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["tree.depth=8"],
            "'tree.depth' makes trees 8 deep, and a block of 8 drafts 7 tokens ahead: set 'tree.depth' to at",
        ),
        (["tree.depth=7"], None),
        (["tree={builder: static, branching: chain, budget: 9, depth: 9}"], "'tree.branching' makes trees 9 deep"),
        (["tree={builder: static, branching: chain, budget: 7, depth: 9}"], None),
        (["tree={builder: sampled_iid, branching: 2-ary, budget: 16, depth: 9}"], None),
        (
            ["tree.depth=7", "eval={tasks: [heldout], builder: sampled_wor, branching: chain}"],
            None,
        ),
        (
            [
                "tree={builder: static, branching: [[0]], depth: 20, budget: 20}",
                "eval={tasks: [heldout], builder: sampled_wor, branching: chain}",
            ],
            "'eval.branching' makes trees 20 deep",
        ),
        (["tree={builder: static, branching: [[0], [0, 0]], depth: 7}"], None),
        (
            ["tree.depth=7", "eval={tasks: [heldout], builder: static, branching: [[0,0,0,0,0,0,0,0]]}"],
            "set 'eval.branching' to at most 7 levels",
        ),
        (["tree={builder: static, branching: chain, depth: 7}", "eval={tasks: [heldout], builder: beam}"], None),
    ],
)
def test_trees_are_no_deeper_than_a_block(recipe_file: Path, overrides: list[str], expected: str | None) -> None:
    drafter = "drafter={kind: block, block_size: 8}"
    if expected is None:
        assert load_recipe(recipe_file, [drafter, *overrides]).drafter.block_size == 8
    else:
        assert expected in fail(recipe_file, drafter, *overrides)


def test_a_block_is_dflash_s_where_nothing_is_said(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["drafter.kind=block", "tree.depth=15"])
    assert "a block of 16" in fail(recipe_file, "drafter.kind=block", "tree.depth=16")


@pytest.mark.parametrize(
    ("branching", "budget", "depth"),
    [("chain", 5, 9), ("chain", 20, 4), ("2-ary", 6, 9), ("2-ary", 7, 9), ("3-ary", 100, 2), ("eagle", 25, 5),
     ([[0], [0, 0], [1]], 9, 9)],
)  # fmt: skip
def test_depth_of_a_shape_is_the_builders_own(branching: str | list[list[int]], budget: int, depth: int) -> None:
    own = branching if isinstance(branching, str) else tuple(map(tuple, branching))
    paths = rank_paths(TreeShape(budget=budget, depth=depth, branching=own))
    assert tree_depth("static", branching, budget, depth) == max(map(len, paths))
    assert tree_depth("best_first", branching, budget, depth) == depth


def test_keys_of_drafters_without_a_head_stay_as_they_were() -> None:
    before = {"kind": "layers", "model": None, "layers": 4, "shape": None, "init": None}
    assert DrafterSection(layers=4).own_fields() == before
    assert DrafterSection(layers=4, block_anchors=9, unroll_steps=2).own_fields() == before
    model = DrafterSection(kind="causal_lm", model="x").own_fields()
    assert model == {"kind": "causal_lm", "model": "x", "layers": None, "shape": None, "init": None}


def test_keys_of_heads_hold_what_is_theirs() -> None:
    eagle, block = DrafterSection(kind="eagle3").own_fields(), DrafterSection(kind="block").own_fields()
    assert set(eagle) == {"kind", "init", *SHAPE_FIELDS["eagle3"], *DIAL_FIELDS["eagle3"]}
    assert set(block) == {"kind", "init", *SHAPE_FIELDS["block"], *DIAL_FIELDS["block"]}
    assert DrafterSection(kind="eagle3", unroll_steps=2).own_fields() != eagle
    assert DrafterSection(kind="eagle3", block_decay=2.0).own_fields() == eagle


def test_every_field_belongs_to_a_kind() -> None:
    owned = {name for names in (*SHAPE_FIELDS.values(), *DIAL_FIELDS.values()) for name in names}
    assert owned | {"kind", "init"} == set(DrafterSection.model_fields)


def test_dials_are_the_drafters_own() -> None:
    defaults = {name: DrafterSection.model_fields[name].default for names in DIAL_FIELDS.values() for name in names}
    assert defaults == vars(Dials())
