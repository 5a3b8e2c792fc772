"""A six-layer target on disk and heads made for it, shared by the tests of exported heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from head_folders import block_config, eagle_config, make_head
from tiny_target import make_target
from transformers import AutoConfig, AutoModelForCausalLM

from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.load import load_drafter
from exittrain.models.loading import quiet_transformers
from exittrain.models.sums import FILES
from exittrain.models.target import TargetModel
from exittrain.stages.export.source import ExportSource, of_folder

VOCAB = 257


def deep_target(folder: Path) -> Path:
    """tests/tiny_target.py with six layers of sharp random weights, so that features and laws differ."""
    make_target(folder)
    config = AutoConfig.from_pretrained(folder)
    config.update({"num_hidden_layers": 6})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder


def eagle(**changes: Any) -> HeadConfig:
    return eagle_config(**{"vocab_size": VOCAB, "draft_vocab_size": 100, "max_positions": 512, **changes})


def block(**changes: Any) -> HeadConfig:
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "max_positions": 512, "mask_token_id": 255}
    return block_config(**{**sizes, **changes})


def saved_head(folder: Path, config: HeadConfig, target: Path) -> ExportSource:
    """The source of a head that `Drafter.save` has written into `folder`; a little of the text is enough."""
    made = make_head(folder.parent / f"{folder.name}-made", config=config)
    load_drafter(made, TargetModel.from_pretrained(target)).save(folder)
    (folder / FILES).unlink()  # tests change it: as from elsewhere, where nobody knows its sums
    source = of_folder(folder, str(target))
    return replace(source, token_ids=source.token_ids[:120])
