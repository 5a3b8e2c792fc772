"""Sizes come from configs alone and equal the real parameter counts; the plan follows the recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from exittrain.config.load import load_recipe
from exittrain.config.schema import DrafterSection, LoraSection
from exittrain.drafters.adapter import add_adapter
from exittrain.drafters.block.network import BlockNetwork
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.layers import copy_layers
from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.stages import costs
from exittrain.stages.costs import BYTES
from exittrain.stages.model_configs import find_config
from exittrain.stages.plan import KEPT_NOTE, StagePlan, make_plan, render
from exittrain.stages.sizes import drafter_size, feature_layers, lora_parameters, new_head, size_from_config
from exittrain.stages.sizes import size_from_head as head_size
from exittrain.stages.sources import check_head

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
TARGET = LlamaConfig(**{**SHAPE, "num_hidden_layers": 9}, num_key_value_heads=2, head_dim=6)
DRAFTER = size_from_config(LlamaConfig(**SHAPE).to_dict())


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def rows_of(*overrides: str) -> dict[str, StagePlan]:
    return {row.stage: row for row in make_plan(load_recipe(TINY, overrides)).rows}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True), LlamaForCausalLM),
        (LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False, head_dim=16), LlamaForCausalLM),
        (LlamaConfig(**SHAPE, num_key_value_heads=2, attention_bias=True, mlp_bias=True), LlamaForCausalLM),
        (MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4), MixtralForCausalLM),
        (Qwen2Config(**SHAPE, num_key_value_heads=2), Qwen2ForCausalLM),
        (Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=12), Qwen3ForCausalLM),
    ],
    ids=["tied", "head_dim", "bias", "experts", "qwen2", "qwen3"],
)
def test_sizes_are_the_real_ones(config: PretrainedConfig, kind: Callable[..., nn.Module]) -> None:
    assert size_from_config(config.to_dict()).num_parameters == count(kind(config))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"num_layers": 3, "draft_vocab": 40, "intermediate_size": 20, "layer_style": "qwen3"},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_before_residual": True, "feature_layers": [1, 2, 3, 4]},
    ],
)
def test_sizes_of_eagle_heads_are_the_real_ones(section: dict[str, object]) -> None:
    head = new_head(DrafterSection(kind="eagle3", **section), TARGET)  # type: ignore[arg-type]
    with torch.device("meta"):
        network = EagleNetwork(head, nn.Embedding(100, 32))
    assert head_size(head).num_parameters == count(network)


@pytest.mark.parametrize("section", [{}, {"num_layers": 2, "draft_vocab": 40, "intermediate_size": 20}])
def test_sizes_of_block_drafters_are_the_real_ones(section: dict[str, object]) -> None:
    head = new_head(DrafterSection(kind="block", **section), TARGET, 99)  # type: ignore[arg-type]
    with torch.device("meta"):
        network = BlockNetwork(head)
    assert head_size(head).num_parameters == count(network)


def test_sizes_of_heads_with_biases() -> None:
    values = {**new_head(DrafterSection(kind="eagle3"), TARGET).as_dict(), "attention_bias": True, "mlp_bias": True}
    head = HeadConfig(**{**values, "fc_bias": True, "feature_layers": (2, 4, 6)})
    with torch.device("meta"):
        network = EagleNetwork(head, nn.Embedding(100, 32))
    assert head_size(head).num_parameters == count(network)


def test_features_where_nothing_is_said() -> None:
    assert feature_layers("eagle3", 36) == (2, 18, 33)
    assert feature_layers("block", 36) == (2, 10, 18, 26, 34)
    assert feature_layers("block", 32) == (2, 9, 16, 23, 30)
    assert feature_layers("block", 48) == (2, 13, 24, 35, 46)
    assert feature_layers("block", 20) == (2, 6, 10, 14, 18)
    assert feature_layers("block", 19) == feature_layers("eagle3", 19) == (2, 9, 16)
    assert [feature_layers("eagle3", depth) for depth in (2, 4, 7)] == [(1,), (1, 2, 3), (2, 3, 4)]
    for kind in ("eagle3", "block"):
        for depth in range(2, 60):
            chosen = feature_layers(kind, depth)
            assert list(chosen) == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] < depth
    with pytest.raises(InputError, match="one layer"):
        feature_layers("eagle3", 1)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"feature_layers": [2, 9]}, "'drafter.feature_layers' has 9: of a target of 9 layers"),
        ({"draft_vocab": 101}, "'drafter.draft_vocab' is 101, the target has 100 tokens"),
        ({"mask_token_id": 100}, "mask_token_id 100 must lie in 0 to 99"),
    ],
)
def test_heads_that_do_not_fit_their_target(section: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        new_head(DrafterSection(kind="block", **section), TARGET, 0)  # type: ignore[arg-type]


def test_plan_counts_steps_and_tokens() -> None:
    plan = make_plan(load_recipe(TINY, ["train.arms.token.steps=7"]))
    rows = {row.stage: row for row in plan.rows}
    assert rows["train/token"].num_steps == 7 and rows["train/exit"].num_steps == 6
    assert rows["train/token"].num_tokens == 7 * 2 * 48
    assert rows["train/exit"].num_tokens == 6 * 2 * (48 + 3 * 7)
    assert rows["collect"].num_tokens == 6 * 3 * 7
    assert all(row.memory_bytes and row.memory_bytes > 0 for row in plan.rows)
    assert plan.disk_bytes > 0 and plan.num_processes == 1


def test_target_tokens_of_a_language_model_as_drafter() -> None:
    rows = rows_of()
    assert rows["target"].target_tokens == 12 * 4 * 48 and rows["data"].target_tokens == 0
    assert rows["warmup"].target_tokens == 8 * 4 * 48
    assert rows["collect"].target_tokens == 6 * (48 + 3 * 6)
    assert rows["train/token"].target_tokens == 6 * 2 * 48
    assert rows["train/reach_kl"].target_tokens == 6 * 2 * (48 + 3 * 6)
    assert rows["train/exit"].target_tokens == 6 * 2 * 48  # stored trees, whose edges are scored already
    rows = rows_of("train.token_loss=ce", "train.arms.reach_kl.source=shards")
    assert rows["train/token"].target_tokens == rows["train/exit"].target_tokens == 0
    assert rows["train/reach_kl"].target_tokens == 6 * 2 * (48 + 3 * 6)  # distributions are not stored


@pytest.mark.parametrize(("temperature", "nodes"), [("0", 3.0), ("[1.0, 0.0]", 4.5), ("[1.0, 0.5]", 6.0)])
def test_at_temperature_0_no_more_of_a_tree_is_run_than_a_path(temperature: str, nodes: float) -> None:
    """A step there is cheaper for target and drafter; of a block drafter, which lays out depths, for the target."""
    own = f"train.arms.reach_kl.temperature={temperature}"
    arm = rows_of(own)["train/reach_kl"]
    assert arm.target_tokens == 6 * 2 * (48 + 3 * nodes) and arm.num_tokens == 6 * 2 * (48 + 3 * (1 + nodes))
    block = rows_of(*HEAD, own)["train/reach_kl"]
    assert block.target_tokens == 12 * 48 + 6 * 2 * (48 + 3 * nodes) and block.num_tokens == 6 * 2 * (5 + 3) * 4
    stored = rows_of("train.arms.exit.temperature=0")["train/exit"]  # whole trees come out of shards
    assert (stored.target_tokens, stored.num_tokens) == (6 * 2 * 48, 6 * 2 * (48 + 3 * 7))


def test_trees_are_drawn_whole_at_every_temperature() -> None:
    """At 0 an equal-time control gets fewer steps, by the nodes that are not run, not by those that are not drawn."""
    loops = []
    for temperature in (1.0, 0.0):
        recipe = load_recipe(TINY, [f"train.arms.reach_kl.temperature={temperature}"])
        arm = recipe.train.arms["reach_kl"]
        loops.append(costs.Loop.of_arm(recipe, arm, 32, DRAFTER, size_from_config(TARGET.to_dict())))
    spared = 2 * 3 * (6 - 3)  # sequences, trees of each, nodes of each
    expected = spared * (2.0 * loops[0].target.active_parameters + 6.0 * loops[0].trained.active_parameters)
    assert loops[0].step_operations - loops[1].step_operations == pytest.approx(expected)
    unknown = [costs.Loop.of_arm(loop.recipe, loop.recipe.train.arms["reach_kl"], 32, None, None) for loop in loops]
    assert costs.matched_steps(loops[0], loops[0]) == 6 == costs.matched_steps(unknown[0], unknown[0])
    assert costs.matched_steps(unknown[0], unknown[1]) == round(6 * (48 + 3 * 4) / (48 + 3 * 7))


HEAD = ("target.scratch.shape.num_layers=4", "drafter={kind: block, block_size: 4, num_layers: 1, block_anchors: 5}")


def test_a_head_s_features_are_computed_once_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(*HEAD, "train.steps=64")  # four epochs of 32 sequences
    assert rows["train/token"].target_tokens == 32 * 48
    assert rows["train/reach_kl"].target_tokens == 32 * 48 + 64 * 2 * (48 + 3 * 6)
    assert rows["train/token"].num_tokens == 64 * 2 * 5 * 4
    assert rows["train/reach_kl"].num_tokens == 64 * 2 * (5 + 3) * 4
    a_sequence = 48 * (3 + 1) * 32 * BYTES["float32"]
    monkeypatch.setattr(costs, "CACHE_BYTES", 8 * a_sequence)
    assert rows_of(*HEAD, "train.steps=64")["train/token"].target_tokens == (8 + 4 * 24) * 48
    monkeypatch.setattr(costs.ranks, "world_size", lambda: 2)
    monkeypatch.setattr(costs, "CACHE_BYTES", 1 << 40)
    halves = 2 * 32 * (1 - 0.5**4)  # a rank keeps what it has seen, and has seen half of what it does not know yet
    assert rows_of(*HEAD, "train.steps=64")["train/token"].target_tokens == int(halves) * 48


def test_an_eagle_head_trains_on_every_step_it_unrolls() -> None:
    drafter = "drafter={kind: eagle3, draft_vocab: 50, unroll_steps: 5}"
    rows = rows_of("target.scratch.shape.num_layers=4", drafter)
    assert rows["train/token"].num_tokens == 6 * 2 * 5 * 48
    assert rows["train/reach_kl"].num_tokens == 6 * 2 * (5 * 48 + 3 * 7)


def test_an_eagle_head_that_unrolls_later_costs_less() -> None:
    drafter = "drafter={kind: eagle3, draft_vocab: 50, unroll_steps: 5}"
    whole, later = (
        rows_of("target.scratch.shape.num_layers=4", drafter, f"warmup.unroll_from={share}")["warmup"]
        for share in (0.0, 0.75)
    )
    assert (whole.num_tokens, later.num_tokens) == (8 * 4 * 5 * 48, 8 * 4 * (0.25 * 5 + 0.75) * 48)
    assert later.target_tokens == whole.target_tokens and later.memory_bytes == whole.memory_bytes


@pytest.mark.parametrize("drafter", [(), HEAD], ids=["causal_lm", "block"])
def test_the_equal_time_control_takes_the_operations_of_its_arm(drafter: tuple[str, ...]) -> None:
    rows = rows_of(*drafter, "train.steps=100", "train.arms.token_time={match_time: reach_kl}")
    control, matched, arm = (rows[f"train/{name}"] for name in ("token", "token_time", "reach_kl"))
    assert "measured when it runs" in matched.work and "the control" in control.work
    assert matched.num_steps > control.num_steps
    per_step = matched.num_tokens / matched.num_steps
    assert per_step == control.num_tokens / control.num_steps < arm.num_tokens / arm.num_steps


def test_adapters_are_counted_as_what_they_train() -> None:
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=False)
    for targets in ("all-linear", ["q_proj", "down_proj", "lm_head"]):
        drafter = CausalDrafter(CausalModel(LlamaForCausalLM(config)))
        add_adapter(drafter, 4, 8.0, targets, seed=0)
        lora = LoraSection(rank=4, targets=targets)  # type: ignore[arg-type]
        real = sum(parameter.numel() for parameter in drafter.trainable_parameters())
        assert lora_parameters(config.to_dict(), lora) == real
    whole, adapted = rows_of(), rows_of("train.lora={rank: 1}")
    for name in ("train/token", "train/reach_kl"):
        (before, after) = whole[name], adapted[name]
        assert before.disk_bytes and after.disk_bytes and after.disk_bytes < before.disk_bytes
        assert before.memory_bytes and after.memory_bytes and after.memory_bytes < before.memory_bytes
        assert "adapters of rank 1" in after.work
    assert adapted["warmup"] == whole["warmup"]


def test_layers_drafter_is_the_target_less_its_other_layers(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)
    target = CausalModel(LlamaForCausalLM(config))
    target.module.save_pretrained(tmp_path)
    recipe = load_recipe(TINY, ["target.scratch=null", f"target.model={tmp_path}", "drafter={layers: [0, 2]}"])
    drafter, real = drafter_size(recipe), copy_layers(target, [0, 2])
    assert drafter is not None and drafter.num_parameters == count(real.module)
    assert drafter.trained_parameters == sum(parameter.numel() for parameter in real.trainable_parameters())


def test_zero_splits_the_optimiser_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(TINY, ["train.deepspeed=zero1-bf16"])
    size = drafter_size(recipe)
    assert size is not None
    alone = costs.drafter_bytes(recipe, size)
    assert alone == 16 * size.num_parameters == costs.drafter_bytes(load_recipe(TINY), size)
    monkeypatch.setattr(costs.ranks, "world_size", lambda: 4)
    assert costs.drafter_bytes(recipe, size) == (4 + 12 / 4) * size.num_parameters
    sizes = {"zero2": 4 + 12 / 4, "zero3": 4 + 16 / 4, "zero2-offload": 4 + 4 / 4, "zero3-offload": 4 + 4 / 4}
    for name, each in sizes.items():
        recipe = load_recipe(TINY, [f"train.deepspeed={name}"])
        assert costs.drafter_bytes(recipe, size) == each * size.num_parameters, name


def test_the_plan_says_what_is_kept_only_of_heads() -> None:
    for overrides, kept in (((), False), (HEAD, True)):
        recipe = load_recipe(TINY, overrides)
        shown = render(make_plan(recipe), recipe)
        assert "target tokens" in shown and (KEPT_NOTE in shown) == kept


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("llama3.1-8b-block", ["tree.depth=10"], "a block of 10 drafts 9 tokens ahead"),
        ("llama3.1-8b", ["drafter={init: z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat}"], "set 'drafter.kind' to block"),
        ("qwen3-4b", ["drafter={kind: eagle3, init: z-lab/Qwen3-4B-DFlash-b16}"], "is of kind 'block'"),
        ("qwen3-4b", ["drafter={kind: eagle3, init: Qwen/Qwen3-0.6B}"], "a language model: set 'drafter.kind' to"),
        ("qwen3-4b", ["drafter={kind: block, feature_layers: [36]}"], "'drafter.feature_layers' has 36"),
        ("llama3.1-8b-block", ["tree.depth=9"], None),
        ("qwen3-4b", ["drafter={kind: block, init: someone/unknown}", "tree.depth=40"], None),
    ],
)
def test_saved_heads_are_looked_at_before_anything_runs(
    recipe: str, overrides: list[str], expected: str | None
) -> None:
    loaded = load_recipe(recipe, overrides)
    if expected is None:
        check_head(loaded)
    else:
        with pytest.raises(InputError, match=expected):
            check_head(loaded)


def test_configs_are_found_by_their_exact_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_config("Qwen/Qwen3-4B")
    assert found is not None and found["hidden_size"] == 2560
    assert find_config("someone/Qwen3-4B") is None and find_config("runs/no/such/folder") is None
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    local = find_config(str(tmp_path))
    assert local is not None and local["hidden_size"] == 32
    (tmp_path / "config.json").write_text("[1]")
    assert find_config(str(tmp_path)) is None
