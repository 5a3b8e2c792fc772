"""Heads for targets of any architecture: what servers compute of a head is what was trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from exittrain.drafters.attention import Rotary
from exittrain.drafters.head_config import HeadConfig, config_like
from exittrain.errors import InputError

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0],
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}


def plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


@pytest.mark.parametrize("kind", ["eagle3", "block"])
@pytest.mark.parametrize(
    ("architecture", "fields", "rope"),
    [
        ("llama", {"rope_parameters": LINEAR}, LINEAR),
        ("gemma", {"rope_parameters": plain(1e4)}, plain(1e4)),  # gelu
        ("glm4", {"head_dim": 8, "rope_parameters": {**plain(2e4), "partial_rotary_factor": 0.5}}, plain(2e4)),
        ("phi3", {"rope_parameters": LONGROPE}, plain(1e6)),
        ("starcoder2", {"rope_parameters": plain(3e4)}, plain(3e4)),  # gelu, layer norms
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 4}, plain(1e4)),  # no rotary positions at all
    ],
)
def test_a_head_is_one_that_servers_compute(
    kind: str, architecture: str, fields: dict[str, Any], rope: dict[str, Any]
) -> None:
    target = AutoConfig.for_model(architecture, **{**SIZES, **fields})
    block = {"block_size": 4, "mask_token_id": 3} if kind == "block" else {}
    head = config_like(target, kind, (1, 2), 64, **block)
    assert head.hidden_act == "silu"
    assert dict(head.rope_parameters) == rope
    cos, _ = Rotary(head)(torch.arange(5)[None], torch.float32)
    assert cos.shape == (1, 5, head.head_dim)


def test_a_head_that_turns_a_part_of_its_keys_is_refused() -> None:
    target = AutoConfig.for_model("llama", **SIZES)
    rope = {**plain(1e4), "partial_rotary_factor": 0.5}
    with pytest.raises(InputError, match="partial_rotary_factor is not supported"):
        config_like(target, "eagle3", (1, 2), 64, rope_parameters=rope)
    assert isinstance(
        config_like(target, "eagle3", (1, 2), 64, rope_parameters={**rope, "partial_rotary_factor": 1.0}), HeadConfig
    )
