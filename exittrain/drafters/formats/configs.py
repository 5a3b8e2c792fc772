"""config.json of a head in any of the known forms, as a HeadConfig.

Layer ids: speculators and vLLM name an output by its index in `hidden_states`; SGLang's explicit list and z-lab's name
the layer itself, one less. Where SGLang and speculators name none they both read `features.default_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exittrain.drafters.head_config import HeadConfig
from exittrain.errors import InputError
from exittrain.models.features import default_layers

FLAT_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # SGLang's and vLLM's class of one and the same head
DFLASH_NAME = "DFlashDraftModel"
EAGLE_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_READ = (
    *_REQUIRED, "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "attention_bias", "mlp_bias", "rope_parameters", "rope_theta", "rope_scaling",
)  # fmt: skip
_DFLASH_KEYS = {"mask_token_id", "target_layer_ids", "block_size", "causal"}


def form_of(data: Mapping[str, Any]) -> str | None:
    """ "speculators", "sglang" or "dflash"; "other" for a head in a form that cannot be read; None for no head."""
    names = [str(name) for name in data.get("architectures") or ()]
    if "speculators_model_type" in data:
        return "speculators" if data["speculators_model_type"] in ("eagle3", "dflash") else "other"
    if DFLASH_NAME in names:
        return "dflash"
    if any(name in FLAT_NAMES for name in names):
        return "sglang"
    return "other" if any("eagle" in name.lower() or "dflash" in name.lower() for name in names) else None


def parse_config(data: Mapping[str, Any], where: str, num_target_layers: int | None) -> HeadConfig:
    """The head that config.json describes. where: what messages call its folder; num_target_layers: None if unknown.

    Raises InputError, one line, for another kind of drafter, a field that is missing or no use, an option that is not
    supported, and feature layers that only the target's depth would tell.
    """
    form = form_of(data)
    if form in (None, "other"):
        named = data.get("speculators_model_type") or data.get("architectures")
        raise InputError(
            f"{where} is of a form that cannot be read ({named}); known: speculators eagle3 and dflash, "
            f"{FLAT_NAMES[0]}, {DFLASH_NAME}"
        )
    if data.get("quantization_config"):
        raise InputError(f"{where} is quantised: use the weights it was made from")
    parsers: dict[str, Callable[..., dict[str, Any]]] = {
        "speculators": _speculators, "sglang": _sglang, "dflash": _dflash
    }  # fmt: skip
    try:
        return HeadConfig(**parsers[str(form)](data, num_target_layers))
    except InputError as error:
        raise InputError(f"config.json of {where}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise InputError(f"config.json of {where} cannot be used: {_first_line(error)}") from error


def _speculators(data: Mapping[str, Any], depth: int | None) -> dict[str, Any]:
    layer = data.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise InputError("transformer_layer_config is missing")
    block = data["speculators_model_type"] == "dflash"
    style = "qwen3" if block else str(layer.get("model_type", "qwen3"))
    values = _layer_values(layer, style)
    values |= {
        "kind": "block" if block else "eagle3",
        "draft_vocab_size": _whole(_needed(data, "draft_vocab_size"), "draft_vocab_size"),
        "target_hidden_size": _size_or(data.get("target_hidden_size"), "target_hidden_size", values["hidden_size"]),
    }
    if block:
        if data.get("sample_from_anchor"):
            raise InputError("sample_from_anchor is not supported: a block's first state must predict nothing")
        ids = _needed(data, "aux_hidden_state_layer_ids")
        masks = {name: _whole(_needed(data, name), name) for name in ("block_size", "mask_token_id")}
        return values | masks | {"feature_layers": _layers(ids)}
    # Absent, this one means false to speculators and true to vLLM.
    _needed(data, "norm_before_residual")
    values |= {name: _flag(data, name) for name in (*EAGLE_FLAGS, "fc_bias")}
    return values | {"feature_layers": _layers_or_default(data.get("eagle_aux_hidden_state_layer_ids"), depth)}


def _sglang(data: Mapping[str, Any], depth: int | None) -> dict[str, Any]:
    if data.get("model_type", "llama") not in ("llama", "qwen3"):
        raise InputError(f"layers of model_type {data['model_type']!r} are not supported")
    values = _layer_values(data, "llama")
    named = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = _layers_or_default(None if named is None else [layer + 1 for layer in _layers(named)], depth)
    if (count := data.get("num_aux_hidden_states")) is not None and count != len(layers):
        raise InputError(f"num_aux_hidden_states is {count}, its feature layers are {len(layers)}")
    return values | {
        "kind": "eagle3",
        "draft_vocab_size": _size_or(data.get("draft_vocab_size"), "draft_vocab_size", values["vocab_size"]),
        "target_hidden_size": _size_or(data.get("target_hidden_size"), "target_hidden_size", values["hidden_size"]),
        "feature_layers": layers,
        "fc_bias": _flag(data, "bias"),
        **{name: _flag(data, name) for name in EAGLE_FLAGS},
    }


def _dflash(data: Mapping[str, Any], depth: int | None) -> dict[str, Any]:
    values, own = _layer_values(data, "qwen3"), dict(data.get("dflash_config") or {})
    if unknown := sorted(own.keys() - _DFLASH_KEYS):
        raise InputError(f"dflash_config has {unknown[0]}, which is not supported")
    if own.get("causal") or data.get("is_causal"):
        raise InputError("a block that attends causally is not supported")
    made_for = data.get("num_target_layers")
    if depth is not None and made_for is not None and made_for != depth:
        raise InputError(f"it is made for a target of {made_for} layers, not of {depth}")
    size = data.get("block_size") or own.get("block_size")
    if size is None:
        raise InputError("block_size is missing")
    return values | {
        "kind": "block",
        "draft_vocab_size": values["vocab_size"],
        "target_hidden_size": values["hidden_size"],
        "block_size": _whole(size, "block_size"),
        "mask_token_id": _whole(_needed(own, "mask_token_id"), "mask_token_id"),
        "feature_layers": tuple(layer + 1 for layer in _layers(_needed(own, "target_layer_ids"))),
    }


def _layer_values(data: Mapping[str, Any], style: str) -> dict[str, Any]:
    """What a decoder layer's config says, by HeadConfig's names; absent fields as transformers has them."""
    for name in _REQUIRED:
        _needed(data, name)
    if style not in ("llama", "qwen3"):
        raise InputError(f"layers of model_type {style!r} are not supported: llama or qwen3")
    kinds = {str(kind) for kind in data.get("layer_types") or ()} - {"full_attention"}
    windowed = data.get("use_sliding_window") and data.get("sliding_window") and not data.get("layer_types")
    if kinds or windowed:
        raise InputError("sliding-window layers are not supported: full attention is needed")
    make: Any = LlamaConfig if style == "llama" else Qwen3Config
    given = {name: data[name] for name in _READ if data.get(name) is not None}
    try:
        layer = make(**given)
    except Exception as error:  # transformers raises its own kinds of errors for values of another type
        raise InputError(_first_line(error)) from error
    if layer.hidden_act not in ACT2FN:
        raise InputError(f"hidden_act {layer.hidden_act!r} is not known: silu is what servers compute")
    _check_rope(data, make)
    return {
        "style": style,
        "hidden_size": int(layer.hidden_size),
        "intermediate_size": int(layer.intermediate_size),
        "num_layers": int(layer.num_hidden_layers),
        "num_heads": int(layer.num_attention_heads),
        "num_kv_heads": int(layer.num_key_value_heads),
        "head_dim": int(layer.head_dim),
        "vocab_size": int(layer.vocab_size),
        "max_positions": int(layer.max_position_embeddings),
        "hidden_act": str(layer.hidden_act),
        "rms_norm_eps": float(layer.rms_norm_eps),
        "rope_parameters": _rope(layer),
        "attention_bias": bool(layer.attention_bias),
        "mlp_bias": bool(getattr(layer, "mlp_bias", False)),
    }


def _rope(layer: Any) -> dict[str, Any]:
    rope = dict(layer.rope_parameters)
    rope.pop("type", None)  # an old name of rope_type, which transformers fills in
    kind = rope.get("rope_type", "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise InputError(f"rope_type {kind!r} is not known: {', '.join(['default', *sorted(ROPE_INIT_FUNCTIONS)])}")
    if "rope_theta" not in rope:
        raise InputError("rope_parameters that differ from layer to layer are not supported")
    return {**rope, "rope_theta": float(rope["rope_theta"])}


def _check_rope(data: Mapping[str, Any], make: Any) -> None:
    """New readers take rope_parameters, old ones rope_theta and rope_scaling: they must say one thing."""
    if not data.get("rope_parameters") or data.get("rope_theta") is None:
        return
    longest = data.get("max_position_embeddings")
    size = {} if longest is None else {"max_position_embeddings": longest}  # some original lengths default to it
    new = make(rope_parameters=dict(data["rope_parameters"]), **size)
    old = make(rope_theta=data["rope_theta"], rope_scaling=data.get("rope_scaling"), **size)
    if _rope(new) != _rope(old):
        raise InputError(f"rope_parameters {_rope(new)} contradict rope_theta and rope_scaling {_rope(old)}")


def _layers_or_default(named: Any, depth: int | None) -> tuple[int, ...]:
    if named:
        return _layers(named)
    if depth is None:
        raise InputError("it names no feature layers, which then depend on the target's depth: load it for a target")
    return default_layers(depth)


def _needed(data: Mapping[str, Any], name: str) -> Any:
    if data.get(name) is None:
        raise InputError(f"{name} is missing")
    return data[name]


def _whole(value: Any, name: str) -> int:
    """Not `int()`, which would make 100 of 100.7, of "100" and 1 of true."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, no whole number")
    return value


def _size_or(value: Any, name: str, default: int) -> int:
    return default if value is None else _whole(value, name)


def _layers(named: Any) -> tuple[int, ...]:
    return tuple(_whole(layer, "a feature layer") for layer in named)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, no true or false")
    return value


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] if lines else type(error).__name__
