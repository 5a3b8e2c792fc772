"""How big a model is, from its config alone: nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exittrain.config.schema import Recipe, ShapeSection


@dataclass(frozen=True)
class ModelSize:
    """Counts of a decoder-only transformer; num_parameters counts tied embeddings once."""

    num_parameters: int
    layer_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_width: int  # numbers of one key (or value) row of one layer: kv heads * head size


def size_from_config(config: Mapping[str, Any]) -> ModelSize:
    """From a Hugging Face config.json of a Llama-like model, mixture of experts included (biases and norms too)."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    kv_width = head_size * (config.get("num_key_value_heads") or heads)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = config.get("moe_intermediate_size") if experts else config["intermediate_size"]
    attention = hidden * head_size * heads * 2 + hidden * kv_width * 2
    feed_forward = 3 * hidden * (inner or config["intermediate_size"]) * max(experts, 1) + hidden * experts
    layer = attention + feed_forward + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return ModelSize(layers * layer + embeddings + hidden, layer, layers, hidden, vocab, kv_width)


def size_from_shape(shape: ShapeSection, vocab_size: int) -> ModelSize:
    """Of a model made from nothing."""
    return size_from_config(
        {
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.num_layers,
            "vocab_size": vocab_size,
            "num_attention_heads": shape.num_heads,
            "intermediate_size": shape.intermediate_size,
            "tie_word_embeddings": shape.tie_embeddings,
        }
    )


def target_size(recipe: Recipe) -> ModelSize | None:
    """The target's size, or None when its config is not on this machine."""
    scratch = recipe.target.scratch
    if scratch is not None:
        return size_from_shape(scratch.shape, scratch.vocab_size)
    return _local_size(recipe.target.model)


def drafter_size(recipe: Recipe, target: ModelSize | None) -> ModelSize | None:
    """The drafter's size, or None when it or the target is not known here."""
    drafter = recipe.drafter
    if drafter.init or drafter.model:
        return _local_size(drafter.init or drafter.model)
    if target is None:
        return None
    if drafter.shape is not None:
        return size_from_shape(drafter.shape, target.vocab_size)
    kept = len(drafter.layers) if isinstance(drafter.layers, list) else int(drafter.layers or 0)
    parameters = target.num_parameters - (target.num_layers - kept) * target.layer_parameters
    return ModelSize(parameters, target.layer_parameters, kept, target.hidden_size, target.vocab_size, target.kv_width)


def _local_size(source: str | None) -> ModelSize | None:
    from exittrain.models.fetch import cached_folder

    if source is None:
        return None
    folder = Path(source) if Path(source).is_dir() else cached_folder(source)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        return size_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (KeyError, ValueError):
        return None
