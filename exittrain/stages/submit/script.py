"""One stage's batch script: slurm/stage.sbatch, filled in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import jinja2

from exittrain.errors import InputError
from exittrain.records.share import share_path
from exittrain.runtime.ranks import LAUNCHER
from exittrain.runtime.slurm import OTHER_LAUNCHERS
from exittrain.stages.submit.profile import Profile, Verb, resources

TEMPLATE = "slurm/stage.sbatch"
OVERRULING = (  # what SBATCH_... would set against the script, also where it says nothing of it
    "ARRAY_INX", "ERROR", "INPUT", "JOB_NAME", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "REQUEUE", "SIGNAL", "TIMELIMIT",
    "WAIT",
)  # fmt: skip


def script_folder(run: Path) -> Path:
    """Where a run's scripts, logs and submit record lie."""
    return run / "slurm"


def event_folder(run: Path) -> Path:
    """Where jobs write down what happens to them, each in a file of its own: several nodes may do so at once."""
    return script_folder(run) / "events"


def log_file(run: Path, stage: str, job_id: str) -> Path:
    """What a job prints, over all its lives. job_id: of an array's task, ARRAY_TASK."""
    return log_folder(run) / f"{stage}-{job_id}.log"


def log_folder(run: Path) -> Path:
    return script_folder(run) / "logs"


def render(profile: Profile, stage: Verb, name: str, run: Path, folder: Path) -> str:
    """The script of one stage. name: the run's; run: its folder; folder: where the job starts, since a recipe's paths
    may be relative to it; both absolute.

    Raises:
        InputError: a path that a batch script cannot hold, or resources that do not fit the stage.
    """
    asked = resources(profile, stage)
    number = "%A_%a.log" if asked.array > 1 else "%j.log"
    shared = profile.model_dump(include={"account", "signal_seconds", "requeues", "modules", "venv", "setup", "srun"})
    return _environment().from_string(share_path(TEMPLATE).read_text(encoding="utf-8")).render(
        **shared,
        **asked.model_dump(),
        stage=stage,
        name=f"{name}-{stage}",
        run=str(run),
        folder=str(folder),
        log=str(log_file(run, stage, "JOB")).replace("%", "%%").replace("JOB.log", number),
        events=str(event_folder(run)),
        command=command(profile),
    )  # fmt: skip


def command(profile: Profile) -> str:
    """What stands before the stage's name: a container if there is one, python, exittrain."""
    ours = shlex.quote(sys.executable)
    python = profile.python or ("python" if profile.container or profile.venv else ours)
    return " ".join([*([profile.container] if profile.container else []), python, "-m exittrain"])


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update({"option": _option, "shell": shlex.quote})
    return environment


def _option(value: str) -> str:
    """A value on an #SBATCH line."""
    if re.search(r"[\"\\\r\n]", value):
        raise InputError(
            f"{value!r} has a quote, a backslash or a line break: #SBATCH lines cannot hold that, rename it"
        )
    return value if re.fullmatch(r"[\w./:@%+=,-]+", value) else f'"{value}"'


def variables_for(environment: Mapping[str, str], script: str = "") -> dict[str, str]:
    """The environment that jobs start from. What an allocation or a launcher around the submitting shell has set would
    be taken for the job's own, and sbatch heeds its variables more than the script, which says what is wanted."""
    kept = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # how to reach the controller
    said = [option.upper().replace("-", "_") for option in re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)]
    dropped = {*LAUNCHER, *OTHER_LAUNCHERS, *(f"SBATCH_{name}" for name in (*OVERRULING, *said))}
    if "MEM" in said:
        dropped.add("SBATCH_MEM_PER_NODE")
    return {
        name: value
        for name, value in environment.items()
        if name not in dropped and (name in kept or not name.startswith("SLURM_"))
    }
