"""A recipe whose data the target writes and whose trees are collected: seconds on one core, no training."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_target import make_target

from exittrain.stages.context import StageContext

SHARDS = 5


def recipe_in(folder: Path) -> dict:
    """Its prompts and its target are in `folder`."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(14)))
    generation = {"max_new_tokens": 10, "batch_size": 4, "temperature": 1.0}
    return {
        "name": "shared",
        "target": {"model": str(make_target(folder / "target"))},
        "drafter": {"layers": 1},
        "tree": {"budget": 5, "depth": 3, "width": 2},
        "data": {"train": {"kind": "prompts", "path": str(prompts)}, "max_length": 48, "generation": generation},
        "collect": {"anchors_per_sequence": 2, "shards": SHARDS},
        "tracking": {"wandb": "disabled"},
    }


def files_of(context: StageContext) -> dict[str, bytes]:
    """All of the run's `collect` folder, what is temporary or marks a beginning too."""
    folder = context.run.path / "collect"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
