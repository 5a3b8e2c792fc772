"""A signal asks; the loops answer at their next safe point by saving and raising `Interrupted` (exit code 75).

Python runs a signal's handler between two steps of its main thread: not while that thread waits in C for other ranks, a
device or a slow disk. So the number of each signal also goes down a pipe, from which a thread reads it at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from exittrain.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STUCK_SECONDS = 2.0  # a main thread that has not run its handler by then is in C, for who knows how long
MEET_SECONDS = 30.0  # after which a rank with a signal no longer waits for the others to tell them
KILL_SECONDS = 0.5


class Stopped(BaseException):
    """A signal came while nothing could be lost by leaving. No `Exception`: what is imported must not swallow it."""


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1 once `install()`ed; a second SIGINT kills at once.

    With several ranks a signal to one sets the flag of all within seconds (runtime/watch.py). `is_set` is this rank's
    own view all the same: ranks that must agree use `ranks.raise_if_stopped` at a step that all reach.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._leave: Callable[[str], object] | None = None
        self._at_once = True
        self._handled: list[int] = []  # signals that the main thread's handler has seen
        self._heard: list[int] = []  # and the thread

    @property
    def is_set(self) -> bool:
        return self.name is not None

    def set(self, name: str = "stop") -> None:
        self.name = name

    def install(self, leave: Callable[[str], object] | None = None, at_once: bool = True) -> StopFlag:
        """Catch the signals in this (main) thread from now on, as the process's one flag.

        leave: given a line, ends the process. With it, until `heed`, a signal is not kept for a loop that looks: it
        raises `Stopped` in the main thread or, where that is stuck in C, calls `leave` from another one.
        at_once: False for a rank of several: it goes on to where all meet, MEET_SECONDS at most, so that all stop.
        """
        global _current
        self._leave, self._at_once = leave, at_once
        _current = self
        _listen()
        for number in SIGNALS:
            signal.signal(number, self._caught)
        return self

    def heed(self) -> StopFlag:
        """From now on somebody looks at the flag: a signal sets it and does nothing else."""
        self._leave = None
        return self

    def _caught(self, number: int, frame: FrameType | None) -> None:
        before, self._handled = self._handled, [*self._handled, number]
        if number == signal.SIGINT and number in before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.name = self.name or signal.Signals(number).name
        if self._leave is not None and self._at_once and not before:
            raise Stopped(_line(self.name))

    def _hear(self, number: int) -> None:
        """In the thread: the same, for a main thread that is in C."""
        before, self._heard = self._heard, [*self._heard, number]
        self.name = self.name or signal.Signals(number).name
        if number == signal.SIGINT and number in before:
            _later(KILL_SECONDS, os._exit, 128 + number)
        elif self._leave is not None and not before:
            _later(STUCK_SECONDS if self._at_once else MEET_SECONDS, self._leave_if_stuck)

    def _leave_if_stuck(self) -> None:
        if self._leave is not None and not (self._handled and self._at_once):
            self._leave(_line(self.name))

    def raise_if_set(self) -> None:
        """Raises:
        Interrupted: a signal has come; the caller has saved what it wants kept.
        """
        if self.is_set:
            raise Interrupted(f"stopped by {self.name}: run the same command again to go on")


_current: StopFlag | None = None
_pipe: tuple[int, int] | None = None


def current() -> StopFlag:
    """The process's flag, the one that was installed last; installed now where none is."""
    return _current or StopFlag().install()


def _line(name: str | None) -> str:
    return f"stopped by {name}: nothing is half done, run the same command again"


def _later(seconds: float, action: Callable[..., object], *arguments: Any) -> None:
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
    timer.start()


def _listen() -> None:
    """Start the thread, once a process."""
    global _pipe
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=_read, args=(_pipe[0],), name="signals", daemon=True).start()
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


def _read(end: int) -> None:
    while True:
        for number in os.read(end, 64):
            if number in SIGNALS and _current is not None:
                _current._hear(number)


def _forget() -> None:
    """A forked child (of a worker pool) shares the pipe: a signal to it is not one to us, and it ends by it."""
    global _current, _pipe
    _current = _pipe = None
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
