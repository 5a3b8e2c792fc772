"""Sums by which damage is found by name before it is used: of files, of JSON documents, of the folders written here.

A sealed document carries the sha256 of all its other entries; a folder written by `folders.atomic_folder` a sealed
list, FILES, of what was in it. Both may be missing (files from elsewhere have none); what is there must hold.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exittrain.errors import InputError

SEAL = "own_sha256"  # the entry of a sealed document
FILES = "exittrain-files.json"
CALIBRATION_FILE = "calibration.json"  # measured of a finished drafter later, so in no list; sealed itself
SETTLED_SECONDS = 2.0  # a file changed so recently may change again within one tick of its clock

_known: dict[tuple[str, int, int, int, int], str] = {}


def sha256(path: str | Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def known_sha256(path: str | Path) -> str:
    """`sha256`, read once a process as long as the file's size, times and inode stay: weights are many gigabytes."""
    status = Path(path).stat()
    mark = (str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    found = _known.get(mark)
    if found is None:
        found = sha256(path)
        if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_SECONDS:
            _known[mark] = found
    return found


def record_of(path: Path) -> dict[str, Any]:
    """{bytes, sha256} of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    """The file is there and has the bytes of its record."""
    try:
        return bool(path.stat().st_size == record["bytes"] and known_sha256(path) == record["sha256"])
    except FileNotFoundError:
        return False


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its seal, as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(document)))
    return {**plain, SEAL: _digest(plain)}


def unsealed(document: Any) -> Any:
    """A parsed document without its seal.

    Raises:
        ValueError: its entries are not those that were sealed.
    """
    if not isinstance(document, dict) or SEAL not in document:
        return document
    plain = {name: value for name, value in document.items() if name != SEAL}
    if document[SEAL] != _digest(plain):
        raise ValueError(f"its entries do not have the sha256 under {SEAL!r}")
    return plain


def write_list(folder: Path) -> None:
    """FILES: every file below `folder` with its bytes and sha256. For a folder that is not in use yet."""
    files = {
        file.relative_to(folder).as_posix(): record_of(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (FILES, CALIBRATION_FILE)
    }
    text = json.dumps(sealed({"schema_version": 1, "files": files}), indent=2, sort_keys=True)
    (folder / FILES).write_text(text + "\n", encoding="utf-8")


def check_folder(folder: str | Path) -> None:
    """Every file that FILES of a folder lists is as it was written; a folder without a list passes.

    Raises:
        InputError: the first file that is missing or changed, or the list itself.
    """
    place = Path(folder) / FILES
    if not place.is_file():
        return
    try:
        files = dict(unsealed(json.loads(place.read_text(encoding="utf-8")))["files"])
        bad = [name for name, record in sorted(files.items()) if not is_whole(place.parent / name, record)]
    except (ValueError, LookupError, TypeError):
        raise InputError(f"{place} is damaged or cut short: copy the folder again, or make it again") from None
    if bad:
        file = place.parent / bad[0]
        what = "is not what exittrain wrote (its sha256 differs)" if file.exists() else "is missing"
        raise InputError(f"{file} {what}: copy or make the folder again; if you changed it yourself, delete {place}")


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
