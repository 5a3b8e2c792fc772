"""Signals to one process: from the first line of `main` on, in a forked child, in the middle of a wait in C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from exittrain.errors import Interrupted
from exittrain.runtime import signals
from exittrain.runtime.signals import SIGNALS, StopFlag, Stopped

EARLY = (
    "import os, signal, sys, time; from exittrain.cli import main as cli\n"
    "def app(**_):\n"
    "    os.kill(os.getpid(), getattr(signal, sys.argv[1])); time.sleep(30)\n"
    "cli.app = app; cli.main(['run'])"
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they were, afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._current = None


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_the_loop_answers(number: signal.Signals) -> None:
    stop = StopFlag().install()
    stop.raise_if_set()
    os.kill(os.getpid(), number)
    time.sleep(0.01)
    with pytest.raises(Interrupted, match=number.name):
        stop.raise_if_set()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_before_anything_has_begun_a_signal_ends_the_command(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", EARLY, name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and done.stdout == ""
    assert done.stderr == f"exittrain: stopped by {name}: nothing is half done, run the same command again\n"


def test_until_somebody_looks_at_it_a_signal_raises_once() -> None:
    left: list[str] = []
    stop = StopFlag().install(leave=left.append)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # while what the first one ended is tidied up
    assert stop.is_set and not left


def test_once_somebody_looks_a_signal_only_sets_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "STUCK_SECONDS", 0.05)
    left: list[str] = []
    stop = StopFlag().install(leave=left.append).heed()
    signal.raise_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert stop.name == "SIGTERM" and not left


def test_a_process_has_one_flag() -> None:
    stop = StopFlag().install()
    assert signals.current() is stop
    signal.raise_signal(signal.SIGUSR1)
    assert stop.is_set
    plain = StopFlag()
    assert not plain.is_set
    plain.set("a test")
    assert plain.name == "a test" and stop.name == "SIGUSR1"


def test_a_second_interrupt_kills() -> None:
    code = (
        "import os, signal, time; from exittrain.runtime.signals import StopFlag; StopFlag().install()\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.05); print('still here', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stdout == "still here\n"


def _sleep(ready: Event) -> None:
    ready.set()
    time.sleep(30)


def test_a_signal_to_a_forked_child_is_the_childs() -> None:
    """Pools of workers are ended that way."""
    stop = StopFlag().install()
    context = multiprocessing.get_context("fork")
    ready = context.Event()  # a signal in the middle of the fork itself is lost, by Python's own doing
    child = context.Process(target=_sleep, args=(ready,))
    child.start()
    assert ready.wait(30)
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    time.sleep(0.1)
    assert not stop.is_set


def test_one_interrupt_after_another_signal_does_not_kill() -> None:
    """Ctrl-C beside the cluster's own warning: only a second Ctrl-C is a demand."""
    stop = StopFlag().install()
    for number in (signal.SIGUSR1, signal.SIGINT):
        os.kill(os.getpid(), number)
    time.sleep(0.3)
    assert stop.name == "SIGUSR1"
