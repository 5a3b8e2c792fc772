"""Which architectures are taken, and that the others are refused with one line."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import tiny_target
from transformers import AutoModelForCausalLM

from exittrain.errors import InputError
from exittrain.models.causal import CausalModel

BASE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}


def build(family: str, attention: str = "eager", **config):
    settings = {**BASE, **config}
    if family == "Bloom":
        settings = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, f"{family}Config")(**settings)
        return AutoModelForCausalLM.from_config(made, attn_implementation=attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Qwen3Moe", MOE),
        ("GPT2", {}),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {}),
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_full_attention_families_pass_the_probe(family, config, attention):
    model = CausalModel(build(family, attention, **config), name=family)
    assert model.vocab_size == 64 and model.eos_token_ids == [2]


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding window of 16"),
        ("Gemma3Text", {"head_dim": 8}, "sliding_attention layers"),
        ("Qwen3Next", MOE, "linear_attention layers"),
        ("Mamba", {}, "linear_attention layers"),
        ("Rwkv", {"attention_hidden_size": 32}, "recurrent state"),
        ("GPTNeo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4}, "local layers"),
        ("Bloom", {}, "prepared mask"),
    ],
)
def test_what_cannot_be_masked_or_rolled_back_is_refused(family, config, message):
    with pytest.raises(InputError, match=message) as caught:
        CausalModel(build(family, **config), name=family)
    assert "\n" not in str(caught.value)


def test_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    with pytest.raises(InputError, match="encoder-decoder"):
        CausalModel(transformers.T5ForConditionalGeneration(config), name="t5")


def test_probe_catches_a_model_that_ignores_its_mask():
    module = tiny_target().module
    forward = module.model.forward
    module.model.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})
    with pytest.raises(InputError, match="does not follow a tree mask"):
        CausalModel(module, name="deaf")


def test_probe_catches_a_model_that_ignores_its_positions():
    module = tiny_target().module
    forward = module.model.forward
    module.model.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "position_ids": None})
    with pytest.raises(InputError, match="does not follow a tree mask"):
        CausalModel(module, name="flat")


def test_probe_catches_an_unknown_head():
    module = tiny_target().module
    forward = module.forward

    def doubled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    module.forward = doubled
    with pytest.raises(InputError, match="after the head"):
        CausalModel(module, name="odd")
