"""Tiny drafters and rows to train on."""

from __future__ import annotations

import torch

from exittrain.build.base import TreeShape
from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.scratch import make_causal_lm

VOCAB = 50
SHAPE = TreeShape(budget=6, depth=3, width=3)


def make_drafter(seed: int = 2) -> Drafter:
    return CausalDrafter(make_causal_lm(VOCAB, 16, 1, 2, 32, seed=seed))


def make_rows(count: int = 10, prompt: int = 3, vocab: int = VOCAB) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [8 + 3 * (i % 5) for i in range(count)]
    return [
        {
            "sequence_id": f"s{i}",
            "token_ids": torch.randint(vocab, (length,), generator=generator).tolist(),
            "loss_mask": [0] * prompt + [1] * (length - prompt),
        }
        for i, length in enumerate(lengths)
    ]
