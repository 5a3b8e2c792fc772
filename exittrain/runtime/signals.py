"""A signal asks; the loops answer at their next safe point by saving and raising `Interrupted` (exit code 75)."""

from __future__ import annotations

import os
import signal
from types import FrameType

from exittrain.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1 once `install()`ed; a second SIGINT kills at once.

    `is_set` is this rank's own view. Ranks that must agree use `ranks.any_rank(stop.is_set)` at a step both reach.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    @property
    def is_set(self) -> bool:
        return self.name is not None

    def set(self, name: str = "stop") -> None:
        self.name = name

    def install(self) -> StopFlag:
        """Catch the signals in this (main) thread from now on."""
        for number in SIGNALS:
            signal.signal(number, self._caught)
        return self

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.is_set:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.name = signal.Signals(number).name

    def raise_if_set(self) -> None:
        """Raises:
        Interrupted: a signal has come; the caller has saved what it wants kept.
        """
        if self.is_set:
            raise Interrupted(f"stopped by {self.name}: run the same command again to go on")
