"""How big a model is, from its config alone: nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from exittrain.config.drafter_checks import BLOCK_SIZE
from exittrain.config.schema import HEADS, DrafterSection, LoraSection, Recipe, ShapeSection
from exittrain.drafters.head_config import HeadConfig, config_like
from exittrain.errors import InputError
from exittrain.models.features import default_layers
from exittrain.stages.model_configs import find_config, text_config

BLOCK_LAYERS = 5  # layers of a DFlash drafter, and features it reads
DEEP = 20  # layers from which on a target's features are spread as DFlash spreads them


@dataclass(frozen=True)
class ModelSize:
    """Counts of a decoder-only transformer, or of a head on one.

    num_parameters counts tied embeddings once; a head's embeddings, and a head without a vocabulary of its own its
    output layer, are the target's and not counted. layer_parameters: of one layer; active_parameters: those a token is
    multiplied with, all layers and the output (of experts, the ones it is sent to); trained_parameters: those training
    changes; vocab_size: columns of the logits; kv_width: numbers of one key (or value) row of one layer; head: what a
    head is made of.
    """

    num_parameters: int
    layer_parameters: int
    active_parameters: int
    trained_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_width: int
    head: HeadConfig | None = None


def size_from_config(config: Mapping[str, Any]) -> ModelSize:
    """From a Hugging Face config.json of a Llama-like model, mixture of experts included.

    Raises KeyError for a config without the usual fields.
    """
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    kind, head_size, heads, kv_width = _attention_sizes(config)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
    attention = 2 * hidden * head_size * heads + 2 * hidden * kv_width
    if config.get("attention_bias") or kind == "qwen2":
        attention += head_size * heads + 2 * kv_width + (0 if kind == "qwen2" else hidden)
    attention += 2 * head_size if kind.startswith("qwen3") else 0  # norms of queries and keys
    expert = 3 * hidden * inner + (2 * inner + hidden if config.get("mlp_bias") else 0)
    around = attention + hidden * experts + 2 * hidden
    layer, active = around + expert * max(experts, 1), around + expert * min(experts or 1, _experts_a_token(config))
    tied = config.get("tie_word_embeddings", False)
    total = layers * layer + vocab * hidden * (1 if tied else 2) + hidden
    return ModelSize(total, layer, layers * active + vocab * hidden, total, layers, hidden, vocab, kv_width)


def size_from_head(head: HeadConfig) -> ModelSize:
    """Of an EAGLE-3 head or a block drafter, its own parameters only."""
    size, bias = head.hidden_size, head.attention_bias
    width, kv_width = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    reads = 2 * size if head.kind == "eagle3" else size  # of the first layer: embedding and feature
    feed_forward = 3 * size * head.intermediate_size
    feed_forward += 2 * head.intermediate_size + size if head.mlp_bias else 0

    def layer(reads: int) -> int:
        attention = reads * (width + 2 * kv_width) + width * size + (width + 2 * kv_width + size if bias else 0)
        return attention + (2 * head.head_dim if head.style == "qwen3" else 0) + feed_forward + 2 * size

    layers = layer(reads) + (head.num_layers - 1) * layer(size) + size  # hidden_norm, in the first or before it
    own_output = head.kind == "eagle3" or head.draft_vocab_size < head.vocab_size
    output = head.draft_vocab_size * size
    into = head.feature_size * size + (size if head.fc_bias else 0)
    into += head.feature_size if head.norm_before_fc or head.fc_norm else 0
    total = layers + into + size + (output if own_output else 0)
    return ModelSize(
        total, layer(size), layers + into + output, total, head.num_layers, size, head.draft_vocab_size, kv_width, head
    )


def size_from_shape(shape: ShapeSection, vocab_size: int) -> ModelSize:
    """Of a model made from nothing."""
    return size_from_config(_shape_config(shape, vocab_size))


def target_size(recipe: Recipe) -> ModelSize | None:
    """The target's size, or None when its config is not known here."""
    return _size(target_config(recipe))


def target_config(recipe: Recipe) -> dict[str, Any] | None:
    """What config.json says, or would say, of the recipe's target; None when it is not known here."""
    scratch = recipe.target.scratch
    return find_config(recipe.target.model) if scratch is None else _shape_config(scratch.shape, scratch.vocab_size)


def drafter_size(recipe: Recipe, lora: LoraSection | None = None) -> ModelSize | None:
    """The drafter's size, or None when it or the target is not known here. lora: it is trained by adapters alone.

    Raises InputError for a head that does not fit its target.
    """
    drafter, target = recipe.drafter, target_config(recipe)
    head = recipe_head(recipe)
    if head is not None:
        return size_from_head(head)
    if drafter.init or drafter.model:
        config = find_config(drafter.init or drafter.model)
    elif drafter.shape is not None:
        config = None if target is None else _shape_config(drafter.shape, target["vocab_size"])
    else:
        kept = len(drafter.layers) if isinstance(drafter.layers, list) else int(drafter.layers or 0)
        config = None if target is None else {**target, "num_hidden_layers": kept}
    size = _size(config)
    if size is None or config is None:
        return None
    if drafter.layers is not None:  # embeddings and output are the target's, and frozen
        size = replace(size, trained_parameters=size.num_layers * size.layer_parameters + size.hidden_size)
    return size if lora is None else replace(size, trained_parameters=lora_parameters(config, lora))


