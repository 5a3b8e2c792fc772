"""Every recipe loads, plans, and names only what exists; heads of the GPU recipes are built without their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from exittrain.config.load import load_recipe
from exittrain.config.schema import HEADS, Recipe
from exittrain.drafters.block.network import BlockNetwork
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.head_config import HeadConfig
from exittrain.stages.model_configs import SHIPPED, find_config, text_config
from exittrain.stages.plan import make_plan, render
from exittrain.stages.sizes import drafter_size, recipe_head, size_from_config
from exittrain.stages.sources import check_head

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "recipes" / "deepspeed").glob("*.json"))
GPU = ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b", "llama3.1-8b")
FORMS = ("", "-eagle3", "-block")


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "tests/fixtures/tiny.yaml"], ids=lambda path: path.stem)
def test_recipe_loads_and_plans(path: Path) -> None:
    recipe = load_recipe(path)
    check_head(recipe)
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


@pytest.mark.parametrize("name", [model + form for model in GPU for form in FORMS])
def test_gpu_recipes_plan_without_any_download(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXITTRAIN_CACHE", str(tmp_path))
    recipe = load_recipe(name)
    plan = make_plan(recipe)
    assert recipe.name == name and plan.target is not None and plan.drafter is not None
    for row in plan.rows:
        assert row.memory_bytes and row.disk_bytes, row.stage
        assert 0.05 < row.memory_bytes / 2**30 < 140, row.stage
        assert row.target_tokens > 0 or row.stage == "report"
    assert recipe.train is not None
    arms = {row.stage: row for row in plan.rows if row.stage.startswith("train/")}
    assert set(arms) == {f"train/{arm}" for arm in recipe.train.arms}
    assert all(row.num_steps > 0 and row.num_tokens > 0 for row in arms.values())
    matched = recipe.train.arms["token_time"].match_time
    assert arms["train/token_time"].num_steps > arms["train/token"].num_steps
    assert arms[f"train/{matched}"].target_tokens > arms["train/token"].target_tokens
    assert "?" not in render(plan, recipe)


def head_of(recipe: Recipe) -> tuple[HeadConfig, dict[str, tuple[int, ...]]]:
    """The recipe's head and its tensors' shapes, of a network without numbers."""
    head = recipe_head(recipe)
    assert head is not None and head.kind == recipe.drafter.kind
    with torch.device("meta"):
        network = (
            BlockNetwork(head)
            if head.kind == "block"
            else EagleNetwork(head, nn.Embedding(head.vocab_size, head.target_hidden_size))
        )
    size = drafter_size(recipe)
    assert size is not None
    assert size.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    return head, {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "block_size", "num_layers", "layers_from_zero", "mask"),
    [
        ("qwen3-4b-block", 16, 5, [1, 9, 17, 25, 33], 151669),
        ("qwen3-8b-block", 16, 5, [1, 9, 17, 25, 33], 151669),
        ("qwen3-coder-30b-a3b-block", 16, 8, [1, 12, 23, 34, 45], 151669),
        ("llama3.1-8b-block", 10, 5, [1, 8, 15, 22, 29], 128002),
    ],
)
def test_block_recipes_are_the_paper_s(
    name: str, block_size: int, num_layers: int, layers_from_zero: list[int], mask: int
) -> None:
    recipe = load_recipe(name)
    head, shapes = head_of(recipe)
    assert (head.block_size, head.num_layers, head.mask_token_id) == (block_size, num_layers, mask)
    assert head.feature_layers == tuple(layer + 1 for layer in layers_from_zero)
    assert_fits(recipe, head)
    size, width, kv_width = head.hidden_size, head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    assert shapes["fc.weight"] == (size, 5 * size) and shapes["hidden_norm.weight"] == shapes["norm.weight"] == (size,)
    for layer in range(num_layers):
        own = {name.removeprefix(f"layers.{layer}."): shape for name, shape in shapes.items() if f"s.{layer}." in name}
        assert own == {**layer_shapes(head, size), "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,)}
        assert own["self_attn.q_proj.weight"] == (width, size) and own["self_attn.v_proj.weight"] == (kv_width, size)
    assert not any("lm_head" in name or "embed" in name for name in shapes)
    train, tree = recipe.train, recipe.tree
    assert train is not None and train.token_loss == "ce" and recipe.data.max_length == 3072
    assert (train.lr, train.warmup_ratio, train.clip, train.batch_size) == (1e-4, 0.005, 1.0, 28)
    assert (train.anchors_per_sequence, recipe.drafter.block_anchors, tree.budget) == (32, 32, 32)
    assert tree.depth == block_size - 1
    published = train.arms["reach"]
    assert (published.objective, published.weight, published.normaliser) == ("reach", 0.1, "nodes")
    assert {arm.objective for arm in train.arms.values()} == {"token", "reach", "exit", "exit_kl", "reach_kl"}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3-4b-eagle3", (2, 18, 33)),
        ("qwen3-8b-eagle3", (2, 18, 33)),
        ("qwen3-coder-30b-a3b-eagle3", (2, 24, 45)),
        ("llama3.1-8b-eagle3", (2, 16, 29)),
    ],
)
def test_eagle_recipes_are_as_published(name: str, layers: tuple[int, ...]) -> None:
    recipe = load_recipe(name)
    head, shapes = head_of(recipe)
    assert (head.feature_layers, head.num_layers, head.draft_vocab_size, head.style) == (layers, 1, 32000, "llama")
    assert (recipe.drafter.unroll_steps, recipe.drafter.unroll_decay) == (7, 0.8)
    assert_fits(recipe, head)
    size = head.hidden_size
    assert shapes == {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (32000, size),
        "layers.0.hidden_norm.weight": (size,),
        **{f"layers.0.{name}": shape for name, shape in layer_shapes(head, 2 * size).items()},
    }


def layer_shapes(head: HeadConfig, reads: int) -> dict[str, tuple[int, ...]]:
    size, width, kv_width = head.hidden_size, head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    return {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (width, reads),
        "self_attn.k_proj.weight": (kv_width, reads),
        "self_attn.v_proj.weight": (kv_width, reads),
        "self_attn.o_proj.weight": (size, width),
        "mlp.gate_proj.weight": (head.intermediate_size, size),
        "mlp.up_proj.weight": (head.intermediate_size, size),
        "mlp.down_proj.weight": (size, head.intermediate_size),
    }


def assert_fits(recipe: Recipe, head: HeadConfig) -> None:
    target = find_config(recipe.target.model)
    assert target is not None
    assert (head.vocab_size, head.target_hidden_size) == (target["vocab_size"], target["hidden_size"])
    assert head.max_positions >= recipe.data.max_length and max(head.feature_layers) < target["num_hidden_layers"]


CONFIGS = sorted((ROOT / SHIPPED).glob("*.json"))
PUBLIC_SIZES = {  # parameters, as the models' pages on the hub count them
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_found_and_say_where_they_are_from(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    name = config["_name_or_path"]
    assert config["_source"] and name.rpartition("/")[2] == path.stem
    found = find_config(name)
    assert found is not None and found["hidden_size"] == config["hidden_size"]
    assert text_config(config).hidden_size == config["hidden_size"]
    if "dflash_config" not in config:
        assert size_from_config(config).num_parameters == PUBLIC_SIZES[name]


def test_every_model_that_a_recipe_names_has_a_config() -> None:
    for recipe in map(load_recipe, RECIPES):
        for name in (recipe.target.model, recipe.drafter.model, recipe.drafter.init):
            assert name is None or find_config(name) is not None
    assert {recipe.drafter.kind for recipe in map(load_recipe, RECIPES)} >= set(HEADS)
