"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` to write into; on success it is synced and takes its place.

    What was there before stays until the new one is complete, and stays for good when the block raises. One writer at a
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
        for place in (*sorted(partial.rglob("*")), partial):
            if place.is_file():  # safetensors writes for its owner alone: others serve what one trains
                place.chmod(readable)
            _sync(place)
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
        _sync(folder.parent)
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
