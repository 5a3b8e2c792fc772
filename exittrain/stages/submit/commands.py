"""SLURM's own commands, each as one function; what they refuse is one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
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
    """What the controller says of a job. state: PENDING, RUNNING, COMPLETED, ...; reason: why it waits or ended."""

    name: str
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: int

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
    done = _run(["sbatch", *options, str(script)])
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


def job_state(job_id: str) -> JobState | None:
    """A job as the controller knows it; None when it has forgotten it (minutes after the job's end).

    Raises:
        InputError: the controller cannot be asked.
    """
    done = _run(["scontrol", "show", "job", "--oneliner", job_id])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return None
        raise InputError(f"scontrol cannot be asked about job {job_id}: {_one_line(done)}")
    found = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", done.stdout))
    name = re.search(r"JobName=(.*?) UserId=", done.stdout)
    return JobState(
        name=name[1] if name else "",
        state=found.get("JobState", ""),
        reason=found.get("Reason", ""),
        nodes=found.get("NodeList", ""),
        restarts=int(found.get("Restarts", "0")),
        exit_code=int(found.get("ExitCode", "0:0").partition(":")[0]),
    )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=variables_for(os.environ), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not on PATH: this machine has no SLURM") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]} has not answered for {SECONDS:.0f} s") from None


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in (done.stderr or done.stdout).splitlines()]
    return "; ".join(line for line in lines if line)
