"""The jobs that do parts of one stage at the same time: who is at work on what, and what one at a time must do."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from exittrain.errors import InputError
from exittrain.runtime.lock import (
    LOCK,
    PART_ENDING,
    PARTS,
    PATIENCE_SECONDS,
    POLL_SECONDS,
    open_lock,
    read_content,
    take,
    write_content,
)
from exittrain.runtime.parts import Part


class Crew:
    """One job's place among those that share a stage. A run folder with a crew has no owner, and the other way round.

    with Crew(...) as crew:            on a job's main rank; the locks go when it is left, or with the process
        with crew.joining(key): ...    one job at a time
        ...                            all at once
        with crew.leaving(): ...       one job at a time
    """

    def __init__(self, folder: Path, stage: str, part: Part, wait: Callable[[], None]) -> None:
        """folder: the run's. wait: called between looks while it is another's turn; it may raise to give up."""
        self._folder, self._stage, self._part, self._wait = folder, stage, part, wait
        self._held: list[int] = []
        self._members: int | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()

    @contextmanager
    def joining(self, key: str) -> Iterator[bool]:
        """Become one of the crew; inside it is this job's turn. Gives True where no other is at work.

        key: of the stage under this job's recipe; it and the number of parts must be those of the others.

        Raises:
            InputError: the run folder has an owner, another job does this part, or the others' parts or recipe differ.
        """
        self._take_shared()
        with self._turn():
            self._take_part()
            yield self._agree(key)

    @contextmanager
    def leaving(self) -> Iterator[bool]:
        """Be one of the crew no more afterwards; inside it is this job's turn. Gives True where no other is at work."""
        assert self._members is not None  # who leaves has joined
        with self._turn():
            yield take(self._members, fcntl.LOCK_EX)
            self._release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        descriptor = self._open(f"{self._stage}.turn")
        try:
            while not take(descriptor, fcntl.LOCK_EX):
                self._wait()
                time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _take_shared(self) -> None:
        descriptor = open_lock(self._folder / LOCK)
        self._held.append(descriptor)
        if not take(descriptor, fcntl.LOCK_SH, PATIENCE_SECONDS):
            owner = read_content(descriptor) or "unknown"
            raise InputError(f"{self._folder} is in use by process {owner}: wait, or set another run_dir")

    def _take_part(self) -> None:
        name = f"{self._stage} {self._part.index}/{self._part.count}"
        descriptor = self._open(f"{self._stage}-{self._part.index}-of-{self._part.count}{PART_ENDING}")
        self._held.append(descriptor)
        if not take(descriptor, fcntl.LOCK_EX, PATIENCE_SECONDS):
            other = read_content(descriptor)
            raise InputError(f"{self._folder} is in use by {other}: each part is for one job, wait or give another")
        write_content(descriptor, f"{name} (process {os.getpid()} on {socket.gethostname()})\n")

    def _agree(self, key: str) -> bool:
        """Whether this job is the only one. The first writes down what it does, the others compare."""
        self._members = self._open(f"{self._stage}.members")
        self._held.append(self._members)
        ours = f"{self._part.count} {key}"
        alone = take(self._members, fcntl.LOCK_EX)
        if alone:
            write_content(self._members, ours)
        if not take(self._members, fcntl.LOCK_SH):
            raise InputError(f"{self._folder}: the file system does not share locks: run {self._stage} as one job")
        theirs = read_content(self._members)
        if theirs != ours:
            count = theirs.partition(" ")[0]
            what = f"in parts of {count}" if count != str(self._part.count) else "under another recipe"
            raise InputError(f"{self._folder}: other jobs do {self._stage} {what}: do as they do, or wait for them")
        return alone

    def _open(self, name: str) -> int:
        return open_lock(self._folder / PARTS / name)

    def _release(self) -> None:
        self._members = None
        while self._held:
            os.close(self._held.pop())
