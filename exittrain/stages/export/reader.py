"""An exported head as somebody else's server reads it: from config.json and the weight file alone, by plain torch.

Nothing of `exittrain.drafters` is used. Layers are built from config.json, every tensor must find its place in them,
and a flag counts as a server counts it when it is absent. A context is read whole at every step, without a cache.

Shapes: L context tokens, F features of one token, H hidden, V vocabulary, D draft vocabulary, K drafted places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from exittrain.errors import InputError

FLAT = "LlamaForCausalLMEagle3"


class ServedHead(nn.Module):
    """What serves one folder. feature_layers: as indices of `hidden_states`; draft_ids [D]: d2t, as servers decode it.

    embeddings, output [V, H]: the target's, used where the folder has none of its own.
    """

    def __init__(self, data: Mapping[str, Any], layer: Mapping[str, Any], num_features: int) -> None:
        super().__init__()
        self.vocab_size, self.draft_size = layer["vocab_size"], data.get("draft_vocab_size") or layer["vocab_size"]
        size = layer["hidden_size"]
        target_size = data.get("target_hidden_size") or size
        self.layers: Any = None
        self.rotary = _rotary(layer)
        self.fc = nn.Linear(num_features * target_size, size, bias=False)
        self.norm = _Norm(size, layer)
        self.feature_layers: tuple[int, ...] = ()
        self.draft_ids = torch.arange(self.draft_size)
        self.embeddings = self.output = torch.zeros(0)
        self.lm_head: nn.Module | None = None

    def take(self, tensors: dict[str, Tensor], embeddings: Tensor, output: Tensor) -> None:
        """Fill every parameter, each by a tensor of its name and shape; none may be left over."""
        if "d2t" in tensors:
            self.draft_ids = tensors.pop("d2t") + torch.arange(self.draft_size)
        tensors.pop("t2d", None)
        self.embeddings = tensors.pop("embed_tokens.weight", embeddings).detach().float()
        self.output = output.detach().float()
        wanted = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wanted != found:
            name = sorted(set(wanted.items()) ^ set(found.items()))[0][0]
            raise InputError(f"its config asks for {name} of shape {wanted.get(name)}, it holds {found.get(name)}")
        self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)

    def laws(self, tokens: Tensor, features: Tensor, following: Tensor) -> Tensor:
        """Log-probabilities [K, V] of the tokens after a context and after each of K - 1 following tokens.

        tokens [L]; features [L - 1, F] of all but the last; following [K - 1].
        """
        raise NotImplementedError

    def law(self, state: Tensor) -> Tensor:
        """[..., V] of normed states [..., H]; -inf where nothing is drafted."""
        logits = nn.functional.linear(state, self.output) if self.lm_head is None else self.lm_head(state)
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.draft_ids] = logits
        return full.log_softmax(-1)


class ServedEagle(ServedHead):
    """An EAGLE-3 head: every step reads a token beside the feature, or the head's own state, of the place before."""

    def __init__(
        self, data: Mapping[str, Any], layer: Mapping[str, Any], num_features: int, flags: Mapping[str, bool]
    ) -> None:
        super().__init__(data, layer, num_features)
        size = layer["hidden_size"]
        self.flags, width = flags, self.fc.in_features
        self.layers = nn.ModuleList(
            _Layer(layer, 2 * size if index == 0 else size) for index in range(layer["num_hidden_layers"])
        )
        self.layers[0].hidden_norm = _Norm(size, layer)
        self.lm_head = nn.Linear(size, self.draft_size, bias=False)
        if flags["norm_before_fc"]:
            self.input_norm = _Norm(width, layer)
        if flags["fc_norm"]:
            self.fc_norm: Any = nn.ModuleList(_Norm(width // num_features, layer) for _ in range(num_features))

    @torch.no_grad()
    def laws(self, tokens: Tensor, features: Tensor, following: Tensor) -> Tensor:
        """As `ServedHead.laws`."""
        states, read, out = self._fuse(features.float()), tokens[1:], []
        for step in range(len(following) + 1):
            last = self._run(self.embeddings[read], states)[-1:]
            normed = self.norm(last)
            out.append(self.law(normed))
            if step < len(following):
                read = torch.cat([read, following[step : step + 1]])
                states = torch.cat([states, normed if self.flags["norm_output"] else last])
        return torch.cat(out)

    def _fuse(self, features: Tensor) -> Tensor:
        if self.flags["norm_before_fc"]:
            features = self.input_norm(features)
        if self.flags["fc_norm"]:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def _run(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        turn = self.rotary(hidden[None], torch.arange(len(hidden))[None])
        for index, layer in enumerate(self.layers):
            if index == 0:
                normed = layer.hidden_norm(hidden)
                given = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
                hidden = normed if self.flags["norm_before_residual"] else hidden
            else:
                given = layer.input_layernorm(hidden)
            hidden = layer.rest(hidden + layer.self_attn(given, given, turn, causal=True))
        return hidden


class ServedBlock(ServedHead):
    """A block drafter: the last token and masks see each other and the context, which enters as keys and values."""

    def __init__(
        self, data: Mapping[str, Any], layer: Mapping[str, Any], num_features: int, size: int, mask: int
    ) -> None:
        super().__init__(data, layer, num_features)
        self.block_size, self.mask_token_id = size, mask
        self.hidden_norm = _Norm(layer["hidden_size"], layer)
        self.layers = nn.ModuleList(_Layer(layer, layer["hidden_size"]) for _ in range(layer["num_hidden_layers"]))
        if self.draft_size < self.vocab_size:
            self.lm_head = nn.Linear(layer["hidden_size"], self.draft_size, bias=False)

    @torch.no_grad()
    def laws(self, tokens: Tensor, features: Tensor, following: Tensor) -> Tensor:
        """As `ServedHead.laws`, for K up to block_size - 1; what follows does not matter."""
        block = torch.full((self.block_size,), self.mask_token_id)
        block[0] = tokens[-1]
        context, hidden = self.hidden_norm(self.fc(features.float())), self.embeddings[block]
        turn = self.rotary(hidden[None], torch.arange(len(context) + len(block))[None])
        for layer in self.layers:
            given = layer.input_layernorm(hidden)
            hidden = layer.rest(hidden + layer.self_attn(given, torch.cat([context, given]), turn, causal=False))
        return self.law(self.norm(hidden[1 : len(following) + 2]))


def read_served(folder: Path, embeddings: Tensor, output: Tensor) -> ServedHead:
    """The head of a folder. embeddings, output: the target's, [V, H].

    Raises InputError where a tensor has no place, another shape, or is missing; LookupError for a missing field.
    """
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    head: ServedHead
    if data.get("speculators_model_type") == "eagle3":
        layers = data["eagle_aux_hidden_state_layer_ids"]
        flags = {name: data.get(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        flags["norm_before_residual"] = data.get("norm_before_residual", True)
        head = ServedEagle(data, data["transformer_layer_config"], len(layers), flags)
    elif data.get("speculators_model_type") == "dflash":
        layers = data["aux_hidden_state_layer_ids"]
        layer = data["transformer_layer_config"]
        head = ServedBlock(data, layer, len(layers), data["block_size"], data["mask_token_id"])
    elif data["architectures"] == [FLAT]:
        layers = [layer + 1 for layer in data["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        flags = {name: data.get(name, False) for name in ("fc_norm", "norm_output")}
        head = ServedEagle(data, data, len(layers), {**flags, "norm_before_fc": False, "norm_before_residual": False})
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    else:
        own = data["dflash_config"]
        layers = [layer + 1 for layer in own["target_layer_ids"]]
        head = ServedBlock({}, data, len(layers), data["block_size"], own["mask_token_id"])
    head.feature_layers = tuple(layers)
    head.take(tensors, embeddings, output)
    return head


class _Norm(nn.Module):
    def __init__(self, size: int, layer: Mapping[str, Any]) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), layer["rms_norm_eps"]

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps))


class _Attention(nn.Module):
    def __init__(self, layer: Mapping[str, Any], width: int) -> None:
        super().__init__()
        self.head_dim, bias = layer["head_dim"], layer["attention_bias"]
        inner, kept = (layer[name] * self.head_dim for name in ("num_attention_heads", "num_key_value_heads"))
        self.q_proj, self.o_proj = nn.Linear(width, inner, bias), nn.Linear(inner, layer["hidden_size"], bias)
        self.k_proj, self.v_proj = nn.Linear(width, kept, bias), nn.Linear(width, kept, bias)
        self.normed = layer["model_type"] == "qwen3"
        if self.normed:
            self.q_norm, self.k_norm = _Norm(self.head_dim, layer), _Norm(self.head_dim, layer)

    def forward(self, rows: Tensor, seen: Tensor, turn: tuple[Tensor, Tensor], causal: bool) -> Tensor:
        """[Q, H] of rows [Q, I], the last of seen [S, I]."""
        queries, keys, values = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in (self.q_proj(rows), self.k_proj(seen), self.v_proj(seen))
        )
        if self.normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = _turned(queries, turn), _turned(keys, turn)
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (keys, values))
        out = nn.functional.scaled_dot_product_attention(queries.transpose(0, 1), keys, values, is_causal=causal)
        projected: Tensor = self.o_proj(out.transpose(0, 1).flatten(1))
        return projected


class _Mlp(nn.Module):
    def __init__(self, layer: Mapping[str, Any]) -> None:
        super().__init__()
        size, inner, bias = layer["hidden_size"], layer["intermediate_size"], layer["mlp_bias"]
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias), nn.Linear(size, inner, bias)
        self.down_proj = nn.Linear(inner, size, bias)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class _Layer(nn.Module):
    def __init__(self, layer: Mapping[str, Any], width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (_Norm(layer["hidden_size"], layer) for _ in range(2))
        self.self_attn, self.mlp = _Attention(layer, width), _Mlp(layer)

    def rest(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def _rotary(layer: Mapping[str, Any]) -> Any:
    """Rotary positions by the old names alone, as servers on an older transformers read them."""
    make: Any = LlamaConfig if layer["model_type"] == "llama" else Qwen3Config
    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling")
    rotary: Any = LlamaRotaryEmbedding
    return rotary(make(**{name: layer[name] for name in names}))


def _turned(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [Q, n, d], of the last Q positions of turn [1, S, d]."""
    cos, sin = (part[0, -len(heads) :, None] for part in turn)
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat([-heads[..., half:], heads[..., :half]], dim=-1) * sin
