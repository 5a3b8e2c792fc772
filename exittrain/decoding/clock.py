"""Stage seconds by laps: every moment of a round belongs to exactly one stage."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from exittrain.build.base import DraftSession
from exittrain.decoding.result import STAGES


class Clock:
    """Wall clock split over stages. On CUDA a lap waits for the device only if `synchronize`: otherwise work that is
    still running is charged to the stage that first needs its result."""

    def __init__(self, device: torch.device, synchronize: bool) -> None:
        self.waits = synchronize and device.type == "cuda"
        self.device = device
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._since = self._now()

    def lap(self, stage: str) -> None:
        """Charge the time since the last lap to `stage`."""
        now = self._now()
        self.seconds[stage] += now - self._since
        self._since = now

    def skip(self) -> None:
        """Charge the time since the last lap to nothing: it is measurement, not decoding."""
        self._since = self._now()

    def _now(self) -> float:
        if self.waits:
            torch.cuda.synchronize(self.device)
        return perf_counter()


class TimedSession:
    """A draft session whose model runs are charged to `draft`, and what its builder does between them to `build`."""

    def __init__(self, session: DraftSession, clock: Clock) -> None:
        self._session, self._clock = session, clock
        self.root_tokens = session.root_tokens

    def root(self) -> Tensor:
        self._clock.lap("build")
        logprobs = self._session.root()
        self._clock.lap("draft")
        return logprobs

    def expand(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        self._clock.lap("build")
        logprobs = self._session.expand(parent_slots, token_ids, valid)
        self._clock.lap("draft")
        return logprobs
