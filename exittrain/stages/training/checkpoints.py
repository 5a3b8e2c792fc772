"""Checkpoints that are whole or not there: written aside, marked last, checked before use; the last two are kept.

step-000200/   model.pt (parameters and moments by name), rank-00000.pt a rank, COMPLETE.json (bytes and sha256 of every
               file). No file depends on the ZeRO stage or, but for how many rank files there are, on the ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exittrain.errors import InputError
from exittrain.records.files import TEMPORARY, fsync_folder, fsync_tree, read_json, record_of, sha256, write_json
from exittrain.records.run_folder import CHECKPOINT
from exittrain.runtime.ranks import any_rank, barrier, from_main, is_main, on_all, rank, world_size
from exittrain.stages.training.engine import Engine

COMPLETE = "COMPLETE.json"
MODEL = "model.pt"
FORMAT = 2  # of the files; 1 held DeepSpeed's own, one part a rank
KEPT = 2
UNREAD = "another rank cannot read it"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _saved(folder: Path) -> list[Path]:
    """What is saved, newest first."""
    found = [path for path in folder.glob("step-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def rank_file(index: int) -> str:
    return f"rank-{index:05d}.pt"


def save_checkpoint(folder: Path, step: int, engine: Engine, state: Mapping[str, Any]) -> None:
    """Write step-NNNNNN: the engine's parameters and optimiser, and `state` (tensors and plain values) of each rank.

    Every rank calls it. Until the marker is in and the folder has its name, resuming takes the checkpoint before.
    """
    final, temporary = step_folder(folder, step), folder / f"{TEMPORARY}step-{step:06d}"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> None:
        if is_main():
            _save(model, temporary / MODEL)
        _save(dict(state), temporary / rank_file(rank()))

    try:
        from_main(begin)
        model = engine.state()
        on_all(write)
        from_main(lambda: _complete(temporary, final, step))
    except Exception:
        if is_main():  # a full disk needs the room
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save(value: Any, path: Path) -> None:
    """torch.save to a file of our own: into one of torch's a failed write does not say why."""
    with open(path, "wb") as file:
        torch.save(value, file)


def _complete(temporary: Path, final: Path, step: int) -> None:
    """Mark what all ranks have written as whole and give it its name; older checkpoints go."""
    missing = [name for name in (MODEL, *map(rank_file, range(world_size()))) if not (temporary / name).is_file()]
    if missing:
        raise InputError(f"{temporary / missing[0]} is not there: all nodes must see {final.parent}")
    fsync_tree(temporary)
    files = {
        file.relative_to(temporary).as_posix(): record_of(file)
        for file in sorted(temporary.rglob("*"))
        if file.is_file()
    }
    mark = {"format": FORMAT, "step": step, "world_size": world_size(), "files": files}
    write_json(temporary / COMPLETE, mark, seal=True)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    fsync_folder(final.parent)
    for old in _saved(final.parent)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint (path, step), None where nothing was ever saved. Newer ones that are damaged are
    removed, with a line saying so. Every rank calls it.

    Raises:
        InputError: there are checkpoints and none is whole (training again from the start is the user's decision), or
            the newest was written in another format.
    """
    damaged: dict[Path, str | None] = {}  # None: only another rank cannot read it
    for path in from_main(lambda: _saved(folder)):
        complaint = from_main(partial(_complaint, path, thorough=True))
        if complaint is not None or any_rank(not is_main() and _complaint(path, thorough=False) is not None):
            damaged[path] = complaint
            continue
        mark = read_json(path / COMPLETE)
        if mark.get("format") != FORMAT:
            raise InputError(
                f"{path} was written in another format ({mark.get('format', 1)}, this version reads {FORMAT}): "
                f"finish with the version that began, or delete {folder} to train from the start"
            )
        if is_main():
            _tell(path, mark["world_size"], damaged)
        barrier()
        return path, int(mark["step"])
    if damaged:
        named = "; ".join(f"{path.name}: {complaint or UNREAD}" for path, complaint in damaged.items())
        raise InputError(
            f"{folder} has checkpoints but none is whole ({named}): copy them back from where they are kept, "
            f"or delete {folder} to train from the start"
        )
    return None


def _tell(path: Path, ranks: int, damaged: Mapping[Path, str | None]) -> None:
    """Say what is gone on from, and remove the damaged ones that are newer; one that this rank finds whole stays."""
    for other, complaint in damaged.items():
        print(f"{other} is damaged ({complaint or UNREAD}): going on from {path.name}", flush=True)
        if complaint is not None:
            shutil.rmtree(other, ignore_errors=True)
    if ranks != world_size():
        print(f"{path} was written by {ranks} ranks, going on with {world_size()}", flush=True)


def load_checkpoint(path: Path, engine: Engine) -> list[dict[str, Any]]:
    """Restore the engine; returns the `state` of every rank that saved, in their order."""
    engine.load(torch.load(path / MODEL, weights_only=True, map_location="cpu", mmap=True))
    ranks = read_json(path / COMPLETE)["world_size"]
    return [torch.load(path / rank_file(i), weights_only=True, map_location="cpu") for i in range(ranks)]


def _complaint(path: Path, thorough: bool) -> str | None:
    """What is wrong with a checkpoint folder, or None. thorough: hashes too, which one rank does for all."""
    try:
        files = read_json(path / COMPLETE)["files"]
    except (ValueError, KeyError, TypeError):  # InputError is a ValueError
        return f"no whole {COMPLETE}"
    for name, record in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != record["bytes"]:
            return f"{name} is missing or changed"
        if thorough and sha256(file) != record["sha256"]:
            return f"{name} is missing or changed"
    return None
