"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exittrain.errors import InputError
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

    What was there before stays until the new one is complete, and stays for good when anything fails. What an earlier,
    killed writer left is cleared first. Raises InputError while another process writes the same folder.
    """
    partial, old = _beside(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    claim, placed = _claim(partial, folder), False
    try:
        if old.exists() and not folder.exists():  # killed between the two renames below
            os.rename(old, folder)
        shutil.rmtree(old, ignore_errors=True)
        readable = partial.stat().st_mode & 0o666  # what the umask leaves of it
        yield partial
        write_list(partial)
        for place in (*sorted(partial.rglob("*")), partial):
            if place.is_file():  # safetensors writes for its owner alone: others serve what one trains
                place.chmod(readable)
            fsync_folder(place)
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
        placed = True
        fsync_folder(folder.parent)
    finally:
        if old.exists() and not folder.exists():  # the second rename failed
            os.rename(old, folder)
        shutil.rmtree(old, ignore_errors=True)
        if not placed:  # else the name may be the next writer's by now
            shutil.rmtree(partial, ignore_errors=True)
        os.close(claim)


def standing(folder: Path) -> Path:
    """Where the last whole content of an atomic folder is: beside its place where a writer was killed in its swap."""
    old = _beside(folder)[1]
    return old if old.exists() and not folder.exists() else folder


def _beside(folder: Path) -> tuple[Path, Path]:
    """What is being written, and what is being replaced."""
    return folder.parent / f".{folder.name}.partial", folder.parent / f".{folder.name}.old"


def _claim(partial: Path, folder: Path) -> int:
    """`partial`, empty, and a descriptor that keeps others from it; the kernel lets go of it with the process, however
    that ends. Where a file system cannot lock a folder, one writer at a time is up to the user."""
    while True:
        try:
            partial.mkdir(exist_ok=True)
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # the writer before has just put it in its place
            continue
        try:
            with suppress(OSError):
                _lock(descriptor, folder)
            if os.fstat(descriptor).st_ino == os.stat(partial).st_ino:
                for leftover in partial.iterdir():
                    shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"{folder} is being written by another process: wait for it, or choose another place"
        ) from None


def fsync_folder(path: str | Path) -> None:
    """Make a file's bytes, or the renames inside a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
