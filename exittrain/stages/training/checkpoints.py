"""Checkpoints that are whole or not there: written aside, marked last, checked before use; the last two are kept.

step-000200/   model.pt (or DeepSpeed's zero/), rank-00000.pt a rank, COMPLETE.json (bytes and sha256 of every file)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exittrain.errors import InputError
from exittrain.records.files import TEMPORARY, fsync_folder, fsync_tree, sha256, write_json
from exittrain.runtime.ranks import any_rank, barrier, is_main, rank, world_size
from exittrain.stages.training.engine import Engine

COMPLETE = "COMPLETE.json"
KEPT = 2


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def save_checkpoint(folder: Path, step: int, engine: Engine, state: Mapping[str, Any]) -> None:
    """Write step-NNNNNN: the engine's parameters and optimiser, and `state` (tensors and plain values) of each rank.

    Every rank calls it. Until the marker is in and the folder has its name, resuming takes the checkpoint before.
    """
    final, temporary = step_folder(folder, step), folder / f"{TEMPORARY}step-{step:06d}"
    if is_main():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    engine.save(temporary)
    torch.save(dict(state), temporary / f"rank-{rank():05d}.pt")
    barrier()
    if is_main():
        fsync_tree(temporary)
        files = {
            file.relative_to(temporary).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in sorted(temporary.rglob("*"))
            if file.is_file()
        }
        write_json(temporary / COMPLETE, {"step": step, "world_size": world_size(), "files": files})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        fsync_folder(folder)
        for old in sorted(folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    barrier()


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint (path, step), or None. Damaged ones are removed, with a line saying so.

    Raises:
        InputError: it was written by another number of ranks.
    """
    for path in sorted(folder.glob("step-*"), reverse=True):
        complaint = _complaint(path)
        if any_rank(complaint is not None):
            if is_main():
                print(f"{path} is damaged ({complaint}): going on from the checkpoint before", flush=True)
                shutil.rmtree(path, ignore_errors=True)
            barrier()
            continue
        mark = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        if mark["world_size"] != world_size():
            raise InputError(
                f"{path} was written by {mark['world_size']} ranks and this run has {world_size()}: "
                "start the same number, or delete the folder to train from the start"
            )
        return path, int(mark["step"])
    return None


def load_checkpoint(path: Path, engine: Engine) -> dict[str, Any]:
    """Restore the engine and return this rank's `state`."""
    engine.load(path)
    state: dict[str, Any] = torch.load(path / f"rank-{rank():05d}.pt", weights_only=True, map_location="cpu")
    return state


def _complaint(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        files = json.loads((path / COMPLETE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"no whole {COMPLETE}"
    for name, record in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != record["bytes"] or sha256(file) != record["sha256"]:
            return f"{name} is missing or changed"
    return None
