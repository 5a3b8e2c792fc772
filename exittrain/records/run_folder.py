"""A run folder: one folder a stage, each with DONE.json written last: its key, and the sha256 of all its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exittrain.drafters.calibration import CALIBRATION_FILE
from exittrain.errors import InputError
from exittrain.records.files import TEMPORARY, read_json, sha256, write_json, write_text
from exittrain.records.schema import SCHEMA_VERSION

DONE = "DONE.json"
STARTED = "STARTED.json"
UNLISTED = (DONE, STARTED, CALIBRATION_FILE)  # our own marks, and what is measured of a drafter later
UNLISTED_FOLDERS = ("wandb",)  # wandb goes on writing there, for instance when a run is synchronised later


class RunFolder:
    """`path`/<stage>/... with atomic completion marks. Creating the object creates nothing on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def stage(self, name: str) -> Path:
        """The stage's folder, made if missing."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stored_key(self, stage: str) -> str | None:
        """The key a finished stage was made with, or None when it is not finished (or its mark is unreadable)."""
        try:
            done = json.loads((self.path / stage / DONE).read_text(encoding="utf-8"))
            whole = done["schema_version"] == SCHEMA_VERSION and isinstance(done["files"], dict)
            return str(done["key"]) if whole else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def damage(self, stage: str) -> str | None:
        """One line naming the first listed file that is missing or changed; None when all hold."""
        folder = self.path / stage
        for relative, record in sorted(read_json(folder / DONE)["files"].items()):
            file = folder / relative
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != record["bytes"] or sha256(file) != record["sha256"]:
                return f"{file} is not what the stage wrote (its sha256 differs)"
        return None

    def is_done(self, stage: str, key: str) -> bool:
        """DONE.json exists, was made with `key`, and every file it lists still has its bytes."""
        return self.stored_key(stage) == key and self.damage(stage) is None

    def started_key(self, stage: str) -> str | None:
        """The key under which the stage's unfinished files were made, or None."""
        try:
            return str(json.loads((self.path / stage / STARTED).read_text(encoding="utf-8"))["key"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def begin(self, stage: str, key: str) -> None:
        """Make the folder ready for work under `key`: what another key made goes, what this key began stays."""
        (self.path / stage / DONE).unlink(missing_ok=True)
        if self.started_key(stage) != key:
            self.reset(stage)
            write_json(self.path / stage / STARTED, {"key": key})

    def finish(self, stage: str, key: str, extra: Mapping[str, Any] | None = None) -> None:
        """Write DONE.json, last: what is in the folder now is the stage's result. `extra` is stored beside the list."""
        folder = self.path / stage
        files = {
            file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in sorted(folder.rglob("*"))
            if file.is_file() and _is_listed(file.relative_to(folder))
        }
        write_json(folder / DONE, {**(extra or {}), "schema_version": SCHEMA_VERSION, "key": key, "files": files})

    def done(self, stage: str) -> dict[str, Any]:
        """DONE.json of a finished stage.

        Raises:
            InputError: the stage has not been run.
        """
        path = self.path / stage / DONE
        if not path.exists():
            raise InputError(f"{self.path} has no finished {stage!r} stage: `exittrain run` makes it")
        record: dict[str, Any] = read_json(path)
        return record

    def reset(self, stage: str) -> None:
        """Forget a stage's results (the mark first, so that a kill in between cannot leave a mark on missing files)."""
        folder = self.path / stage
        (folder / DONE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def write_recipe(self, recipe: Any) -> None:
        """recipe.yaml as resolved: defaults and overrides written out. `recipe` is a pydantic model."""
        import yaml

        write_text(self.path / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))

    def write_provenance(self, provenance: Mapping[str, Any]) -> None:
        """provenance.json: who made this folder, with what (see `runtime.provenance.collect_provenance`)."""
        write_json(self.path / "provenance.json", dict(provenance))


def _is_listed(relative: Path) -> bool:
    parts = relative.parts
    return relative.name not in UNLISTED and not any(p.startswith(TEMPORARY) or p in UNLISTED_FOLDERS for p in parts)
