"""What was submitted of a run (slurm/jobs.json, written after every job that SLURM took), and the jobs' own words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.records.files import read_json, write_json
from exittrain.stages.submit.script import event_folder, script_folder

FILE = "jobs.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Job:
    """name: as SLURM shows it; script: relative to the run folder; parts: the tasks of an array, numbered from 0."""

    stage: str
    job_id: str
    name: str
    script: str
    parts: int = 1

    def ids(self) -> list[str]:
        """Of what runs by itself: the job, or each task of the array."""
        return [f"{self.job_id}_{i}" for i in range(self.parts)] if self.parts > 1 else [self.job_id]


@dataclass(frozen=True)
class Record:
    """keys: of every stage of the recipe when it was submitted, also of those done before; profile: as resolved."""

    keys: dict[str, str]
    profile: dict[str, Any]
    jobs: tuple[Job, ...] = ()

    def write(self, run: Path) -> None:
        write_json(script_folder(run) / FILE, {"schema_version": SCHEMA_VERSION, **asdict(self)}, seal=True)

    def job_of(self, stage: str) -> Job | None:
        """The job that does a stage; a target is made by the job of `data`."""
        return next((job for job in self.jobs if job.stage == {"target": "data"}.get(stage, stage)), None)


def read_record(run: Path) -> Record | None:
    """The record of a run's last submission; None when there was none.

    Raises:
        InputError: the file is damaged, or of another version.
    """
    path = script_folder(run) / FILE
    if not path.exists():
        return None
    data = read_json(path)
    try:
        if data["schema_version"] != SCHEMA_VERSION:
            raise InputError(f"{path} is of version {data['schema_version']}: delete it and submit again")
        return Record(data["keys"], data["profile"], tuple(Job(**job) for job in data["jobs"]))
    except (KeyError, TypeError):
        raise InputError(f"{path} is damaged: delete it and submit again") from None


@dataclass(frozen=True)
class Events:
    """What the jobs themselves have written down, oldest first: (time, job or array task, stage, words)."""

    rows: tuple[tuple[str, str, str, str], ...] = field(default=())

    def last(self, job_id: str) -> str:
        """The last words of a job or an array's task; empty when it has not started."""
        return next((words for _, job, _, words in reversed(self.rows) if job == job_id), "")


def read_events(run: Path) -> Events:
    """The files of slurm/events; lines cut short are left out."""
    files = sorted(event_folder(run).glob("*.txt"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    parts = sorted((line.split(" ", 3) for line in lines), key=lambda p: p[0])  # lines of one second stay in order
    return Events(tuple((p[0], p[1], p[2], p[3]) for p in parts if len(p) == 4))
