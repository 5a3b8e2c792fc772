"""The dial of one training run, and what is computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LoopSettings:
    """steps: optimiser steps; batch_size: sequences a step, over all ranks and micro-batches; micro_batch_size:
    sequences a forward (None: batch_size / ranks); eval_every 0: never."""

    steps: int
    batch_size: int
    micro_batch_size: int | None = None
    lr: float = 1e-4
    schedule: str = "cosine"
    warmup_ratio: float = 0.05
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    log_every: int = 10
    save_every: int = 100
    eval_every: int = 0

    @classmethod
    def from_section(cls, section: Mapping[str, Any], **changes: Any) -> LoopSettings:
        """From a recipe's section (as a dict): the fields that have the same name, then `changes`."""
        names = {field.name for field in fields(cls)}
        return cls(**{**{key: value for key, value in section.items() if key in names}, **changes})

    def lr_at(self, step: int) -> float:
        """Learning rate of optimiser step `step` (0-based): linear warm-up, then cosine to min_lr_ratio or constant.

        A function of the step alone, so that a resumed run has no scheduler to restore.
        """
        rising = self.warmup_ratio * self.steps
        if step + 1 < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        done = max(step + 1 - rising, 0) / max(self.steps + 1 - rising, 1)
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))

    def num_micro_batches(self, world_size: int) -> int:
        """Forwards a rank makes in one step: the same on every rank, whatever share of the batch it got."""
        share = math.ceil(self.batch_size / world_size)
        return math.ceil(share / (self.micro_batch_size or share))
