"""How far a run is: its stages' own marks and metrics, and what SLURM says of its jobs where there are some.

Everything is read from files that the stages write anyway, so a run that was never submitted has a status too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from exittrain.config.load import load_recipe
from exittrain.config.schema import Recipe, TrainSection
from exittrain.errors import InputError
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.lock import is_held
from exittrain.stages.context import StageContext
from exittrain.stages.run import wanted
from exittrain.stages.submit.commands import JobState, has_slurm, job_state
from exittrain.stages.submit.record import Events, Job, Record, read_events, read_record
from exittrain.stages.submit.script import log_file

RATED_ROWS = 20  # of the metrics, the newest: a rate of now


@dataclass(frozen=True)
class StageStatus:
    """One line. state: in words; progress: of its loop, empty where it has none; log: of a job that ended badly."""

    stage: str
    job_id: str
    state: str
    progress: str
    log: Path | None = None


@dataclass(frozen=True)
class RunStatus:
    """note: why SLURM was not asked, or empty."""

    name: str
    folder: Path
    stages: tuple[StageStatus, ...]
    note: str


def read_status(folder: Path) -> RunStatus:
    """The status of a run folder. Nothing is written, no model is loaded.

    Raises:
        InputError: no run folder, or a damaged file in it (named).
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no run folder: give the folder of a run, such as runs/quickstart")
    recipe, run, record = load_recipe(folder), RunFolder(folder), read_record(folder)
    asked: dict[str, JobState | None] = {}
    note = ""
    if record is not None and record.jobs:
        try:
            asked = {job.job_id: job_state(job.job_id) for job in record.jobs} if has_slurm() else {}
            note = "" if has_slurm() else "SLURM is not on this machine: states are those that the jobs wrote down"
        except InputError as error:
            note = str(error)
    reader = _Reader(recipe, run, record, asked, read_events(folder), is_held(folder))
    return RunStatus(recipe.name, folder, tuple(reader.rows()), note)


@dataclass(frozen=True)
class _Reader:
    recipe: Recipe
    run: RunFolder
    record: Record | None
    jobs: dict[str, JobState | None]
    events: Events
    held: bool

    def rows(self) -> list[StageStatus]:
        rows, working = [], self.held
        for stage in wanted(StageContext(self.recipe, self.run)):
            job = self.record.job_of(stage) if self.record else None
            state, ended_badly = self._state(stage, job, working)
            working = working and state == "done"  # one process at a time: the first that is not done
            log = log_file(self.run.path, job.stage, job.job_id) if job and ended_badly else None
            progress = "" if state == "done" else self._progress(stage)
            rows.append(StageStatus(stage, job.job_id if job else "", state, progress, log))
            if stage == "train" and state != "done" and self.recipe.train is not None:
                train = self.recipe.train
                rows += [StageStatus(f"  {arm}", "", *self._arm(arm, train)) for arm in train.arms]
        return rows

    def _state(self, stage: str, job: Job | None, working: bool) -> tuple[str, bool]:
        """In words, and whether it ended badly."""
        stored = self.run.stored_key(stage)
        if stored is not None and stored == (self.record.keys.get(stage, stored) if self.record else stored):
            return "done", False
        if job is not None:
            return _of_job(self.jobs.get(job.job_id), job, self.events.last(job.job_id))
        if working:
            return "running", False
        return ("stopped" if self.run.started_key(stage) else "not started"), False

    def _progress(self, stage: str) -> str:
        recipe, folder = self.recipe, self.run.path / stage
        if stage == "target" and recipe.target.scratch is not None:
            return _steps(folder, recipe.target.scratch.steps)
        if stage == "warmup" and recipe.warmup is not None:
            return _steps(folder, recipe.warmup.steps)
        if stage == "collect" and recipe.collect is not None:
            shards = len(list(folder.glob("shard-*.parquet")))
            return f"{shards} of {recipe.collect.shards} shards" if shards else ""
        if stage == "eval":
            cells = len(list((folder / "cells").glob("*.json")))
            return f"{cells} measurements" if cells else ""
        return ""

    def _arm(self, name: str, train: TrainSection) -> tuple[str, str]:
        """State and progress of an arm."""
        folder = self.run.path / "train" / name
        if self.run.stored_key(f"train/{name}") is not None:
            return "done", ""
        matched = folder / "steps.json"
        steps = train.arms[name].steps or train.steps
        if train.arms[name].match_time is not None:
            steps = read_json(matched)["steps"] if matched.exists() else 0
        progress = _steps(folder, steps)
        return "begun" if progress else "", progress


def _of_job(state: JobState | None, job: Job, words: str) -> tuple[str, bool]:
    """In words, and whether the job ended badly. words: what it wrote down last."""
    if state is None or state.name != job.name:
        if not words:
            return "submitted" if state is None else "gone", False
        return words, words.startswith("ended") and words != "ended with 0"
    again = f", requeued {state.restarts} times" if state.restarts > 1 else ", requeued once" if state.restarts else ""
    reason = "" if state.reason in ("", "None") else f" ({state.reason})"
    if state.state == "RUNNING":
        return f"running on {state.nodes}{again}", False
    if state.is_live:
        return f"{state.state.lower()}{reason}{again}", False
    code = f" with {state.exit_code}" if state.exit_code else ""
    return f"{state.state.lower()}{code}{again}", state.state != "COMPLETED"


def _steps(folder: Path, steps: int) -> str:
    """`step 120 of 1,000, 3.2 steps/s, 275 s left`, from a loop's metrics; empty before its first line."""
    rows = _metrics(folder / "metrics.jsonl")
    if not rows:
        return ""
    done = int(rows[-1]["step"])
    text = f"step {done:,} of {steps:,}" if steps else f"step {done:,}"
    seconds = [row["time/step_seconds"] for row in rows if row.get("time/step_seconds")][-RATED_ROWS:]
    if seconds:
        rate = 1.0 / fmean(seconds)
        text += f", {rate:.2f} steps/s" + (f", {max(steps - done, 0) / rate:,.0f} s left" if steps > done else "")
    return text


def _metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that somebody may be writing."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def render(status: RunStatus) -> str:
    """Plain text, one line a stage and an arm."""
    rows = [("stage", "job", "state", "progress")]
    rows += [(one.stage, one.job_id, one.state, one.progress) for one in status.stages]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [f"{status.name} in {status.folder}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{one.stage} wrote {one.log}" for one in status.stages if one.log is not None and one.log.exists()]
    return "\n".join([*lines, *([status.note] if status.note else [])])
