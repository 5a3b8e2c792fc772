"""Small runs of several ranks, each through the real `main()`: what the tests of the watch start and disturb."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from exittrain.cli import main as cli
from exittrain.errors import InputError, Interrupted
from exittrain.runtime import ranks, signals, watch
from exittrain.runtime.signals import StopFlag, current

LIMIT = 4.0  # seconds of silence after which a rank is missed in these runs
MEETING = 3.0  # in which a rank with a signal waits for the others
GRACE = 4.0  # seconds in which the others may end by themselves
os.environ.setdefault(*cli.QUIET)  # as `main` does, before the server below loads torch
SERVER = multiprocessing.get_context("forkserver")  # one process imports torch, all ranks are its forks
SERVER.set_forkserver_preload(["torch.distributed", "exittrain.cli.main", "exittrain.runtime.ranks"])


class Run:
    """`world` ranks at work on a function of this file, named `work`; what they print is in files of `folder`."""

    def __init__(self, folder: Path, work: str, world: int = 2, absent: int = 0, **environment: str) -> None:
        """absent: so many of the first ranks are never started."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "EXITTRAIN_WATCHDOG_SECONDS": str(LIMIT), **environment,
        }  # fmt: skip
        self.folder, self.processes = folder, list[BaseProcess]()
        for rank in range(absent, world):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = SERVER.Process(target=one_rank, args=(work, own, folder))
            process.start()
            self.processes.append(process)

    def ready(self) -> Run:
        """All are in the middle of their work."""
        deadline = time.monotonic() + 60
        while not all((self.folder / f"at-work-{rank}").exists() for rank in range(len(self.processes))):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        time.sleep(1.5)  # some signs of life have come, with the names of the hosts
        return self

    def send(self, rank: int, number: int) -> None:
        """rank: among those that were started."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def codes(self, seconds: float) -> list[int | None]:
        """How all ended, None for who has not within `seconds`; nobody is left behind."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        found = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return found

    def said(self) -> list[str]:
        """What each has printed, standard output and errors."""
        return [file.read_text() for file in sorted(self.folder.glob("rank*.log"))]


def one_rank(work: str, environment: dict[str, str], folder: Path) -> None:
    for end in (1, 2):
        os.dup2(os.open(folder / f"rank{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), end)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    torch.set_num_threads(1)
    watch.GRACE_SECONDS, signals.MEET_SECONDS = GRACE, MEETING
    cli.app = lambda **_: start(globals()[work], folder)  # type: ignore[assignment]
    cli.main([])


def start(work: Callable[[StopFlag], None], folder: Path) -> None:
    stop = current()
    if work is late_rank_1_was_stopped_early and ranks.rank() == 1:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.0)
    ranks.setup(torch.device("cpu"), folder, stop)
    (folder / f"at-work-{ranks.rank()}").touch()
    work(stop)


def busy(stop: StopFlag, seconds: float = 60.0) -> None:
    """A loop of short steps that looks at the flag, as all of ours do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stop.raise_if_set()
        time.sleep(0.01)


def main_waits(stop: StopFlag) -> None:
    """Rank 0 is in a collective while the others work."""
    ranks.on_all(lambda: None if ranks.is_main() else busy(stop))


def others_wait(stop: StopFlag) -> None:
    ranks.on_all(lambda: busy(stop) if ranks.is_main() else None)


def all_work(stop: StopFlag) -> None:
    ranks.on_all(lambda: busy(stop))


def all_wait_but_the_last(stop: StopFlag) -> None:
    if ranks.rank() == ranks.world_size() - 1:
        time.sleep(60)
    ranks.barrier()


def nobody_talks(stop: StopFlag) -> None:
    """A long loop that meets no other rank."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        sum(range(1000))


def last_fails_alone(stop: StopFlag) -> None:
    """Outside of `on_all`: the others wait for it."""
    if ranks.rank() == ranks.world_size() - 1:
        raise InputError("shard 3 cannot be read")
    ranks.barrier()


def last_fails_beside_loops(stop: StopFlag) -> None:
    if ranks.rank() == ranks.world_size() - 1:
        raise InputError("shard 3 cannot be read")
    nobody_talks(stop)


def last_has_a_bug(stop: StopFlag) -> None:
    ranks.on_all(lambda: {}["bug"] if ranks.rank() == ranks.world_size() - 1 else None)


def one_fails_one_is_interrupted(stop: StopFlag) -> None:
    failures = [Interrupted("stopped by SIGTERM"), InputError("shard 3 cannot be read"), None]

    def act() -> None:
        failure = failures[ranks.rank()]
        if failure is not None:
            raise failure

    ranks.on_all(act)


def all_fail_in_their_own_time(stop: StopFlag) -> None:
    time.sleep(ranks.rank())
    raise InputError(f"no corpus here, says {ranks.rank()}")


def all_know_and_end_slowly(stop: StopFlag) -> None:
    """What closes a tracker may take longer than the others are given when one fails without a word to them."""
    try:
        ranks.on_all(lambda: busy(stop, 0.1) if ranks.is_main() else 1 / 0)
    finally:
        time.sleep(GRACE + 2.0 if ranks.is_main() else 0.0)


def main_raises_what_cannot_travel(stop: StopFlag) -> None:
    class Local(Exception):
        pass

    def fail() -> None:
        raise Local("of this process only")

    ranks.from_main(fail)


def alone_for_long(stop: StopFlag) -> None:
    """Longer than the limit; then one rank has more to do at its end than the others."""

    def act() -> None:
        with ranks.alone():
            busy(stop, 2 * LIMIT)

    ranks.from_main(act)
    assert [ranks.on_all(ranks.rank), ranks.any_rank(ranks.rank() == 1)] == [ranks.rank(), True]
    if ranks.rank() == 1:
        time.sleep(2.0)


def answers(stop: StopFlag) -> None:
    """The exchanges themselves."""
    number, world = ranks.rank(), ranks.world_size()
    assert ranks.all_reduce_sums({"a": number + 1.0, "b": 1.0}) == {"a": world * (world + 1) / 2, "b": world}
    assert ranks.any_rank(number == 1) and not ranks.any_rank(False)
    ranks.check_alike({"name": "tiny", "train.steps": 4})
    assert ranks.from_main(lambda: number) == 0 and ranks.on_all(lambda: number) == number
    try:
        ranks.all_reduce_sums({"a": 1.0} if number else {"b": 1.0})
    except ValueError:
        return
    raise AssertionError("different entries were added")


def last_was_given_another_step_count(stop: StopFlag) -> None:
    ranks.check_alike({"name": "tiny", "train.steps": 4 + ranks.rank() // (ranks.world_size() - 1)})


def last_was_given_one_arm_more(stop: StopFlag) -> None:
    ranks.check_alike({"name": "tiny", **({"train.arms.exit.steps": 2} if ranks.rank() else {})})


def late_rank_1_was_stopped_early(stop: StopFlag) -> None:
    """All stages begin so."""
    ranks.raise_if_stopped(stop)
    raise AssertionError("the signal was lost")


def stuck_in_c(stop: StopFlag) -> None:
    """No handler of Python's runs in here."""
    torch.distributed.HashStore().wait(["what nobody writes"], timedelta(seconds=60))  # type: ignore[attr-defined]
