"""How far a run is: its stages' own marks and metrics, and what SLURM says of its jobs where there are some.

Everything is read from files that the stages write anyway, so a run that was never submitted has a status too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exittrain.config.load import load_recipe
from exittrain.config.schema import Recipe, TrainSection
from exittrain.errors import InputError
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.lock import is_held
from exittrain.stages.context import StageContext
from exittrain.stages.run import wanted
from exittrain.stages.submit.commands import JobState, has_slurm, job_states
from exittrain.stages.submit.progress import pieces_done, steps_done
from exittrain.stages.submit.record import Events, Job, Record, read_events, read_record
from exittrain.stages.submit.script import log_file


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
    asked: dict[str, list[JobState]] = {}
    note = ""
    if record is not None and record.jobs:
        try:
            asked = {job.job_id: job_states(job.job_id) for job in record.jobs} if has_slurm() else {}
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
    jobs: dict[str, list[JobState]]
    events: Events
    held: bool

    def rows(self) -> list[StageStatus]:
        rows, working = [], self.held
        for stage in wanted(StageContext(self.recipe, self.run)):
            job = self.record.job_of(stage) if self.record else None
            state, failed = self._state(stage, job, working)
            working = working and state == "done"  # one process at a time: the first that is not done
            log = log_file(self.run.path, job.stage, failed) if job and failed else None
            progress = "" if state == "done" else self._progress(stage)
            rows.append(StageStatus(stage, job.job_id if job else "", state, progress, log))
            if stage == "train" and state != "done" and self.recipe.train is not None:
                train = self.recipe.train
                rows += [StageStatus(f"  {arm}", "", *self._arm(arm, train)) for arm in train.arms]
        return rows

    def _state(self, stage: str, job: Job | None, working: bool) -> tuple[str, str]:
        """In words, and the job or the array's task that ended badly, if one did."""
        stored = self.run.stored_key(stage)
        if stored is not None and stored == (self.record.keys.get(stage, stored) if self.record else stored):
            return "done", ""
        if job is not None:
            states = [state for state in self.jobs.get(job.job_id, []) if state.name == job.name]
            own_words = {one: self.events.last(one) for one in job.ids()}
            if job.job_id in self.jobs and not any(state.is_live for state in states):  # SLURM forgets what has ended
                own_words = {one: words if words.startswith("ended") else "gone" for one, words in own_words.items()}
            if job.parts > 1:
                return _of_array(states, job, own_words)
            return _of_job(states[0] if states else None, job.job_id, own_words[job.job_id])
        if working:
            return "running", ""
        return ("stopped" if self.run.started_key(stage) else "not started"), ""

    def _progress(self, stage: str) -> str:
        recipe, folder = self.recipe, self.run.path / stage
        if stage == "target" and recipe.target.scratch is not None:
            return steps_done(folder, recipe.target.scratch.steps)
        if stage == "warmup" and recipe.warmup is not None:
            return steps_done(folder, recipe.warmup.steps)
        if stage == "collect" and recipe.collect is not None:
            return pieces_done(folder.glob("shard-*.parquet"), recipe.collect.shards, "shards")
        if stage == "eval":
            return pieces_done((folder / "cells").glob("*.json"), 0, "pieces")
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
        progress = steps_done(folder, steps)
        return "begun" if progress else "", progress


def _of_job(state: JobState | None, job_id: str, own_words: str) -> tuple[str, str]:
    """In words, and the job's number if it ended badly. own_words: its last ones, for when SLURM does not know it."""
    if state is None:
        return own_words or "submitted", job_id if _ended_badly(own_words) else ""
    again = _again(state.restarts)
    if state.state == "RUNNING":
        return f"running on {state.nodes}{again}", ""
    if state.is_live:
        reason = "" if state.reason in ("", "None") else f" ({state.reason})"
        return f"{state.state.lower()}{reason}{again}", ""
    code = f" with {state.exit_code}" if state.exit_code else ""
    return f"{state.state.lower()}{code}{again}", job_id if state.state != "COMPLETED" else ""


def _of_array(states: Sequence[JobState], job: Job, own_words: Mapping[str, str]) -> tuple[str, str]:
    """`5 of 8 parts done, 2 running on n1 n2, 1 pending (Resources), requeued once`, and the first that ended badly."""
    of_task = {number: state for state in states for number in state.tasks}
    counts, nodes, failed = Counter[str](), set[str](), ""
    for number, task in enumerate(job.ids()):
        state = of_task.get(number)
        words, is_bad = _of_job(replace(state, restarts=0) if state else None, task, own_words[task])
        if state is not None and state.state == "RUNNING":
            words = "running"
            nodes.add(state.nodes)
        counts["done" if words in ("completed", "ended with 0") else words] += 1
        failed = failed or is_bad
    texts = [f"{counts.pop('done', 0)} of {job.parts} parts done"]
    for words, count in counts.items():
        texts.append(f"{count} {words}" + (f" on {' '.join(sorted(nodes))}" if words == "running" else ""))
    return ", ".join(texts) + _again(sum(state.restarts for state in of_task.values())), failed


def _ended_badly(words: str) -> bool:
    return words.startswith("ended") and words != "ended with 0"


def _again(restarts: int) -> str:
    return f", requeued {restarts} times" if restarts > 1 else ", requeued once" if restarts else ""


def render(status: RunStatus) -> str:
    """Plain text, one line a stage and an arm."""
    rows = [("stage", "job", "state", "progress")]
    rows += [(one.stage, one.job_id, one.state, one.progress) for one in status.stages]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [f"{status.name} in {status.folder}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{one.stage} wrote {one.log}" for one in status.stages if one.log is not None and one.log.exists()]
    return "\n".join([*lines, *([status.note] if status.note else [])])
