"""Tiny heads: a target to read features from, EAGLE heads and block drafters of a pruned or a full vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from exittrain.drafters.base import Dials, Drafter
from exittrain.drafters.block.fresh import make_block
from exittrain.drafters.eagle.fresh import make_eagle
from exittrain.drafters.head_config import config_like
from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel

VOCAB = 40
DRAFTED = torch.tensor([0, 1, 3, 4, 5, 8, 9, 11, 12, 15, 17, 18, 20, 21, 25, 26, 27, 30, 31, 33, 36, 37, 38, 39])


def make_target() -> TargetModel:
    made = make_causal_lm(VOCAB, 16, 4, 2, 32, tie_embeddings=False, max_positions=64, seed=1)
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return TargetModel(made.module.requires_grad_(False), name="target", verify=False)


def make_head(kind: str, target: TargetModel, ids: Tensor | None = DRAFTED) -> Drafter:
    size = VOCAB if ids is None else len(ids)
    changes = {"block_size": 4, "mask_token_id": 2, "style": "qwen3"} if kind == "block" else {}
    config = config_like(target.config, kind, (1, 2, 3), size, **changes)
    drafter = (make_block if kind == "block" else make_eagle)(target, config, ids, 3)
    drafter.dials = Dials(unroll_steps=3, unroll_decay=0.7, block_anchors=3, block_decay=2.0)
    with torch.no_grad():  # laws that differ from row to row
        drafter.module.norm.weight.mul_(8)
    return drafter
