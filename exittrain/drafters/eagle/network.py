"""The network of an EAGLE-3 head (arXiv 2503.01840): few decoder layers that read a token beside a feature.

The row of token x_t takes [embedding(x_t) ; what is known of the token before it] and predicts x_{t+1}. What is known
are the target's own features there, or, of a drafted token, the state that this network put out for it one step ago.

Shapes: S rows, L columns of this forward, K cached columns, H hidden, F features of one token, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exittrain.drafters.attention import Attention, Rotary, Rotation, make_mlp, make_norm
from exittrain.drafters.head_config import HeadConfig
from exittrain.errors import InputError


class _Layer(nn.Module):
    """A pre-norm decoder layer, whose attention may read wider states than it adds to."""

    def __init__(self, config: HeadConfig, index: int, input_size: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = make_norm(config.hidden_size, config)
        self.self_attn = Attention(config, input_size)
        self.post_attention_layernorm = make_norm(config.hidden_size, config)
        self.mlp = make_mlp(config)

    def run(self, residual: Tensor, states: Tensor, rotation: Rotation, mask: Tensor | None, cache: Any) -> Tensor:
        """[S, L, H]: residual [S, L, H] and what attention makes of states [S, L, I], then the feed-forward part."""
        keys, values = self.self_attn.keys_values(states, rotation)
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        hidden = residual + self.self_attn(states, rotation, keys, values, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DecoderLayer(_Layer):
    """An ordinary layer: the second of a head, and those after it."""

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, cache: Any) -> Tensor:
        """[S, L, H] of hidden [S, L, H]."""
        return self.run(hidden, self.input_layernorm(hidden), rotation, mask, cache)


class FirstLayer(_Layer):
    """The layer that reads [norm(embedding) ; norm(hidden)] and adds to hidden (norm_before_residual: to its norm)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = make_norm(config.hidden_size, config)
        self._norm_before_residual = config.norm_before_residual

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, mask: Tensor | None, cache: Any) -> Tensor:
        """[S, L, H] of embedded and hidden, both [S, L, H]."""
        normed = self.hidden_norm(hidden)
        states = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self.run(normed if self._norm_before_residual else hidden, states, rotation, mask, cache)


class EagleNetwork(nn.Module):
    """What is trained of a head. Implements `Cacheable`; everything is differentiable but for the embeddings, so that
    one `hidden` serves drafting and training.

    embeddings: ids to [..., H], the target's, which stay outside of the module's parameters; own_embeddings: they are
    the head's (frozen all the same) and are saved with it. Raises InputError where they are not H wide.
    """

    def __init__(self, config: HeadConfig, embeddings: Any, own_embeddings: bool = False) -> None:
        super().__init__()
        size, target_size = config.hidden_size, config.target_hidden_size
        width = int(embeddings.weight.shape[-1])
        if width != size:
            raise InputError(
                f"an EAGLE head of hidden size {size} cannot read embeddings of size {width}: give it the target's "
                "hidden size, or a checkpoint that brings embeddings of its own"
            )
        self.config = config
        self._shared = () if own_embeddings else (embeddings,)  # in a tuple: no part of this module
        if own_embeddings:
            self.embed_tokens = embeddings.requires_grad_(False)
        if config.norm_before_fc:
            self.input_norm = make_norm(config.feature_size, config)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(make_norm(target_size, config) for _ in config.feature_layers)
        self.fc = nn.Linear(config.feature_size, size, bias=config.fc_bias)
        more = [DecoderLayer(config, index, size) for index in range(1, config.num_layers)]
        self.layers = nn.ModuleList([FirstLayer(config), *more])
        self.norm = make_norm(size, config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def embeddings(self) -> Any:
        """Ids to [..., H], the target's own unless the head brings some."""
        return self._shared[0] if self._shared else self.embed_tokens

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H] of the target's features [..., F], in the head's dtype: what `hidden` takes of a committed token."""
        features = features.to(self.device, self.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Any = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """States [S, L, H] of input_ids [S, L] at position_ids [S, L] (None: 0 to L - 1), appended to the cache.

        features [S, L, H]: of the token before each, fused (`fuse`) or its own state from an earlier call. mask
        [S, 1, L, K+L] additive, None: causal over the L columns. The states come before the final norm (norm_output:
        after it): they are what the next step takes, and what `head` takes.
        """
        if features is None:
            raise ValueError("an EAGLE head reads features beside its tokens")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        rotation = self.rotary(position_ids, self.dtype)
        embedded = self.embeddings(input_ids).detach().to(self.dtype)
        states: Tensor = self.layers[0](embedded, features, rotation, mask, cache)
        for layer in self.layers[1:]:
            states = layer(states, rotation, mask, cache)
        return self.norm(states) if self.config.norm_output else states

    def head(self, states: Tensor) -> Tensor:
        """Raw logits [..., D] float32 of states [..., H]."""
        logits: Tensor = self.lm_head(states if self.config.norm_output else self.norm(states))
        return logits.float()
