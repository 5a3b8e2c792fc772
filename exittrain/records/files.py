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
from exittrain.models.sums import is_whole as is_whole
from exittrain.models.sums import known_sha256 as known_sha256
from exittrain.models.sums import record_of as record_of
from exittrain.models.sums import sealed, unsealed
from exittrain.models.sums import sha256 as sha256

LINE_SEAL = "# sha256 "
LINE_REMEDY = "of what follows; delete this line to use a file you have changed"


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, obj: Any, seal: bool = False) -> None:
    """Sorted keys, two spaces, no NaN or infinity (ValueError): the same object is always the same bytes.

    seal: a mapping also gets the sha256 of its entries (`own_sha256`), which `read_json` compares and takes off. For
    what is read back and stands in no list of sums.
    """
    obj = sealed(obj) if seal else obj
    write_text(path, json.dumps(obj, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Parse a JSON file.

    Raises:
        InputError: the file is missing or cannot be read, is no whole JSON document (truncated), or its seal is broken.
    """
    path = Path(path)
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
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


def seal_lines(text: str) -> str:
    """YAML text with a first line that holds its sha256, for `check_lines`."""
    return f"{LINE_SEAL}{_text_sha256(text)} {LINE_REMEDY}\n{text}"


def check_lines(text: str, path: str | Path) -> None:
    """Text without the line of `seal_lines` passes.

    Raises:
        InputError: the text below that line is not what was sealed.
    """
    first, _, rest = text.partition("\n")
    if first.startswith(LINE_SEAL) and first[len(LINE_SEAL) :].partition(" ")[0] != _text_sha256(rest):
        raise InputError(
            f"{path} is not what exittrain wrote (its sha256 differs): give the recipe it came from; if you changed it "
            "yourself, delete its first line"
        )


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
