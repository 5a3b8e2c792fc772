"""Who works in a folder: one process (`hold`), or jobs that do parts of a stage together (runtime/crew.py).

The locks are the kernel's: they go with the process, however that ends, so none is ever stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exittrain.errors import InputError

LOCK = ".lock"
PARTS = ".locks"  # files of the jobs that share the folder; whoever owns it alone may remove them
PART_ENDING = ".part"
PATIENCE_SECONDS = 0.5  # who only looks whether a lock is held has it for a moment
POLL_SECONDS = 0.05
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Own `folder` while inside.

    Raises:
        InputError: another process owns it, or jobs share it (both are named), or nothing can be written there.
    """
    folder = Path(folder)
    descriptor = open_lock(folder / LOCK)
    try:
        if not take(descriptor, fcntl.LOCK_EX, PATIENCE_SECONDS):
            raise InputError(f"{folder} is in use by {_user(folder, descriptor)}: wait, or set another run_dir")
        write_content(descriptor, f"{os.getpid()}\n")
        yield
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """A descriptor to lock; folder and file are made.

    Raises:
        InputError: nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"cannot write in {path.parent} ({error.strerror}): set another run_dir") from None


def take(descriptor: int, kind: int, seconds: float = 0.0) -> bool:
    """Lock it (fcntl.LOCK_EX or LOCK_SH) within about `seconds`; False where others do not let go.

    Raises:
        InputError: the file system has no locks.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise InputError(
                f"the file system of the run folder has no file locks ({error.strerror}): mount it with them "
                "(Lustre: -o flock), or set run_dir to another disk"
            ) from None
        else:
            return True


def read_content(descriptor: int) -> str:
    return os.pread(descriptor, 1024, 0).decode(errors="replace").strip()


def write_content(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)


def _user(folder: Path, descriptor: int) -> str:
    """Who keeps the folder's lock from being taken."""
    if not take(descriptor, fcntl.LOCK_SH):
        return f"process {read_content(descriptor) or 'unknown'}"
    names = [name for file in sorted((folder / PARTS).glob(f"*{PART_ENDING}")) if (name := _holder(file))]
    return ", ".join([*names[:3], *([f"{len(names) - 3} other parts"] if len(names) > 3 else [])]) or "another process"


def _holder(file: Path) -> str:
    """What the holder of a lock wrote into it; empty where nobody holds it."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return "" if take(descriptor, fcntl.LOCK_SH) else read_content(descriptor)
    finally:
        os.close(descriptor)


def is_held(folder: str | Path) -> bool:
    """Some process, perhaps this one, owns `folder` or shares it; False where that cannot be told."""
    for mode, kind in ((os.O_RDWR, fcntl.LOCK_EX), (os.O_RDONLY, fcntl.LOCK_SH)):
        try:
            descriptor = os.open(Path(folder) / LOCK, mode)
        except OSError:
            continue
        try:
            return not take(descriptor, kind)
        except (OSError, InputError):  # a file system that wants to write where it locks alone, or has no locks
            continue
        finally:
            os.close(descriptor)
    return False
