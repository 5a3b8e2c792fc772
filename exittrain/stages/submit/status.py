"""How far a run is: its stages' own marks and metrics, and what SLURM says of its jobs where there are some.

Everything is read from files that the stages write anyway, so a run that was never submitted has a status too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from exittrain.config.load import load_recipe
from exittrain.config.schema import Recipe, TrainSection
from exittrain.errors import InputError
from exittrain.models.loading import check_source
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.lock import is_held
from exittrain.stages.context import StageContext
from exittrain.stages.prompts import check_set
from exittrain.stages.run import CHANGED, wanted
from exittrain.stages.submit.commands import JobState, has_slurm, job_states
from exittrain.stages.submit.progress import pieces_done, steps_done
from exittrain.stages.submit.record import Events, Job, Record, read_events, read_record
from exittrain.stages.submit.script import log_file

OUTDATED = "outdated"


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


class Words(NamedTuple):
    """Of a job or an array. failed: what ended badly, by number; runs: now; is_over: nothing of it is to come."""

    text: str
    failed: str = ""
    runs: bool = False
    is_over: bool = False


def read_status(folder: Path) -> RunStatus:
    """The status of a run folder. Nothing is written, no model is loaded; the files that keys are of are hashed.

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
    context = StageContext(recipe, run)
    reader = _Reader(context, _has_sources(recipe), record, asked, read_events(folder), is_held(folder))
    return RunStatus(recipe.name, folder, tuple(reader.rows()), note)


def _has_sources(recipe: Recipe) -> bool:
    """Whether what keys are hashes of is here: without it they would differ though nothing has changed.

    A look at names only: to list Python's own library, as the stages do, takes seconds.
    """
    target, drafter, data = recipe.target, recipe.drafter, recipe.data
    sources = [source for source in (data.train, data.heldout) if source is not None and source.path is not None]
    corpora = [source.path for source in sources if source.kind == "text"]
    corpora += [target.scratch.corpus] if target.scratch is not None else []
    if not all(corpus == "stdlib" or Path(str(corpus)).is_dir() for corpus in corpora):
        return False
    try:
        for model in (target.model, drafter.model, drafter.init):
            if model is not None and not model.startswith("layers:"):
                check_source(model)
        for source in sources:
            if source.kind != "text":
                check_set(str(source.path))
    except (InputError, OSError):
        return False
    return True


@dataclass(frozen=True)
class _Reader:
    context: StageContext
    has_sources: bool
    record: Record | None
    jobs: dict[str, list[JobState]]
    events: Events
    held: bool

    def rows(self) -> list[StageStatus]:
        rows, working, train = [], self.held, self.context.recipe.train
        for stage in wanted(self.context):
            job = self.record.job_of(stage) if self.record else None
            state, failed, runs, _ = self._state(stage, job, working)
            working = working and state == "done"  # one process at a time: the first that is not done
            log = log_file(self.context.run.path, job.stage, failed) if job and failed else None
            progress = "" if state in ("done", "damaged", OUTDATED) else _shown(self._progress(stage), runs)
            rows.append(StageStatus(stage, job.job_id if job else "", state, progress, log))
            if stage == "train" and state != "done" and train is not None:
                rows += [StageStatus(f"  {arm}", "", *self._arm(arm, train, runs)) for arm in train.arms]
        return rows

    def _state(self, stage: str, job: Job | None, working: bool) -> Words:
        stored = self.context.run.stored_key(stage)
        if stored is not None and self._is_current(stage, stored):
            return Words("done")
        words = self._of_slurm(job) if job else None
        if words is not None and not words.is_over:
            return words
        if working:
            return Words("running", runs=True)
        own = self._own_state(stage, stored)
        if words is None or not self._is_of_this_recipe(stage):
            return Words(own)
        return words if words.failed or own in ("stopped", "not started") else Words(own)

    def _of_slurm(self, job: Job) -> Words:
        states = [state for state in self.jobs.get(job.job_id, []) if state.name == job.name]
        own_words = {one: self.events.last(one) for one in job.ids()}
        if job.job_id in self.jobs and not any(state.is_live for state in states):  # SLURM forgets what has ended
            own_words = {one: words if words.startswith("ended") else "gone" for one, words in own_words.items()}
        if job.parts > 1:
            return _of_array(states, job, own_words)
        return _of_job(states[0] if states else None, job.job_id, own_words[job.job_id])

    def _own_state(self, stage: str, stored: str | None) -> str:
        """What the marks say of a stage that is not done and that nobody works on. Arms have marks of their own."""
        run, train = self.context.run, self.context.recipe.train
        if stored is not None:
            return OUTDATED
        if run.mark_damage(stage) is not None:
            return "damaged"
        places = [stage, *(f"train/{arm}" for arm in (train.arms if stage == "train" and train else ()))]
        begun = {place: key for place in places if (key := run.stored_key(place) or run.started_key(place))}
        if not begun:
            return "not started"
        return "stopped" if any(self._is_current(place, key) for place, key in begun.items()) else OUTDATED

    def _key(self, stage: str) -> str | None:
        """Of a stage or an arm under the folder's recipe; None where it cannot be known here."""
        try:
            return self.context.stage_key(stage) if self.has_sources else None
        except (InputError, OSError):
            return None

    def _is_current(self, stage: str, key: str) -> bool:
        """Whether a mark is of the folder's recipe; of the last submission's where that cannot be known."""
        known = self._key(stage)
        if known is not None:
            return key == known
        return key == (self.record.keys.get(stage, key) if self.record else key)

    def _is_of_this_recipe(self, stage: str) -> bool:
        """Whether the job that was submitted for a stage would do it as the folder's recipe has it now."""
        assert self.record is not None  # there is a job
        return self._key(stage) in (None, self.record.keys.get(stage))

    def _progress(self, stage: str) -> str:
        recipe, folder = self.context.recipe, self.context.run.path / stage
        if stage == "target" and recipe.target.scratch is not None:
            return steps_done(folder, recipe.target.scratch.steps)
        if stage == "warmup" and recipe.warmup is not None:
            return steps_done(folder, recipe.warmup.steps)
        if stage == "collect" and recipe.collect is not None:
            return pieces_done(folder.glob("shard-*.parquet"), recipe.collect.shards, "shards")
        if stage == "eval":
            return pieces_done((folder / "cells").glob("*.json"), 0, "pieces")
        return ""

    def _arm(self, name: str, train: TrainSection, runs: bool) -> tuple[str, str]:
        """State and progress of an arm. runs: the stage does."""
        run, stage = self.context.run, f"train/{name}"
        stored = run.stored_key(stage)
        key = stored or run.started_key(stage)
        if stored is None and run.mark_damage(stage) is not None:
            return "damaged", ""
        if key is not None and not self._is_current(stage, key):
            return OUTDATED, ""
        if stored is not None:
            return "done", ""
        matched = run.path / stage / "steps.json"
        steps = train.arms[name].steps or train.steps
        if train.arms[name].match_time is not None:
            steps = read_json(matched)["steps"] if matched.exists() else 0
        progress = steps_done(run.path / stage, steps)
        if not progress:
            return "", ""
        return "running" if runs else "stopped", _shown(progress, runs)


