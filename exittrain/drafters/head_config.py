"""What an EAGLE-3 head or a block drafter is made of, whatever file says so (formats.py reads and writes them)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from exittrain.errors import InputError

STYLES = ("llama", "qwen3")  # a layer's form: qwen3 normalises queries and keys per head


@dataclass(frozen=True)
class HeadConfig:
    """kind: "eagle3" or "block". All names are the field's; sizes count numbers, feature_layers are indices of
    `hidden_states` (features.py), in the order in which the features are concatenated.

    vocab_size: V, the target's; draft_vocab_size: D <= V. eagle3: norm_before_residual, norm_before_fc, fc_norm,
    norm_output as in speculators, fc_bias. block: block_size (the root and block_size - 1 masks), mask_token_id; its
    layers are of style qwen3 whatever the target's, as every reader of DFlash has them.

    Raises InputError for sizes that contradict each other, naming them.
    """

    kind: str
    style: str
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    feature_layers: tuple[int, ...]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    block_size: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("eagle3", "block"):
            raise InputError(f"a head of kind {self.kind!r}; known: eagle3, block")
        if self.style not in STYLES:
            raise InputError(f"layers of style {self.style!r} are not supported: llama or qwen3")
        if self.style == "qwen3" and self.mlp_bias:
            raise InputError("mlp_bias: layers of style qwen3 have none; set it to false")
        self._check_numbers()
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_attention_heads {self.num_heads} is no multiple of {self.num_kv_heads} key heads")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InputError(f"draft_vocab_size {self.draft_vocab_size} must lie in 1 to {self.vocab_size}")
        if self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise InputError("rope_parameters: partial_rotary_factor is not supported: a head's layers turn whole keys")
        if self.norm_before_fc and self.fc_norm:
            raise InputError("norm_before_fc and fc_norm exclude each other: set one of them to false")
        if self.kind == "eagle3" and self.block_size is not None:
            raise InputError("block_size belongs to block drafters")
        if self.kind == "block":
            self._check_block()
        if not self.feature_layers or len(set(self.feature_layers)) < len(self.feature_layers):
            raise InputError(f"feature layers {list(self.feature_layers)}: name at least one, each once")

    def _check_numbers(self) -> None:
        sizes = {
            "hidden_size": self.hidden_size, "target_hidden_size": self.target_hidden_size, "intermediate_size":
            self.intermediate_size, "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions, "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_parameters.get("rope_theta", 10000.0),
        }  # fmt: skip
        if wrong := [name for name, value in sizes.items() if not 0 < value < math.inf]:
            raise InputError(f"{wrong[0]} is {sizes[wrong[0]]}: it must be a positive number")

    def _check_block(self) -> None:
        if self.block_size is None or self.block_size < 2 or self.mask_token_id is None:
            raise InputError("a block drafter needs block_size (at least 2) and mask_token_id")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(f"mask_token_id {self.mask_token_id} must lie in 0 to {self.vocab_size - 1}")
        if self.hidden_size != self.target_hidden_size:
            raise InputError("a block drafter uses the target's embeddings: its hidden size must be the target's")
        if self.style != "qwen3":
            raise InputError("a block drafter's layers normalise queries and keys: its style must be qwen3")
        eagle = ("fc_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if on := [name for name in eagle if getattr(self, name)]:
            raise InputError(f"{on[0]} belongs to EAGLE-3 heads: set it to false")

    @property
    def feature_size(self) -> int:
        """F: numbers of one token's features."""
        return len(self.feature_layers) * self.target_hidden_size

    def layer_config(self) -> Any:
        """The transformers config of one decoder layer, for its norms, rotary embedding and feed-forward part."""
        make: Any = LlamaConfig if self.style == "llama" else Qwen3Config
        return make(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads, num_key_value_heads=self.num_kv_heads, head_dim=self.head_dim,
            hidden_act=self.hidden_act, rms_norm_eps=self.rms_norm_eps, vocab_size=self.vocab_size,
            max_position_embeddings=self.max_positions, rope_parameters=dict(self.rope_parameters),
            attention_bias=self.attention_bias, mlp_bias=self.mlp_bias, tie_word_embeddings=False,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for hashes and messages."""
        return {**asdict(self), "rope_parameters": dict(self.rope_parameters)}


def config_like(
    target: Any, kind: str, feature_layers: tuple[int, ...], draft_vocab_size: int, **changes: Any
) -> HeadConfig:
    """A head whose layers have the sizes and rotary positions of the target's (a Hugging Face text config).

    changes: fields of HeadConfig that shall differ; None leaves the target's. Whatever the target has, the feed-forward
    part is silu's and norms are RMS norms: servers compute a head's so without asking.
    """
    heads = int(target.num_attention_heads)
    values: dict[str, Any] = {
        "style": "qwen3" if kind == "block" or str(target.model_type).startswith("qwen3") else "llama",
        "hidden_size": int(target.hidden_size),
        "target_hidden_size": int(target.hidden_size),
        "intermediate_size": int(getattr(target, "intermediate_size", None) or 4 * target.hidden_size),
        "num_layers": 1,
        "num_heads": heads,
        "num_kv_heads": int(getattr(target, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(target, "head_dim", None) or target.hidden_size // heads),
        "vocab_size": int(target.vocab_size),
        "max_positions": int(target.max_position_embeddings),
        "rms_norm_eps": float(getattr(target, "rms_norm_eps", None) or 1e-6),
        "rope_parameters": _whole_rope(target),
        **{name: value for name, value in changes.items() if value is not None},
    }
    return HeadConfig(kind=kind, feature_layers=tuple(feature_layers), draft_vocab_size=draft_vocab_size, **values)


def _whole_rope(target: Any) -> dict[str, Any]:
    """The target's rotary positions. Plain ones of its base where it turns a part of each key, or has none: a head's
    layers turn whole keys, and a server told of a part would turn that."""
    rope = dict(getattr(target, "rope_parameters", None) or {})
    if rope.pop("partial_rotary_factor", 1.0) == 1.0 and "rope_type" in rope:
        return rope
    return {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)}
