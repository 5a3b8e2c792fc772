"""Tiny EAGLE-3 heads and block drafters: random tensors of a config, and folders that hold them in every form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exittrain.drafters.formats.tensors import head_shapes
from exittrain.drafters.formats.write import dflash_config, sglang_config, stored_tensors, write_head
from exittrain.drafters.head_config import HeadConfig

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}


def eagle_config(**changes: Any) -> HeadConfig:
    values: dict[str, Any] = {
        "kind": "eagle3", "style": "llama", "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48,
        "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 64, "draft_vocab_size": 24,
        "max_positions": 256, "feature_layers": (2, 3, 5), "rms_norm_eps": 3e-6,
    }  # fmt: skip
    return HeadConfig(**{**values, **changes})


def block_config(**changes: Any) -> HeadConfig:
    block = {
        "kind": "block", "style": "qwen3", "num_layers": 2, "draft_vocab_size": 64, "block_size": 4, "mask_token_id": 63
    }  # fmt: skip
    return eagle_config(**{**block, **changes})


def random_tensors(config: HeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Matrices large enough that a swapped one shows, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1 if "norm" in name else 0)
        for name, shape in head_shapes(config).items()
    }


def random_ids(config: HeadConfig, seed: int = 0) -> Tensor | None:
    """draft_ids of a config: neither the first D ids nor evenly spread; None where it drafts all."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values


def write_form(folder: Path, form: str, config: HeadConfig, tensors: dict[str, Tensor], ids: Tensor | None) -> Path:
    """A folder in one of the forms, without any check of ours on what it then is."""
    folder.mkdir(parents=True)
    if form == "speculators":
        write_head(folder, config, tensors, ids, "some/target")
        return folder
    data = sglang_config(config, torch.float32, IDS) if form == "sglang" else dflash_config(config, torch.float32, 6)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(stored_tensors(form, config, tensors, ids), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_head(folder: Path, form: str = "speculators", config: HeadConfig | None = None) -> Path:
    """A folder with random tensors of a config (by default an EAGLE-3 head with a pruned vocabulary)."""
    config = config or eagle_config()
    return write_form(folder, form, config, random_tensors(config), random_ids(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "config.json").read_text())
    edit(data)
    (folder / "config.json").write_text(json.dumps(data))
