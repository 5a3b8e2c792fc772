"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exittrain.models.sums import write_list

TEMPORARY = ".tmp-"  # prefix of names that are not finished; never part of a result


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path` atomically (temporary name in the same folder, fsync, rename); parent folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` to write into; on success it gets a list of its files with their sums
    (`sums.check_folder`), is synced and takes its place.

    What was there before stays until the new one is complete, and stays for good when anything fails. One writer at a
    time; what an earlier, killed writer left is cleared first.
    """
    partial, old = (folder.parent / f".{folder.name}.{state}" for state in ("partial", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if old.exists() and not folder.exists():  # killed between the two renames below
        os.rename(old, folder)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    readable = partial.stat().st_mode & 0o666  # what the umask leaves of it
    try:
        yield partial
        write_list(partial)
        for place in (*sorted(partial.rglob("*")), partial):
            if place.is_file():  # safetensors writes for its owner alone: others serve what one trains
                place.chmod(readable)
            fsync_folder(place)
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
        fsync_folder(folder.parent)
    finally:
        if old.exists() and not folder.exists():  # the second rename failed
            os.rename(old, folder)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def fsync_folder(path: str | Path) -> None:
    """Make a file's bytes, or the renames inside a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
