"""No rank waits for one that will not come. Every rank gives signs of life; a signal to one sets the flag of all.

A rank that ends with anything but 0 says so on its way out (`leave`), and one that ends without a word is missed after
EXITTRAIN_WATCHDOG_SECONDS (60; 0: never). The others then have some seconds to end by themselves, since most failures
meet all ranks alike; whoever is still there, perhaps in a collective that nobody will complete, is ended with one line
that names the rank, and with its exit code.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from exittrain.errors import InputError, Interrupted, first_line
from exittrain.runtime.bulletin import Bulletin, Entry
from exittrain.runtime.signals import StopFlag
from exittrain.runtime.silence import STORE, Silence

VARIABLE = "EXITTRAIN_WATCHDOG_SECONDS"
LIMIT_SECONDS = 60.0
LEAST_SECONDS = 2.0  # signs of life come every half second
LOOK_SECONDS = 0.2
GRACE_SECONDS = 10.0  # for the others when a rank has failed: each may be about to say the same
SAVING_SECONDS = 30.0  # when it was interrupted, or when all ranks know that they end: they may be saving
MISSED_GRACE_SECONDS = 1.0  # when it is missed: nobody else will say anything
MISSED_SECONDS = 4.0  # a rank is taken for dead after this once a connection to it has broken
GOODBYE_SECONDS = 30.0  # rank 0 stays so long for others that are not done
DELIVERY_SECONDS = 3.0
BROKEN = ("DistNetworkError", "DistBackendError", "DistStoreError")  # torch's, of the store and of NCCL
AGAIN = "run the same command again to go on"


@dataclass(frozen=True)
class Ending:
    """Why this process ends: its exit code and one line. rank: whose end it is; missed: it said nothing itself."""

    rank: int
    code: int
    line: str
    missed: bool = False


class Watch:
    """This rank's. Use `start`, `leave` and the other functions of this module: a process has one."""

    def __init__(self, bulletin: Bulletin, rank: int, world_size: int, limit: float, stop: StopFlag) -> None:
        """limit: seconds of silence, 0 for any. stop: set when a signal has come to another rank."""
        self._bulletin, self._rank, self._world_size, self._stop = bulletin, rank, world_size, stop
        self._limit = limit
        self._others = [other for other in range(world_size) if other != rank]
        self._ending = threading.Lock()  # taken once, by whoever ends this process
        self._departed = False
        self._all_end = False
        self._signal_told = False
        self._found: Ending | None = None

    def look(self) -> None:
        """The thread: until this process ends, pass on signals and end it where another rank's end demands it."""
        watched = self._others if self._rank == 0 else [0]
        silence = Silence(self._bulletin, watched, self._limit) if self._limit else None
        grace, last = 0.0, time.monotonic()
        while not self._ending.locked():
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            passed, last = min(now - last, GRACE_SECONDS / 4), now
            self._pass_signals()
            ending = self.cause()
            if ending is not None:
                grace += passed
                if grace >= self._patience(ending):
                    self._end(ending)
            elif silence is not None:
                self.accuse(silence.observe(passed, self._left()), f"has given no sign of life for {self._limit:g} s")

    def cause(self) -> Ending | None:
        """What is known of a rank whose end is the end of all."""
        if self._found is not None:
            return self._found
        for entry in list(self._bulletin.entries):
            if entry["kind"] == "ended" and not entry["rank"] == entry["by"] == self._rank:
                mine = entry["rank"] == self._rank
                line = f"rank {self._rank}, this one, was missed and the others have stopped" if mine else entry["line"]
                return Ending(entry["rank"], entry["code"], line, entry["rank"] != entry["by"])
        return None

    def _patience(self, ending: Ending) -> float:
        if ending.missed:
            return MISSED_GRACE_SECONDS
        return SAVING_SECONDS if self._all_end or ending.code == Interrupted.exit_code else GRACE_SECONDS

    def accuse(self, rank: int | None, what: str) -> None:
        """Everybody ends because `rank` (None: nobody) is missed."""
        if rank is None or self._found is not None or (rank == STORE and 0 in self._left()):
            return
        if rank == STORE and self._bulletin.answers == 0:
            return  # never met: a network in which only the collectives find their way
        rank = 0 if rank == STORE else rank  # it is rank 0's, or that of the launcher beside it
        self._found = Ending(rank, 1, f"{self._name(rank)} {what}: stopping; {AGAIN}", missed=True)
        self._bulletin.post(self._ended(self._found))

    def explain(self, broken: str) -> Ending | None:
        """Whose end has broken a connection of this rank's; None when all are alive."""
        self._bulletin.everyone = True
        silence = Silence(self._bulletin, self._others, MISSED_SECONDS)
        last, until = time.monotonic(), time.monotonic() + 2 * MISSED_SECONDS + 1.0
        while self.cause() is None and last < until:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            self.accuse(silence.observe(now - last, self._left()), f"has gone ({broken})")
            last = now
        return self.cause()

    def depart(self) -> None:
        """This process ends by itself now; where another thread is about to end it, that is waited for."""
        if not self._departed:
            self._ending.acquire()
            self._departed = True

    def leave(self, code: int, told: str) -> bool:
        """After `depart`: tell the others. told: why, for them. True when the interpreter must not be torn down."""
        bulletin = self._bulletin
        if code and self.cause() is None:
            verb = {InputError.exit_code: "could not go on", Interrupted.exit_code: "has ended"}.get(code, "has failed")
            line = f"{self._name(self._rank)} {verb}: {told or f'exit code {code}'}"
            bulletin.post(self._ended(Ending(self._rank, code, line)))
        if self._rank == 0 and not code:  # the store is mostly ours and goes with us
            bulletin.wait(self._all_left, GOODBYE_SECONDS)
        bulletin.post({"kind": "left", "rank": self._rank})
        bulletin.wait(bulletin.delivered, DELIVERY_SECONDS)
        if self._rank == 0:
            bulletin.wait(self._all_know, DELIVERY_SECONDS)
        return not bulletin.close() or code != 0

    def _end(self, ending: Ending) -> None:
        if not self._ending.acquire(blocking=False):
            return
        os.write(2, f"exittrain: {ending.line}\n".encode())
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        self.leave(ending.code, "")
        flushing.join(1.0)  # the reader of our output may be the one that hangs
        os._exit(ending.code)

    def all_end(self) -> None:
        self._all_end = True

    def _pass_signals(self) -> None:
        told = [entry for entry in list(self._bulletin.entries) if entry["kind"] == "signal"]
        if not self._stop.is_set and told:
            self._stop.set(f"{told[0]['name']} on rank {told[0]['rank']}")
        elif self._stop.is_set and not told and not self._signal_told:
            self._signal_told = True
            self._bulletin.post({"kind": "signal", "rank": self._rank, "name": self._stop.name})

    def _ended(self, ending: Ending) -> Entry:
        return {"kind": "ended", "rank": ending.rank, "code": ending.code, "line": ending.line, "by": self._rank}

    def _name(self, rank: int) -> str:
        if rank == self._rank:
            return f"rank {rank} on {socket.gethostname()}"
        beat = self._bulletin.beats.get(rank)
        return f"rank {rank}" if beat is None else f"rank {rank} on {beat.host}"

    def _left(self) -> set[int]:
        return {entry["rank"] for entry in list(self._bulletin.entries) if entry["kind"] == "left"}

    def _all_left(self) -> bool:
        return self._left().issuperset(self._others) or self.cause() is not None

    def _all_know(self) -> bool:
        beats, known, gone = self._bulletin.beats, len(self._bulletin.entries), self._left()
        cause = self.cause()
        if cause is not None:
            gone.add(cause.rank)
        return all(rank in gone or (rank in beats and beats[rank].read >= known) for rank in self._others)


