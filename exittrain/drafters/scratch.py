"""A Llama-style causal LM from nothing: drafters of any size, and testbed targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exittrain.errors import InputError
from exittrain.models.causal import CausalModel


def make_causal_lm(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    tie_embeddings: bool = True,
    max_positions: int = 2048,
    eos_token_ids: Sequence[int] = (),
    tokenizer: Any = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    name: str = "scratch",
) -> CausalModel:
    """A randomly initialised Llama, the same for the same seed; the global random state is left as it was.

    Raises InputError where hidden_size is no multiple of twice num_heads (rotary positions need an even head size).
    """
    if hidden_size % (2 * num_heads):
        raise InputError(f"hidden_size {hidden_size} must be a multiple of 2 x num_heads ({2 * num_heads})")
    ids = list(eos_token_ids)
    config: Any = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_heads, intermediate_size=intermediate_size, tie_word_embeddings=tie_embeddings,
        max_position_embeddings=max_positions, pad_token_id=None, bos_token_id=None,
        eos_token_id=ids[0] if len(ids) == 1 else ids or None,
    )  # fmt: skip
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module: Any = LlamaForCausalLM(config)
    module = module.to(dtype)
    return CausalModel(module, tokenizer, name, verify=False)
