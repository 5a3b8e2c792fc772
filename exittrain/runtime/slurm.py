"""What SLURM's environment says of a process, and how the tasks of one srun find each other without a fixed port.

Only a task that srun started together with others counts as one of several ranks. A shell inside salloc, a batch script
and `srun --pty` have SLURM_NTASKS too, with a single process behind it: that one is alone.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.records.files import write_json

Environment = Mapping[str, str]
MEETING = ".meeting-"
MEETING_SECONDS = 600.0  # nodes may take minutes to start a container
CONNECT_SECONDS = 5.0
OTHER_LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun", "CROSS_SIZE": "deepspeed"}  # what each sets for its children


@dataclass(frozen=True)
class Place:
    """rank: number among all processes; local_rank: among those of this node."""

    rank: int
    local_rank: int
    world_size: int


def srun_place(environment: Environment) -> Place | None:
    """This process's place among the tasks of its srun; None where it is the only one, or srun did not start it."""
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    values = [environment.get(name, "") for name in names]
    if not all(value.isdigit() for value in values) or environment.get("SLURM_PTY_PORT"):
        return None
    place = Place(*map(int, values))
    return place if place.world_size > 1 else None


def tasks_per_node(text: str) -> list[int]:
    """SLURM's counts, such as `2(x3),1`: each number of tasks once."""
    return [int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", text)]


def is_one_of_several(environment: Environment) -> bool:
    """Whether a launcher or srun has started this process as one of several, as far as its variables go."""
    count = environment.get("WORLD_SIZE", "")
    return (count.isdigit() and int(count) > 1) or srun_place(environment) is not None


def refuse_double_launch(environment: Environment) -> None:
    """Raises:
    InputError: srun started several tasks a node, and each of them started a launcher with processes of its own.
    """
    tasks, nodes = (environment.get(f"SLURM_STEP_NUM_{name}", "") for name in ("TASKS", "NODES"))
    launcher = next((name for variable, name in OTHER_LAUNCHERS.items() if variable in environment), None)
    if launcher and tasks.isdigit() and nodes.isdigit() and int(tasks) > int(nodes):
        raise InputError(
            f"started twice: by srun as {tasks} tasks on {nodes} node(s), and in each of them by {launcher}: "
            "leave one out (srun alone is enough)"
        )


def expand_nodes(node_list: str) -> list[str]:
    """The names in SLURM's short form, in its order: `n[01-02],gpu-[1-2]-[3,5]`, as `scontrol show hostnames` has them.

    Raises:
        InputError: unbalanced brackets, or a range that is none.
    """
    names = []
    for word in re.findall(r"(?:[^,\s\[\]]|\[[^\[\]]*\])+|[\[\]]", node_list):
        if word in "[]":
            raise InputError(f"node list {node_list!r} has an unbalanced bracket")
        grown = [""]
        for part in re.split(r"(\[[^\]]*\])", word):
            endings = _numbers(part[1:-1], node_list) if part.startswith("[") else [part]
            grown = [name + ending for name in grown for ending in endings]
        names += grown
    return names


def _numbers(ranges: str, node_list: str) -> list[str]:
    """`01-03,07` as words, zeros in front kept."""
    numbers = []
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(last) < int(first):
            raise InputError(f"node list {node_list!r} has no such range as {part!r}")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def meet(folder: Path, place: Place, environment: Environment, seconds: float = MEETING_SECONDS) -> Any:
    """The TCPStore through which the tasks of one srun join, without a port fixed beforehand.

    Task 0 takes a port that the kernel gives it, so neither another job nor a foreign listener can be in the way, and
    writes it with its node's name into `folder`, which all see; the others read it there. It goes when all have come.

    Raises:
        InputError: nothing can be written in `folder`, or not all have come within `seconds`.
    """
    words = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    file = folder / (MEETING + ".".join(word or "0" for word in words))
    deadline = time.monotonic() + seconds
    return _host(file, place, environment, deadline) if place.rank == 0 else _join(file, place, deadline)


def _host(file: Path, place: Place, environment: Environment, deadline: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    name = address(environment)
    store = TCPStore(name, 0, place.world_size, is_master=True, wait_for_workers=False)
    is_new = not file.parent.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"host": name, "port": store.port})
    except OSError as error:
        raise InputError(f"cannot write in {file.parent} ({error.strerror}): set another run_dir") from None
    try:
        here = store.add("here", 1)
        while here < place.world_size:
            if time.monotonic() > deadline:
                raise InputError(f"{here} of {place.world_size} tasks came to {name}:{store.port}, {_WHERE}")
            time.sleep(0.1)
            here = store.add("here", 0)
    finally:
        file.unlink(missing_ok=True)
        if is_new:
            _remove_if_empty(file.parent)
    return store


def _join(file: Path, place: Place, deadline: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    problem = f"{file} does not appear"
    while time.monotonic() < deadline:
        try:
            at = json.loads(file.read_text(encoding="utf-8"))
            short = timedelta(seconds=CONNECT_SECONDS)
            store = TCPStore(at["host"], at["port"], place.world_size, is_master=False, timeout=short)
            store.add("here", 1)
            return store
        except (FileNotFoundError, ValueError, KeyError):
            time.sleep(0.1)
        except (OSError, RuntimeError) as error:  # an old file, or a name this node does not know: look again
            problem = str(error).splitlines()[0]
            time.sleep(1.0)
    raise InputError(f"task {place.rank} of {place.world_size} did not find task 0 ({problem}), {_WHERE}")


_WHERE = "given up: the run folder must be seen by all nodes, and nodes must reach each other by name"


def address(environment: Environment) -> str:
    """Task 0's node as SLURM calls it; where that name cannot be looked up, what the machine calls itself."""
    nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))
    for name in (*nodes[:1], socket.gethostname()):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    return "localhost"


def store_address(store: Any, environment: Environment) -> tuple[str, int]:
    """Host and port of the store that the ranks have met in: MASTER_ADDR and MASTER_PORT, else what `meet` found."""
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return store.host, store.port


def _remove_if_empty(folder: Path) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return
