"""One prompt on its way through the loop: its tokens so far, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from exittrain.decoding.result import Decoded, Round
from exittrain.decoding.stopping import StopStrings


@dataclass(eq=False)
class Row:
    """A prompt and its continuation; `max_new` already respects the position limit."""

    prompt: list[int]
    generator: torch.Generator
    max_new: int
    eos_token_ids: frozenset[int]
    stop: StopStrings | None
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_seconds: float = 0.0

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    def take(self, block: Sequence[int]) -> int:
        """Append a block's tokens up to where the row ends; returns how many were used."""
        for count, token in enumerate(block, start=1):
            self.token_ids.append(token)
            if token in self.eos_token_ids:
                self.finish_reason = "eos"
            elif self.stop is not None and self.stop.completed_by(self.token_ids):
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.max_new:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(block)

    def result(self) -> Decoded:
        in_rounds = sum(sum(one.seconds.values()) for one in self.rounds)
        return Decoded(
            token_ids=self.token_ids,
            rounds=self.rounds,
            finish_reason=self.finish_reason or "length",
            num_prompt_tokens=len(self.prompt),
            text=None if self.stop is None else self.stop.cut(self.token_ids),
            prefill_seconds=self.prefill_seconds,
            total_seconds=self.prefill_seconds + in_rounds,
        )
