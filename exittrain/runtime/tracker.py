"""Metrics: a local JSONL that has everything and is the truth; wandb and TensorBoard beside it show the same."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.records.files import write_text
from exittrain.runtime.ranks import is_main
from exittrain.runtime.wandb_run import WandbRun

METRICS, EVENTS = "metrics.jsonl", "tensorboard"
Value = float | int | str | None


class Tracker:
    """`log(metrics, step)` appends a line {"step": step, ...} to `folder`/metrics.jsonl and tells the others.

    In wandb the metrics are called `name`/..., all on one axis of steps; TensorBoard's files lie in
    `folder`/tensorboard. Only the main rank writes; on the others every call does nothing.
    """

    def __init__(
        self, folder: str | Path, name: str, resume_step: int | None = None, wandb: WandbRun | None = None,
        tensorboard: bool = False,
    ) -> None:  # fmt: skip
        """`resume_step`: last finished step of a resumed loop (lines after it are dropped); None starts anew."""
        self.path = Path(folder) / METRICS
        self._name, self._wandb = name, wandb
        self._writer: Any = None
        self._active = is_main()
        if not self._active:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(_kept(self.path, resume_step)))
        if tensorboard:
            self._guard(lambda: self._open_writer(resume_step))

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Record `metrics` at `step`; NaN and infinities are written as null (JSON has none)."""
        if not self._active:
            return
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **clean}, sort_keys=True) + "\n")
        if self._wandb is not None:
            self._wandb.log({f"{self._name}/{key}": value for key, value in clean.items()}, step)
        if self._writer is not None:
            self._guard(lambda: self._write_events(clean, step))

    def finish(self) -> None:
        """Flush and close what is this tracker's own; safe to call twice. The wandb run stays open."""
        if self._active and self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        if self._writer is not None:
            self._guard(lambda: self._writer.close())
            self._writer = None

    def _open_writer(self, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.path.parent / EVENTS
        if resume_step is None:
            shutil.rmtree(folder, ignore_errors=True)
        # Points after the resumed step are logged again: readers drop those of the earlier life.
        self._writer = SummaryWriter(folder, purge_step=None if resume_step is None else resume_step + 1)

    def _write_events(self, row: Mapping[str, Value], step: int) -> None:
        for key, value in row.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()  # before the step's checkpoint: a resumed life finds every point up to it

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"TensorBoard is off from here on ({why}); {self.path} has everything", file=sys.stderr)
            self._writer = None


def write_page(folder: Path, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
    """TensorBoard files in `folder`, replacing what is there: each value as a point at step 0, texts as Markdown."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(folder) as writer:
            for name, value in values.items():
                writer.add_scalar(name, value, 0)
            for name, text in texts.items():
                writer.add_text(name, text, 0)
    except Exception as error:
        print(f"TensorBoard has no results ({type(error).__name__}: {error})", file=sys.stderr)


def check_tensorboard(wanted: bool) -> None:
    """Raises:
    InputError: TensorBoard is wanted and not installed.
    """
    if wanted and find_spec("tensorboard") is None:
        raise InputError(
            "tracking.tensorboard needs the package tensorboard: pip install 'exittrain[tensorboard]', or set "
            "tracking.tensorboard=false"
        )


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
