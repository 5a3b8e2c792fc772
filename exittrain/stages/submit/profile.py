"""A profile: what the jobs of a run ask of a cluster, and how python is found there. One strict YAML in slurm/profiles.

It holds resources only; whatever decides a result is in the recipe.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from exittrain.config.load import apply_override, describe, parse_yaml
from exittrain.config.schema import Positive, Section
from exittrain.errors import InputError, nearest
from exittrain.records.share import share_names, share_path
from exittrain.stages.run import ALONE, SPLIT

FOLDER = "slurm/profiles"
DEFAULT = "cpu"
Verb = Literal["data", "warmup", "collect", "train", "eval", "report"]
VERBS: tuple[Verb, ...] = ("data", "warmup", "collect", "train", "eval", "report")  # `data` makes a target too
FEW = ("data", *ALONE)  # most of it is one process's work: a profile's nodes are not meant for it
OURS = (
    "array", "a", "dependency", "d", "output", "o", "kill-on-invalid-dep", "no-requeue", "signal", "parsable", "hold",
    "H", "wrap",
)  # fmt: skip


def _flag(value: str) -> str:
    name = re.match(r"--?([\w-]+)", value)
    if name is None or "\n" in value:
        raise ValueError("a flag is one line and begins with - or --")
    if name[1] in OURS:
        raise ValueError(f"{name[0]} is set by `exittrain submit` itself")
    return value


def _time(value: str | int) -> str:
    if not re.fullmatch(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}", str(value)):
        raise ValueError("a time is minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    return str(value)


Word = Annotated[str, Field(pattern=r"^[^\s\"'\\]+$")]
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]
Flag = Annotated[str, AfterValidator(_flag)]
Time = Annotated[str | int, AfterValidator(_time)]
Gpus = Annotated[int, Field(ge=0)]


class StageResources(Section):
    """Where one stage's job differs from the profile."""

    partition: Word | None = None
    time: Time | None = None
    nodes: Positive | None = None
    tasks_per_node: Positive | None = None
    cpus_per_task: Positive | None = None
    gpus_per_node: Gpus | None = None
    memory: Word | None = None
    array: Positive | None = None  # so many jobs share the stage, each with these resources
    sbatch: list[Flag] | None = None


class Profile(Section):
    account: Word | None = None
    partition: Word | None = None  # several, with commas between, where the cluster takes that
    time: Time = "04:00:00"
    nodes: Positive = 1  # nodes and tasks: of the stages that several processes share
    tasks_per_node: Positive | None = None  # default: one a GPU, else one
    cpus_per_task: Positive = 4
    gpus_per_node: Gpus = 0
    memory: Word | None = None  # of a node, such as 64G
    signal_seconds: Positive = 120  # so long before its time is up a job is told to save and requeue
    requeues: Positive = 100  # a job that cannot get on must end some day
    modules: list[Word] = Field(default=[])
    venv: Line | None = None
    container: Line | None = None  # put before the command, such as apptainer exec --nv IMAGE
    python: Line | None = None  # default: the one that submits; with a container or a venv: python
    setup: list[Line] = Field(default=[])  # shell lines before the stage
    sbatch: list[Flag] = Field(default=[])
    srun: list[Flag] = Field(default=[])
    stages: dict[Verb, StageResources] = Field(default={})


class Resources(Section):
    """What one job asks for."""

    partition: str | None
    time: str
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory: str | None
    array: int  # 1: a job that is no array
    sbatch: list[str]


def resources(profile: Profile, stage: Verb) -> Resources:
    """The profile for one stage. Where one process does all or most, that is one node, one task and at most one GPU;
    `data` may have more, of which only answers that the target writes make use.

    Raises:
        InputError: several tasks for such a stage, an array for a stage without pieces, a time that leaves no room for
            the signal before its end.
    """
    own = profile.stages.get(stage, StageResources())
    if (own.array or 1) > 1 and stage not in SPLIT:
        raise InputError(f"profile: stages.{stage}.array must be 1: only {' and '.join(SPLIT)} can be an array of jobs")
    common = profile.model_dump(include=set(StageResources.model_fields) - {"array"})
    if stage in FEW:
        tasks = 1 if stage in ALONE else None
        common.update(nodes=1, tasks_per_node=tasks, gpus_per_node=min(profile.gpus_per_node, 1))
    merged = {**common, "array": 1, **own.model_dump(exclude_none=True)}
    merged["tasks_per_node"] = merged["tasks_per_node"] or max(merged["gpus_per_node"], 1)
    many = next((name for name in ("nodes", "tasks_per_node") if stage in ALONE and merged[name] > 1), None)
    if many:
        raise InputError(f"profile: stages.{stage}.{many} must be 1: one process does this stage")
    if seconds_of(merged["time"]) <= profile.signal_seconds:
        raise InputError(
            f"profile: {stage} has a time of {merged['time']}, which must be longer than signal_seconds "
            f"({profile.signal_seconds})"
        )
    return Resources(**merged)


def seconds_of(time: str) -> int:
    """SLURM's ways to write a time, in seconds: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def load_profile(name: str, overrides: Sequence[str] = ()) -> Profile:
    """A profile by path, or by its name in slurm/profiles. overrides: `profile.key=value`, values in YAML.

    Raises:
        InputError: one line: no such profile (the nearest is named), an unknown key (likewise), a bad value.
    """
    path = Path(name)
    if not path.is_file():
        known = sorted(entry.removesuffix(".yaml") for entry in share_names(FOLDER) if entry.endswith(".yaml"))
        bare = name.removeprefix(f"{FOLDER}/").removesuffix(".yaml")
        if bare not in known:
            raise InputError(f"no profile {name!r}{nearest(bare, known)} (known: {', '.join(known)}, or a path)")
        path = share_path(f"{FOLDER}/{bare}.yaml")
    try:
        tree: Any = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InputError(f"cannot read {path}: {reason}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path} is no profile: a mapping of keys is expected")
    return build_profile(tree, overrides, str(path))


def build_profile(tree: Mapping[str, Any], overrides: Sequence[str], origin: str) -> Profile:
    """Validate a plain mapping with overrides applied; `origin` is named in errors."""
    own = copy.deepcopy(dict(tree))
    for override in overrides:
        apply_override(own, override.removeprefix("profile."))
    try:
        return Profile.model_validate(own)
    except ValidationError as error:
        raise InputError(f"{origin}: {describe(error, Profile)}") from None
