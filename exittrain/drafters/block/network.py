"""The network of a block drafter (DFlash, arXiv 2602.06036): a block's tokens in both directions, the context as keys.

A block is the anchor's token and masks, at the anchor's position and those after it. The context enters each layer as
keys and values made of the target's features alone, so they are the same in every round and can be kept.

Shapes: S rows, L context tokens, Q tokens of blocks, H hidden, F features of a token, n key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from exittrain.drafters.attention import Attention, Rotary, Rotation, make_mlp, make_norm
from exittrain.drafters.head_config import HeadConfig
from exittrain.models.masks import additive_mask

KeysValues = tuple[Tensor, Tensor]  # [S, n, L, d] each


class BlockLayer(nn.Module):
    """One decoder layer over blocks, behind the context's keys and values."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config.hidden_size, config)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = make_norm(config.hidden_size, config)
        self.mlp = make_mlp(config)

    def forward(self, states: Tensor, rotation: Rotation, context: KeysValues, mask: Tensor) -> Tensor:
        """[S, Q, H] of states [S, Q, H]; mask [S, 1, Q, L + Q] additive."""
        inputs = self.input_layernorm(states)
        own = self.self_attn.keys_values(inputs, rotation)
        keys, values = (torch.cat([before, here], dim=2) for before, here in zip(context, own, strict=True))
        states = states + self.self_attn(inputs, rotation, keys, values, mask)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class BlockNetwork(nn.Module):
    """Everything a block drafter trains. Names of the parameters are those of speculators' DFlash.

    lm_head [D, H] is there only for a pruned vocabulary (D < V): a full one is read off by the target's own head.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(config.feature_size, hidden, bias=False)
        self.hidden_norm = make_norm(hidden, config)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = make_norm(hidden, config)
        self.rotary = Rotary(config)
        self.block_size, self.mask_token_id = int(config.block_size or 0), int(config.mask_token_id or 0)
        self.pruned = config.draft_vocab_size < config.vocab_size
        if self.pruned:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """Each layer's keys and values of context tokens, from the target's features [S, L, F] at positions [S, L]."""
        states = self.hidden_norm(self.fc(features.to(self.dtype)))
        rotation = self.rotary(positions, self.dtype)
        return [cast(BlockLayer, layer).self_attn.keys_values(states, rotation) for layer in self.layers]

    def forward(self, embedded: Tensor, positions: Tensor, context: Sequence[KeysValues], visible: Tensor) -> Tensor:
        """States [S, Q, H] after the final norm, of embedded tokens [S, Q, H] at positions [S, Q]; visible
        [S, Q, L + Q] bool: which context tokens and which tokens of blocks each one sees."""
        rotation, mask = self.rotary(positions, self.dtype), additive_mask(visible, self.dtype)
        states = embedded.to(self.dtype)
        for layer, keys_values in zip(self.layers, context, strict=True):
            states = layer(states, rotation, keys_values, mask)
        out: Tensor = self.norm(states)
        return out
