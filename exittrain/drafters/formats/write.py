"""A head as a folder or as the parts of one: config.json and tensors in each of the known forms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exittrain.drafters.formats.configs import DFLASH_NAME, EAGLE_FLAGS, FLAT_NAMES
from exittrain.drafters.formats.tensors import offsets_of, split_tensors
from exittrain.drafters.head_config import HeadConfig
from exittrain.errors import InputError

SPECULATORS_VERSION = "0.9.0"  # whose schema is written
EAGLE_TOKENS = 3  # the chain a server drafts when nobody tells it how many; a block is as long as it is


def write_head(
    folder: Path, config: HeadConfig, tensors: dict[str, Tensor], draft_ids: Tensor | None, target_name: str,
    target_architectures: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write config.json and model.safetensors in speculators' form into an existing folder, tensors as they are.

    tensors: by speculators' names, `embed_tokens.weight` among them where the head has embeddings of its own;
    draft_ids [D] or None; target_name: what servers find the target by. Raises InputError where tensors or draft_ids
    are not those of the config.
    """
    stored = stored_tensors("speculators", config, tensors, draft_ids)
    data = speculators_config(config, stored["norm.weight"].dtype, target_name, target_architectures)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def stored_tensors(
    form: str, config: HeadConfig, tensors: Mapping[str, Tensor], draft_ids: Tensor | None
) -> dict[str, Tensor]:
    """Every tensor of a weight file of that form, by its name there; t2d and d2t (offsets) only where D < V."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if draft_ids is not None:
        ids = draft_ids.to("cpu", torch.int64)
        stored["d2t"] = offsets_of(ids)
        if config.draft_vocab_size < config.vocab_size:
            stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    extra = split_tensors({name: stored[name] for name in stored if name != "t2d"}, config, "the head to write")[3]
    if extra:
        raise InputError(f"the head to write has a tensor {extra[0]} that its config does not know")
    if "t2d" in stored:
        stored["t2d"][ids] = True
    else:
        stored.pop("d2t", None)
    names = stored_names(form, stored)
    return {names[name]: tensor for name, tensor in stored.items()}


def stored_names(form: str, names: Iterable[str]) -> dict[str, str]:
    """What a weight file of that form calls each tensor; SGLang's first layer has a name of its own."""
    return {name: _midlayer(name) if form == "sglang" else name for name in names}


def speculators_config(
    config: HeadConfig, dtype: torch.dtype, target_name: str, target_architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """config.json of speculators eagle3 or dflash; every flag is written: readers differ in what absence means."""
    block = config.block_size
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": EAGLE_TOKENS if block is None else block - 1,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    algorithm = "eagle3" if block is None else "dflash"
    data: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel" if block is None else DFLASH_NAME],
        "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": list(target_architectures), "name_or_path": target_name},
        },
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**_layer_fields(config), "vocab_size": config.vocab_size},
        **_dtype_fields(dtype),
    }
    if block is None:
        data |= {name: getattr(config, name) for name in EAGLE_FLAGS}
        data |= {"eagle_aux_hidden_state_layer_ids": list(config.feature_layers), "embed_requires_grad": False}
        return data | ({"fc_bias": True} if config.fc_bias else {})
    return data | {
        "aux_hidden_state_layer_ids": list(config.feature_layers), "block_size": block,
        "mask_token_id": config.mask_token_id, "sample_from_anchor": False, "sliding_window_non_causal": False,
    }  # fmt: skip


def sglang_config(config: HeadConfig, dtype: torch.dtype, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config.json of EAGLE and SGLang. special_ids: the target's bos_token_id, eos_token_id, pad_token_id."""
    data: dict[str, Any] = {
        **_layer_fields(config),
        **_dtype_fields(dtype),
        **special_ids,
        "architectures": [FLAT_NAMES[0]],
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.feature_layers),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.feature_layers],
        },
    }
    # Its presence alone makes servers read it: only where it says something.
    differs = config.target_hidden_size != config.hidden_size
    return data | ({"target_hidden_size": config.target_hidden_size} if differs else {})


def dflash_config(config: HeadConfig, dtype: torch.dtype, num_target_layers: int) -> dict[str, Any]:
    """config.json of a z-lab DFlash drafter. No auto_map: servers bring the class, and its code is no part of this."""
    return {
        **_layer_fields(config),
        **_dtype_fields(dtype),
        "architectures": [DFLASH_NAME],
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        },
        "num_target_layers": num_target_layers,
        "vocab_size": config.vocab_size,
    }


def rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under their new name and their old ones: servers on an older transformers read only those."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = rope.get("rope_type", "default") == "default"
    return {"rope_parameters": dict(rope), "rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}


def _layer_fields(config: HeadConfig) -> dict[str, Any]:
    """A decoder layer's fields as transformers names them, none left to a reader's defaults."""
    fields = {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": config.mlp_bias,
        "model_type": config.style,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        **rope_fields(config.rope_parameters),
    }
    if config.style == "llama":
        return fields
    full = ["full_attention"] * config.num_layers
    return fields | {"layer_types": full, "sliding_window": None, "use_sliding_window": False}


def _dtype_fields(dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def _midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
