"""Metrics: a local JSONL that has everything, and wandb beside it when it works. A failure of wandb stops nothing."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from exittrain.records.files import write_text
from exittrain.runtime.ranks import is_main

Mode = Literal["online", "offline", "disabled"]


class Tracker:
    """`log(metrics, step)` appends a line {"step": step, ...} to `run_dir`/metrics.jsonl and tells wandb.

    Every metric shares one axis, `global_step`, of our own: wandb's inner counter refuses to go back after a resume.
    Only the main rank writes; on the others every call does nothing.
    """

    def __init__(
        self,
        run_dir: str | Path,
        name: str,
        config: Mapping[str, Any] | None = None,
        mode: Mode = "offline",
        project: str = "exittrain",
        entity: str | None = None,
        resume_step: int | None = None,
    ) -> None:
        """`resume_step`: last finished step of a resumed loop (lines after it are dropped); None starts anew."""
        self.path = Path(run_dir) / "metrics.jsonl"
        self._wandb: Any = None
        self._active = is_main()
        if not self._active:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(_kept(self.path, resume_step)))
        if mode != "disabled":
            self._guard(lambda: self._start(name, dict(config or {}), mode, project, entity))

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record `metrics` at `step`; NaN and infinities are written as null (JSON has none)."""
        if not self._active:
            return
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **clean}, sort_keys=True) + "\n")
        if self._wandb is not None:
            self._guard(lambda: self._wandb.log({**clean, "global_step": step}))

    def finish(self) -> None:
        """Flush and close; safe to call twice."""
        if self._active and self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        if self._wandb is not None:
            self._guard(lambda: self._wandb.finish())
            self._wandb = None

    def _start(self, name: str, config: dict[str, Any], mode: Mode, project: str, entity: str | None) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb.init(
            dir=str(self.path.parent),
            name=name,
            config=config,
            mode=mode,
            project=project,
            entity=entity,
            settings=wandb.Settings(init_timeout=30, console="off", x_disable_stats=True),
        )
        self._wandb.define_metric("global_step")
        self._wandb.define_metric("*", step_metric="global_step")

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever wandb does, training goes on and the JSONL has the numbers
            print(
                f"wandb is off from here on ({type(error).__name__}: {error}); {self.path} has everything",
                file=sys.stderr,
            )
            self._wandb = None


def _kept(path: Path, resume_step: int | None) -> list[str]:
    """Lines of an earlier life that the resumed state includes; a line cut short by a kill is dropped."""
    if resume_step is None or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= resume_step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    return kept


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl, oldest first; empty when there is none."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
