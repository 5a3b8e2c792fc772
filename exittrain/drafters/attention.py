"""The parts that EAGLE heads and block drafters share: attention over given keys, norm, feed-forward, rotation.

Shapes: S rows, L columns of this forward, K columns attended to, H hidden, I input size, n heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from exittrain.drafters.head_config import HeadConfig

Rotation = tuple[Tensor, Tensor]  # cos and sin, [S, L, d] each


def make_norm(size: int, config: HeadConfig) -> nn.Module:
    """RMS norm over the last `size` numbers."""
    norm: nn.Module = LlamaRMSNorm(size, eps=config.rms_norm_eps)
    return norm


def make_mlp(config: HeadConfig) -> nn.Module:
    """The gated feed-forward part, H to H."""
    mlp: nn.Module = LlamaMLP(_with_bias(config))
    return mlp


class Rotary(nn.Module):
    """Rotary positions as the config says (scaled forms included). `rotary(positions [S, L], dtype)` -> Rotation."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.rotary: Any = LlamaRotaryEmbedding(config.layer_config())

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        like = torch.zeros((), dtype=dtype, device=positions.device)
        cos, sin = self.rotary(like, positions)
        return cos, sin

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """A cast of the whole network to half precision must not round the frequencies: far positions would turn by
        other angles than those of a network that was made in half precision."""
        before = dict(self.rotary.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in before.items():
            moved = getattr(self.rotary, name)
            if moved.dtype != exact.dtype:
                setattr(self.rotary, name, exact.to(moved.device))
        return self


class Attention(nn.Module):
    """Grouped-query attention whose keys and values are made apart from its queries, so that they may come from a cache
    or from somewhere else (the target's features)."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width, bias = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.attention_bias,
        )
        self.q_proj = nn.Linear(input_size, width, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        if config.style == "qwen3":
            self.q_norm, self.k_norm = make_norm(config.head_dim, config), make_norm(config.head_dim, config)

    def keys_values(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [S, n_kv, L, d] each, of states [S, L, I]."""
        keys, values = self._split(self.k_proj(states)), self._split(self.v_proj(states))
        if hasattr(self, "k_norm"):
            keys = self.k_norm(keys)
        return _rotate(keys, rotation), values

    def forward(self, states: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[S, L, H] of states [S, L, I] attending to keys, values [S, n_kv, K, d]; mask [S, 1, L, K] additive, None:
        causal, and L = K."""
        queries = self._split(self.q_proj(states))
        if hasattr(self, "q_norm"):
            queries = self.q_norm(queries)
        out = nn.functional.scaled_dot_product_attention(
            _rotate(queries, rotation), keys, values, mask, is_causal=mask is None, enable_gqa=True
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:-1], -1, self.head_dim).transpose(1, 2)


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotary positions on [S, n, L, d]: the halves of d turn against each other."""
    cos, sin = (part[:, None].to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _with_bias(config: HeadConfig) -> Any:
    layer = config.layer_config()
    layer.mlp_bias = config.mlp_bias  # qwen3's own config has no such field
    return layer
