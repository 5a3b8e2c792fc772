"""One writer a folder. The lock is the kernel's: it goes with the process, however that ends, so it is never stale."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exittrain.errors import InputError


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Own `folder` while inside.

    Raises:
        InputError: another process owns it (named), or nothing can be written there.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"cannot write in {folder} ({error.strerror}): set another run_dir") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 64).decode(errors="replace").strip() or "another process"
            raise InputError(f"{folder} is in use by process {owner}: wait for it, or set another run_dir") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(folder: str | Path) -> bool:
    """Some process, perhaps this one, owns `folder`; False where that cannot be told."""
    try:
        descriptor = os.open(Path(folder) / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
