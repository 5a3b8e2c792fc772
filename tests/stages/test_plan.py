"""Sizes come from configs alone and equal the real parameter counts; the plan follows the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PretrainedConfig

from exittrain.config.load import load_recipe
from exittrain.stages.plan import make_plan
from exittrain.stages.sizes import size_from_config

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True), LlamaForCausalLM),
        (LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False, head_dim=16), LlamaForCausalLM),
        (MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4), MixtralForCausalLM),
    ],
    ids=["tied", "head_dim", "experts"],
)
def test_sizes_are_the_real_ones(config: PretrainedConfig, kind: type) -> None:
    real = sum(parameter.numel() for parameter in kind(config).parameters())
    assert size_from_config(config.to_dict()).num_parameters == real


def test_plan_counts_steps_and_tokens() -> None:
    plan = make_plan(load_recipe(TINY, ["train.arms.token.steps=7"]))
    rows = {row.stage: row for row in plan.rows}
    assert rows["train/token"].num_steps == 7 and rows["train/exit"].num_steps == 6
    assert rows["train/token"].num_tokens == 7 * 2 * 48
    assert rows["train/exit"].num_tokens == 6 * 2 * (48 + 3 * 7)
    assert rows["collect"].num_tokens == 6 * 3 * 7
    assert all(row.memory_bytes and row.memory_bytes > 0 for row in plan.rows)
    assert plan.disk_bytes > 0 and plan.num_processes == 1


def test_layers_drafter_is_the_target_less_its_other_layers(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    kept = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 2}))
    recipe = load_recipe(TINY, ["target.scratch=null", f"target.model={tmp_path}", "drafter={layers: [0, 2]}"])
    drafter = make_plan(recipe).drafter
    assert drafter is not None and drafter.num_parameters == sum(p.numel() for p in kept.parameters())