def _shown(progress: str, runs: bool) -> str:
    """Of what does not run only how far it is: the rate and the time left are those of a process that works."""
    return progress if runs else progress.partition(", ")[0]


def _of_job(state: JobState | None, job_id: str, own_words: str) -> Words:
    """own_words: the job's last ones, for when SLURM does not know it."""
    if state is None:
        is_over = own_words.startswith(("ended", "gone"))
        failed = job_id if _ended_badly(own_words) else ""
        return Words(own_words or "submitted", failed, own_words.startswith("started"), is_over)
    again = _again(state.restarts)
    if state.state == "RUNNING":
        return Words(f"running on {state.nodes}{again}", runs=True)
    if state.is_live:
        reason = "" if state.reason in ("", "None") else f" ({state.reason})"
        return Words(f"{state.state.lower()}{reason}{again}")
    code = f" with {state.exit_code}" if state.exit_code else ""
    failed = job_id if state.state != "COMPLETED" else ""
    return Words(f"{state.state.lower()}{code}{again}", failed, is_over=True)


def _of_array(states: Sequence[JobState], job: Job, own_words: Mapping[str, str]) -> Words:
    """`5 of 8 parts done, 2 running on n1 n2, 1 pending (Resources), requeued once`, and the first that ended badly."""
    of_task = {number: state for state in states for number in state.tasks}
    counts, nodes, tasks = Counter[str](), set[str](), list[Words]()
    for number, task in enumerate(job.ids()):
        state = of_task.get(number)
        tasks.append(_of_job(replace(state, restarts=0) if state else None, task, own_words[task]))
        words = tasks[-1].text
        if state is not None and state.state == "RUNNING":
            words = "running"
            nodes.add(state.nodes)
        counts["done" if words in ("completed", "ended with 0") else words] += 1
    texts = [f"{counts.pop('done', 0)} of {job.parts} parts done"]
    for words, count in counts.items():
        texts.append(f"{count} {words}" + (f" on {' '.join(sorted(nodes))}" if words == "running" else ""))
    text = ", ".join(texts) + _again(sum(state.restarts for state in of_task.values()))
    failed = next((task.failed for task in tasks if task.failed), "")
    return Words(text, failed, any(task.runs for task in tasks), all(task.is_over for task in tasks))


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
    if any(one.state == OUTDATED for one in status.stages):
        lines.append(f"{OUTDATED}: {CHANGED}; `exittrain run {status.folder}` makes it anew")
    return "\n".join([*lines, *([status.note] if status.note else [])])