def recipe_head(recipe: Recipe) -> HeadConfig | None:
    """What the recipe's EAGLE-3 head or block drafter is made of: saved, or new for its target. None for another kind
    and where it is not known here. The mask of a new block is 0 where the recipe leaves it to the tokenizer.

    Raises InputError for a saved head that cannot be read, or a new one that does not fit its target.
    """
    from exittrain.drafters.formats.configs import form_of, parse_config

    drafter, target = recipe.drafter, target_config(recipe)
    if drafter.init is not None:
        saved = find_config(drafter.init)
        if saved is None or form_of(saved) is None:
            return None
        return parse_config(saved, drafter.init, None if target is None else target.get("num_hidden_layers"))
    if drafter.kind not in HEADS or target is None:
        return None
    config = text_config(target)
    return None if config is None else new_head(drafter, config, drafter.mask_token_id or 0)


def new_head(section: DrafterSection, target: Any, mask_token_id: int | None = None) -> HeadConfig:
    """A head made from nothing for a target (its Hugging Face text config). mask_token_id: where a block's section
    names none.

    Raises InputError for feature layers that the target has not, and sizes that contradict each other.
    """
    depth, vocab = int(target.num_hidden_layers), int(target.vocab_size)
    chosen = tuple(section.feature_layers or feature_layers(section.kind, depth))
    if outside := [layer for layer in chosen if not 1 <= layer < depth]:
        raise InputError(
            f"'drafter.feature_layers' has {outside[0]}: of a target of {depth} layers hidden states 1 to {depth - 1} "
            "can be read"
        )
    draft_vocab = section.draft_vocab or vocab
    if draft_vocab > vocab:
        raise InputError(f"'drafter.draft_vocab' is {draft_vocab}, the target has {vocab} tokens: lower it")
    changes: dict[str, Any] = {"intermediate_size": section.intermediate_size}
    if section.kind == "block":
        mask = mask_token_id if section.mask_token_id is None else section.mask_token_id
        block = {"block_size": section.block_size or BLOCK_SIZE, "mask_token_id": mask}
        return config_like(
            target, "block", chosen, draft_vocab, num_layers=section.num_layers or BLOCK_LAYERS, **block, **changes
        )
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    own: dict[str, Any] = {"style": section.layer_style, **{name: getattr(section, name) for name in norms}}
    return config_like(target, "eagle3", chosen, draft_vocab, num_layers=section.num_layers, **own, **changes)


def feature_layers(kind: str, depth: int) -> tuple[int, ...]:
    """What a head reads of a target of `depth` layers where its section does not say, as indices of `hidden_states`.

    EAGLE-3's low, middle and high (`default_layers`); for a block drafter behind DEEP layers or more DFlash's five,
    evenly spread from 2 to depth - 2. Of a target too shallow for three of its layers to differ, all that can be read.

    Raises InputError for a target of one layer, whose features are its output.
    """
    if depth < 2:
        raise InputError("a head reads a target's inner layers: a target of one layer has none")
    if kind == "block" and depth >= DEEP:
        return tuple(round(2 + place * (depth - 4) / (BLOCK_LAYERS - 1)) for place in range(BLOCK_LAYERS))
    low, middle, high = default_layers(depth)
    return (low, middle, high) if low < middle < high else tuple(range(1, depth))


def lora_parameters(config: Mapping[str, Any], lora: LoraSection) -> int:
    """What adapters add to a model's linear layers (all but the output where `all-linear`); experts get none."""
    hidden = config["hidden_size"]
    _, head_size, heads, kv_width = _attention_sizes(config)
    sizes = {
        "q_proj": hidden + head_size * heads, "k_proj": hidden + kv_width, "v_proj": hidden + kv_width,
        "o_proj": head_size * heads + hidden,
    }  # fmt: skip
    if not (config.get("num_experts") or config.get("num_local_experts")):
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + config["intermediate_size"])
    named = sizes if lora.targets == "all-linear" else [name.rpartition(".")[2] for name in lora.targets]
    output = hidden + config["vocab_size"] if "lm_head" in named else 0
    return int(lora.rank * (config["num_hidden_layers"] * sum(sizes.get(name, 0) for name in named) + output))


def _attention_sizes(config: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """(model_type, head size, heads, numbers of one key row)."""
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return str(config.get("model_type")), head_size, heads, head_size * (config.get("num_key_value_heads") or heads)


def _experts_a_token(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts_per_tok") or 1)


def _shape_config(shape: ShapeSection, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": vocab_size,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "tie_word_embeddings": shape.tie_embeddings,
    }


def _size(config: Mapping[str, Any] | None) -> ModelSize | None:
    try:
        return None if config is None else size_from_config(config)
    except (KeyError, TypeError):
        return None
