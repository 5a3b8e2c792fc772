"""Which process this is. Without a launcher there is one rank, 0 of 1, and nothing here touches torch.distributed.

A launcher (`deepspeed`, `torchrun`) is known by RANK, LOCAL_RANK and WORLD_SIZE, which it sets for its own children,
and `srun` by the variables it sets for its tasks (runtime/slurm.py); those of an allocation alone make no ranks.

Ranks wait for each other in `setup` (until all have come, MEETING_SECONDS at most), and in every function below that
all of them call, as in those of a training step. Such a wait ends when the last one comes, or when one has ended
(runtime/watch.py); GROUP_TIMEOUT only bounds the wait for one that lives and never comes.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from exittrain.errors import InputError, Interrupted, first_line
from exittrain.runtime import slurm, watch
from exittrain.runtime.signals import StopFlag
from exittrain.runtime.slurm import MEETING_SECONDS, Place

Answer = TypeVar("Answer")
GROUP_TIMEOUT = timedelta(hours=24)  # ranks also wait while the main one does by itself what one process does best
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALONE = Place(0, 0, 1)


_alone = False


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and not _alone


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process counts as the only one: what the main rank does by itself while the others wait for it."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    """This process's number among all, also before they have joined; 0 when alone."""
    if is_distributed():
        return dist.get_rank()
    return _place().rank


def local_rank() -> int:
    """This process's number among those of its node; 0 when alone."""
    return _place().local_rank


def local_size() -> int:
    """How many processes this node has, at most: the launcher's word, else srun's largest, else all there are. Also
    inside `alone`: the others wait, and keep their devices."""
    told = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")]  # torchrun's, deepspeed's
    counts = [int(value) for value in told if value.isdigit()]
    counts = counts or slurm.tasks_per_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    total = _launched().world_size
    return min(max(counts, default=total), total)


def world_size() -> int:
    """How many processes take part."""
    if is_distributed():
        return dist.get_world_size()
    return _place().world_size


def _place() -> Place:
    return ALONE if _alone else _launched()


def _launched() -> Place:
    """Where a launcher, or else srun, has put this process."""
    values = [os.environ.get(name, "") for name in LAUNCHER[:3]]
    if all(value.isdigit() for value in values):
        return Place(*map(int, values))
    return slurm.srun_place(os.environ) or ALONE


def setup(device: torch.device, meeting: Path, stop: StopFlag | None = None) -> None:
    """Join the other processes of a launcher or of srun; nothing to do when alone. Safe to call again.

    meeting: a folder that all see, where tasks of srun find each other when MASTER_ADDR and MASTER_PORT do not say.
    stop: set when a signal comes to any rank; there are loops that look at it from here on.

    Raises:
        InputError: a launcher's variables are there only in part, ranks do not find each other, or both launcher and
            srun have started several processes.
    """
    stop = stop or StopFlag()
    _meet(device, meeting, stop)
    stop.heed()


def _meet(device: torch.device, meeting: Path, stop: StopFlag) -> None:
    slurm.refuse_double_launch(os.environ)
    given = [name for name in LAUNCHER if os.environ.get(name)]
    place = slurm.srun_place(os.environ)
    if dist.is_available() and dist.is_initialized():
        return
    if {"RANK", "WORLD_SIZE"}.intersection(given):
        missing = [name for name in LAUNCHER if name not in given]
        if missing or not all(os.environ[name].isdigit() for name in LAUNCHER[:3]):
            what = f"without {', '.join(missing)}" if missing else "but no whole numbers"
            raise InputError(f"{', '.join(given)}: set {what}; start with a launcher, or unset them")
        place = _place()
        port = os.environ["MASTER_PORT"]
        if place.rank >= place.world_size or not (port.isdigit() and 0 < int(port) < 65536):
            said = f"RANK={place.rank}, WORLD_SIZE={place.world_size}, MASTER_PORT={port}"
            raise InputError(f"{said}: ranks count from 0 to WORLD_SIZE - 1, ports from 1 to 65535")
        _join(device, _meet_at_address(place), place, stop)
    elif place is not None:
        local = device.index or 0 if device.type == "cuda" else place.local_rank
        is_told = {"MASTER_ADDR", "MASTER_PORT"}.issubset(given)
        store = _meet_at_address(place) if is_told else slurm.meet(meeting, place, os.environ)
        numbers = map(str, (place.rank, local, place.world_size))
        os.environ.update(zip(LAUNCHER[:3], numbers, strict=True))  # for the libraries that look there
        _join(device, store, place, stop)


