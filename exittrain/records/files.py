"""Atomic files: temporary name in the same folder, fsync, rename, fsync of the folder. Readers see all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.models.folders import TEMPORARY as TEMPORARY
from exittrain.models.folders import fsync_folder as fsync_folder
from exittrain.models.folders import write_bytes as write_bytes


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, obj: Any) -> None:
    """Sorted keys, two spaces, no NaN or infinity (ValueError): the same object is always the same bytes."""
    write_text(path, json.dumps(obj, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Parse a JSON file.

    Raises:
        InputError: the file is missing, or is no whole JSON document (truncated).
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged or truncated ({error}): delete it and run the stage again") from None


def fsync_tree(path: str | Path) -> None:
    """fsync every file and folder below `path`, and `path` itself."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(folder)


def clean_temporary(folder: str | Path) -> None:
    """Remove what killed writers left anywhere below `folder`. Only for the one process that owns the folder."""
    for parent, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            if name.startswith(TEMPORARY):
                target = Path(parent, name)
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target, ignore_errors=True)
                else:
                    target.unlink(missing_ok=True)
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]


def sha256(path: str | Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
