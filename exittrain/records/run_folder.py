"""A run folder: one folder a stage, each with DONE.json written last: its key, and the sha256 of all its files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.models.sums import CALIBRATION_FILE
from exittrain.records.files import TEMPORARY, is_whole, read_json, record_of, seal_lines, write_json, write_text
from exittrain.records.schema import SCHEMA_VERSION

CHECKPOINT = re.compile(r"step-\d+")
DONE = "DONE.json"
STARTED = "STARTED.json"
UNLISTED = (DONE, STARTED, CALIBRATION_FILE)  # our own marks, and what is measured of a drafter later
LOG, BEST = "metrics.jsonl", "best/*"  # of a training loop: written on the way, not again when it goes on from its end
UNLISTED_FOLDERS = ("wandb", "tensorboard")  # what others show of the metrics, and write to when they like


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
            done = read_json(self.path / stage / DONE)
            whole = done["schema_version"] == SCHEMA_VERSION and isinstance(done["files"], dict)
            return str(done["key"]) if whole else None
        except (ValueError, KeyError, TypeError):  # InputError is a ValueError
            return None

    def mark_damage(self, stage: str) -> str | None:
        """One line naming a mark of the stage that is there and cannot be read; None when there is none."""
        for name in (DONE, STARTED):
            path = self.path / stage / name
            try:
                if path.exists():
                    str(read_json(path)["key"])
            except (ValueError, KeyError, TypeError):
                return f"{path} is damaged"
        return None

    def damage(self, stage: str, only: str = "*") -> str | None:
        """One line naming the first listed file that is missing or changed; None when all hold.

        only: a pattern (`fnmatch`) of the files to look at. Checkpoints are not listed: no other stage reads them, and
        who loads one looks at its own sums.
        """
        folder = self.path / stage
        for relative, record in sorted(read_json(folder / DONE)["files"].items()):
            file = folder / relative
            if not fnmatchcase(relative, only) or is_whole(file, record):
                continue
            if not file.is_file():
                return f"{file} is missing"
            return f"{file} is not what the stage wrote (its sha256 differs)"
        return None

    def is_done(self, stage: str, key: str) -> bool:
        """DONE.json exists, was made with `key`, and every file it lists still has its bytes."""
        return self.stored_key(stage) == key and self.damage(stage) is None

    def started_key(self, stage: str) -> str | None:
        """The key under which the stage's unfinished files were made, or None."""
        try:
            return str(read_json(self.path / stage / STARTED)["key"])
        except (ValueError, KeyError, TypeError):
            return None

    def begin(self, stage: str, key: str) -> None:
        """Make the folder ready for work under `key`: what another key made goes, what this key began stays.

        A finished stage is begun again when it is damaged. What its last checkpoint does not bring back: for a drafter
        all is done again, a log is put aside, since no number of it can be told from a wrong one.
        """
        is_finished = self.stored_key(stage) == key
        is_lost = is_finished and self.damage(stage, BEST) is not None
        log = self.path / stage / LOG
        if is_finished and log.exists() and self.damage(stage, LOG) is not None:
            log.replace(log.with_suffix(".damaged"))
        self.forget(stage)
        if is_lost or self.started_key(stage) != key:
            self.reset(stage)
            write_json(self.path / stage / STARTED, {"key": key}, seal=True)

    def forget(self, stage: str) -> None:
        """The stage is finished no more; its files stay."""
        (self.path / stage / DONE).unlink(missing_ok=True)

    def finish(self, stage: str, key: str, extra: Mapping[str, Any] | None = None) -> None:
        """Write DONE.json, last: what is in the folder now is the stage's result. `extra` is stored beside the list."""
        folder = self.path / stage
        files = {
            file.relative_to(folder).as_posix(): record_of(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file() and _is_listed(file.relative_to(folder))
        }
        mark = {**(extra or {}), "schema_version": SCHEMA_VERSION, "key": key, "files": files}
        write_json(folder / DONE, mark, seal=True)

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
        self.forget(stage)
        shutil.rmtree(self.path / stage, ignore_errors=True)

    def write_recipe(self, recipe: Any) -> None:
        """recipe.yaml as resolved: defaults and overrides written out. `recipe` is a pydantic model."""
        import yaml

        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        write_text(self.path / "recipe.yaml", seal_lines(text))

    def write_provenance(self, provenance: Mapping[str, Any]) -> None:
        """provenance.json: who made this folder, with what (see `runtime.provenance.collect_provenance`)."""
        write_json(self.path / "provenance.json", dict(provenance), seal=True)


def _is_listed(relative: Path) -> bool:
    inside = any(
        part.startswith(TEMPORARY) or part in UNLISTED_FOLDERS or CHECKPOINT.fullmatch(part) for part in relative.parts
    )
    return relative.name not in UNLISTED and not inside
