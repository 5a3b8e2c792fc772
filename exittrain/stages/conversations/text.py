"""Plain text for testbeds: a corpus of files, a fixed tenth of which is held out, cut into windows of tokens."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.law.seeding import seed_for

HELDOUT_PARTS = 10  # one file in ten, by a hash of its path, is never trained on
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "ensurepip", "__pycache__"}
ENDINGS = {".py", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".go", ".js", ".ts", ".java"}
MAX_FILE_BYTES = 1 << 20  # larger files are tables, not prose or code


def text_files(corpus: str) -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of "stdlib" (Python's own library source, no download) or of a folder.

    Which side a file is on depends on its path inside the corpus only, so a target trained on the first list has never
    seen the second, whoever asks.

    Raises:
        InputError: no such folder, or fewer than two text files in it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if corpus == "stdlib" else Path(corpus)
    if not root.is_dir():
        raise InputError(f"corpus {corpus!r} is no folder: give one with text files, or 'stdlib'")
    endings = {".py"} if corpus == "stdlib" else ENDINGS
    files = [
        file
        for file in sorted(root.rglob("*"))
        if file.suffix in endings
        and file.is_file()
        and not SKIPPED.intersection(file.relative_to(root).parts)
        and 0 < file.stat().st_size <= MAX_FILE_BYTES
    ]
    if len(files) < 2:
        raise InputError(f"corpus {corpus!r} has {len(files)} text files: at least two are needed, one is held out")
    part = {file: seed_for("corpus", file.relative_to(root).as_posix()) for file in files}
    held = [file for file in files if part[file] % HELDOUT_PARTS == 0] or [min(files, key=part.__getitem__)]
    return [file for file in files if file not in set(held)], held


def read_text(file: Path) -> str:
    """A file's text; bytes that are no UTF-8 become replacement characters."""
    return file.read_bytes().decode("utf-8", errors="replace")


def text_windows(
    tokenizer: Any, files: Sequence[Path], length: int, count: int | None, seed: int
) -> list[tuple[str, list[int]]]:
    """(name, ids) of windows of exactly `length` tokens, side by side; `count` of them drawn by `seed` over all files.

    A file's rest shorter than a window is left out. Identical windows (licence headers) are kept once.
    """
    found: dict[tuple[int, ...], str] = {}
    for start in range(0, len(files), 64):
        batch = files[start : start + 64]
        encoded = tokenizer([read_text(file) for file in batch], add_special_tokens=False)["input_ids"]
        for file, ids in zip(batch, encoded, strict=True):
            for at in range(0, len(ids) - length + 1, length):
                found.setdefault(tuple(ids[at : at + length]), f"{file.stem}-{start + batch.index(file)}-{at}")
    windows = [(name, list(ids)) for ids, name in found.items()]
    if count is not None and count < len(windows):
        chosen = random.Random(seed_for(seed, "windows")).sample(range(len(windows)), count)
        windows = [windows[index] for index in sorted(chosen)]
    return windows