_watch: Watch | None = None


def limit_seconds() -> float:
    """Raises:
    InputError: EXITTRAIN_WATCHDOG_SECONDS is no number of seconds, or too small a one.
    """
    given = os.environ.get(VARIABLE) or str(LIMIT_SECONDS)
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if limit != 0 and not LEAST_SECONDS <= limit < float("inf"):
        raise InputError(f"{VARIABLE}={given}: give seconds, {LEAST_SECONDS:g} or more, or 0 for no watchdog")
    return limit


def start(host: str, port: int, rank: int, world_size: int, stop: StopFlag) -> None:
    """Watch over the ranks that have met in the store at host:port. Once a process.

    Raises:
        InputError: EXITTRAIN_WATCHDOG_SECONDS is no number of seconds.
    """
    global _watch
    bulletin = Bulletin(host, port, rank, world_size)
    _watch = Watch(bulletin, rank, world_size, limit_seconds(), stop)
    bulletin.start()
    threading.Thread(target=_watch.look, name="watch", daemon=True).start()
    atexit.register(_leave_at_exit, os.getpid())


def is_on() -> bool:
    return _watch is not None


def explain(error: BaseException) -> Ending | None:
    """Why a collective failed, when it failed because another rank has ended; takes some seconds to find out."""
    broken = broken_connection(error)
    return None if _watch is None or broken is None else _watch.explain(broken)


def all_end() -> None:
    """All ranks know by an exchange that they end, each with its own line: they need no hurry."""
    if _watch is not None:
        _watch.all_end()


def depart() -> None:
    """This process is about to say why it ends: nobody else may end it from here on."""
    if _watch is not None:
        _watch.depart()


def leave(code: int, told: str = "") -> None:
    """Tell the other ranks that this one ends with `code`. told: why.

    Returns when the interpreter may end in its own way: alone, or with 0. Otherwise this is the end, since what is torn
    down with it (a communicator with work that nobody will complete) might not come to an end.
    """
    global _watch
    depart()
    watch, _watch = _watch, None
    if watch is not None and watch.leave(code, told):
        _exit(code)


def _exit(code: int) -> NoReturn:
    """As the interpreter does it, up to where other threads and devices come in; the rest must not take for ever."""
    timer = threading.Timer(GRACE_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _leave_at_exit(process: int) -> None:
    """For programs that use the stages as a library; the command line has left before."""
    if _watch is not None and os.getpid() == process:
        error = getattr(sys, "last_value", None)
        leave(0 if error is None else 1, "" if error is None else first_line(error))


def broken_connection(error: BaseException | None) -> str | None:
    """What the error, or one that it came from, says of a connection to another rank; None where it says nothing."""
    while error is not None:
        if "gloo/transport" in str(error) or type(error).__name__ in BROKEN:
            sentence = str(error).strip().partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
            return sentence or type(error).__name__
        error = error.__cause__ or error.__context__
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or nobody reads it any more