def _meet_at_address(place: Place) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT: the launcher's where it has one, else rank 0's."""
    try:
        meeting = rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=MEETING_SECONDS))
        return next(meeting)[0]
    except (OSError, RuntimeError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(
            f"rank {place.rank} of {place.world_size} did not meet the others at {where} ({reason}): see that all are "
            "started, with a free port"
        ) from None


def _join(device: torch.device, store: Any, place: Place, stop: StopFlag) -> None:
    """The watch comes first: from the moment they have met, no rank waits for one that has ended."""
    store.set_timeout(GROUP_TIMEOUT)
    if place.world_size > 1:
        at = slurm.store_address(store, os.environ)
        watch.start(*at, place.rank, place.world_size, stop)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    shared = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=shared, rank=place.rank, world_size=place.world_size, timeout=GROUP_TIMEOUT)


def refuse_several(verb: str) -> None:
    """For what several processes of a launcher would each do, in each other's way.

    Raises:
        InputError: there are several.
    """
    if world_size() > 1:
        raise InputError(
            f"`exittrain {verb}` is for one process, and {world_size()} were started: leave the launcher out"
        )


def is_main() -> bool:
    """Only the main rank writes files, logs and prints."""
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def all_reduce_sums(sums: Mapping[str, float]) -> dict[str, float]:
    """Sum each entry over ranks, in float64. Metrics travel as sums and counts and are divided afterwards.

    Every rank must give the same keys: names are compared first, since a backend may mix up different lengths silently.

    Raises:
        ValueError: the ranks' keys differ.
    """
    if world_size() == 1:
        return dict(sums)
    names = sorted(sums)
    gathered: list[list[str] | None] = [None] * world_size()
    dist.all_gather_object(gathered, names)
    if any(other != names for other in gathered):
        raise ValueError(f"ranks reduce different entries: {gathered}")
    values = torch.tensor([float(sums[name]) for name in names], dtype=torch.float64, device=_device())
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))


def check_alike(own: Mapping[str, Any]) -> None:
    """What must be the same on all ranks is, by name; entries are compared in their given order.

    Raises:
        InputError: on all ranks, naming the first entry that is not, with its two values.
    """
    if world_size() == 1:
        return
    gathered: list[Mapping[str, Any]] = [{}] * world_size()
    dist.all_gather_object(gathered, own)
    for number, other in enumerate(gathered):
        for name in {**gathered[0], **other}:
            here, there = (entries.get(name, "nothing") for entries in (gathered[0], other))
            if here != there:
                watch.all_end()
                said = f"{name} is {here} on rank 0 and {there} on rank {number}"
                raise InputError(f"the ranks were started differently ({said}): give all of them the same command")


def any_rank(flag: bool) -> bool:
    """True on every rank when it is on one: how a signal or a failure seen by one rank becomes everyone's decision."""
    if world_size() == 1:
        return flag
    value = torch.tensor([int(flag)], device=_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def raise_if_stopped(stop: StopFlag) -> None:
    """On all ranks together, where a signal has reached one of them.

    Raises:
        Interrupted: it has; the caller has saved what it wants kept.
    """
    if any_rank(stop.is_set):
        stop.set(stop.name or "a signal to another rank")
        stop.raise_if_set()


def on_all(action: Callable[[], Answer]) -> Answer:
    """Each rank's own answer. Where the action fails on one rank it fails on all: nobody is left waiting.

    An action that calls collectives is for all ranks alike; one that fails between them leaves the others to the watch.

    Raises:
        Exception: as this rank's own action did, unless that was interrupted while another rank's failed.
        InputError: it failed on another rank, which is named with what it said.
        Interrupted: it was interrupted on some rank and failed on none.
    """
    if world_size() == 1:
        return action()
    own: Exception | None = None
    try:
        answer = action()
    except Exception as error:
        own = error
    told = _gather(None if own is None else (isinstance(own, Interrupted), _line_of(own)))
    if not any(told):
        return answer
    watch.all_end()
    failed = [(number, said[1]) for number, said in enumerate(told) if said is not None and not said[0]]
    if own is not None and not (failed and isinstance(own, Interrupted)):
        raise own
    if failed:
        raise InputError(f"rank {failed[0][0]} could not go on: {failed[0][1]}")
    raise Interrupted(next(said[1] for said in told if said is not None))


def _gather(mine: tuple[bool, str] | None) -> list[tuple[bool, str] | None]:
    gathered: list[tuple[bool, str] | None] = [None] * world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _line_of(error: Exception) -> str:
    return str(error) if isinstance(error, (InputError, Interrupted)) else first_line(error)


def from_main(action: Callable[[], Answer]) -> Answer:
    """The main rank's answer on every rank; its exception too, so that all leave together."""
    if world_size() == 1:
        return action()
    box: list[tuple[bool, Any] | None] = [None]
    failure: Exception | None = None
    if is_main():
        try:
            box[0] = (True, action())
        except Exception as error:
            failure, box[0] = error, (False, _that_travels(error))
    dist.broadcast_object_list(box)
    assert box[0] is not None
    worked, answer = box[0]
    if worked:
        return cast(Answer, answer)
    watch.all_end()
    raise answer if failure is None else failure


def _that_travels(error: Exception) -> Exception:
    """The error itself where another process can have it, else one that says the same: some cannot be rebuilt."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(first_line(error))
    return error
