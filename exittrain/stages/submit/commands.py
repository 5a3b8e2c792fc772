"""SLURM's own commands, each as one function; what they refuse is one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exittrain.errors import InputError
from exittrain.stages.submit.script import variables_for

LIVE = (
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED", "RESIZING",
)  # fmt: skip
SECONDS = 60.0


@dataclass(frozen=True)
class JobState:
    """What the controller says of a job, or of some tasks of an array.

    state: PENDING, RUNNING, COMPLETED, ...; reason: why it waits or ended; tasks: their numbers, none for a single job.
    """

    name: str
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: int
    tasks: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


def has_slurm() -> bool:
    return shutil.which("sbatch") is not None


def sbatch(script: Path, after: str | None, held: bool) -> str:
    """Submit a script; returns the job's id. after: the job that must have ended well before; else this one ends too.

    Raises:
        InputError: sbatch refused it, in its own words.
    """
    options = ["--parsable", *(["--hold"] if held else [])]
    if after is not None:
        options += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    done = _run(["sbatch", *options, str(script)], script=script.read_text(encoding="utf-8"))
    job_id = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not job_id.isdigit():
        raise InputError(f"sbatch refused {script}: {_one_line(done) or 'it printed no job id'}")
    return job_id


def release(job_id: str) -> None:
    """Let a held job start.

    Raises:
        InputError: SLURM refused.
    """
    done = _run(["scontrol", "release", job_id])
    if done.returncode != 0:
        raise InputError(f"job {job_id} stays held: {_one_line(done)}; `scontrol release {job_id}` starts it")


def cancel(job_ids: Sequence[str]) -> str | None:
    """Cancel jobs; returns what went wrong, or None."""
    done = _run(["scancel", *job_ids]) if job_ids else None
    return None if done is None or done.returncode == 0 else _one_line(done)


def job_states(job_id: str) -> list[JobState]:
    """A job as the controller knows it; an array in several records, each of some of its tasks. Empty when it has
    forgotten the job (minutes after its end); of an array it may have forgotten some tasks.

    Raises:
        InputError: the controller cannot be asked.
    """
    whole_lists = {"SLURM_BITSTR_LEN": "0"}  # else the numbers of many tasks are cut short
    done = _run(["scontrol", "show", "job", "--oneliner", job_id], whole_lists)
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return []
        raise InputError(f"scontrol cannot be asked about job {job_id}: {_one_line(done)}")
    return [_job_state(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]


def _job_state(line: str) -> JobState:
    found = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
    name = re.search(r"JobName=(.*?) UserId=", line)
    return JobState(
        name=name[1] if name else "",
        state=found.get("JobState", ""),
        reason=found.get("Reason", ""),
        nodes=found.get("NodeList", ""),
        restarts=int(found.get("Restarts", "0")),
        exit_code=int(found.get("ExitCode", "0:0").partition(":")[0]),
        tasks=_numbers(found.get("ArrayTaskId", "")),
    )


def _numbers(text: str) -> tuple[int, ...]:
    """`0-2,5%4`: tasks 0, 1, 2 and 5, of which at most 4 run at once; `0-6:2` goes by twos."""
    numbers: list[int] = []
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", text.partition("%")[0]):
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(numbers)


def _run(
    command: Sequence[str], variables: Mapping[str, str] | None = None, script: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {**variables_for(os.environ, script), **(variables or {})}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not on PATH: this machine has no SLURM") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]} has not answered for {SECONDS:.0f} s") from None


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in (done.stderr or done.stdout).splitlines()]
    return "; ".join(line for line in lines if line)
