"""Which process this is. Without a launcher there is one rank, 0 of 1, and nothing here touches torch.distributed.

A launcher (`deepspeed`, `torchrun`) is known by RANK, LOCAL_RANK and WORLD_SIZE, which it sets for its own children,
and `srun` by the variables it sets for its tasks (runtime/slurm.py); those of an allocation alone make no ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from exittrain.errors import InputError
from exittrain.runtime import slurm
from exittrain.runtime.slurm import Place

Answer = TypeVar("Answer")
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


def world_size() -> int:
    """How many processes take part."""
    if is_distributed():
        return dist.get_world_size()
    return _place().world_size


def _place() -> Place:
    """Where a launcher, or else srun, has put this process."""
    if _alone:
        return ALONE
    values = [os.environ.get(name, "") for name in LAUNCHER[:3]]
    if all(value.isdigit() for value in values):
        return Place(*map(int, values))
    return slurm.srun_place(os.environ) or ALONE


def setup(device: torch.device, meeting: Path) -> None:
    """Join the other processes of a launcher or of srun; nothing to do when alone. Safe to call again.

    `meeting`: a folder that all see, where tasks of srun find each other when MASTER_ADDR and MASTER_PORT do not say.

    Raises:
        InputError: a launcher's variables are there only in part, tasks of srun do not find each other, or both have
            started several processes.
    """
    slurm.refuse_double_launch(os.environ)
    given = [name for name in LAUNCHER if os.environ.get(name)]
    place = slurm.srun_place(os.environ)
    if is_distributed():
        return
    if {"RANK", "WORLD_SIZE"}.intersection(given):
        missing = [name for name in LAUNCHER if name not in given]
        if missing or not all(os.environ[name].isdigit() for name in LAUNCHER[:3]):
            what = f"without {', '.join(missing)}" if missing else "but are no whole numbers"
            raise InputError(f"{', '.join(given)} are set {what}: start with a launcher, or unset them")
        _join(device)
    elif place is not None:
        local = device.index or 0 if device.type == "cuda" else place.local_rank
        store = None if {"MASTER_ADDR", "MASTER_PORT"}.issubset(given) else slurm.meet(meeting, place, os.environ)
        numbers = map(str, (place.rank, local, place.world_size))
        os.environ.update(zip(LAUNCHER[:3], numbers, strict=True))  # for the libraries that look there
        _join(device, store, place)


def _join(device: torch.device, store: Any = None, place: Place = ALONE) -> None:
    """The timeout is long because ranks also wait here while the main one does what one process does best."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(hours=12)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


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


def any_rank(flag: bool) -> bool:
    """True on every rank when it is on one: how a signal or a failure seen by one rank becomes everyone's decision."""
    if world_size() == 1:
        return flag
    value = torch.tensor([int(flag)], device=_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def on_all(action: Callable[[], Answer]) -> Answer:
    """Each rank's own answer. Where the action fails on one rank, it fails on all: nobody is left waiting.

    Raises:
        InputError: it failed on another rank.
    """
    try:
        answer = action()
    except Exception:
        any_rank(True)
        raise
    if any_rank(False):
        raise InputError("another rank could not go on: see its message")
    return answer


def from_main(action: Callable[[], Answer]) -> Answer:
    """The main rank's answer on every rank; its exception too, so that all leave together."""
    if world_size() == 1:
        return action()
    box: list[tuple[bool, Any] | None] = [None]
    if is_main():
        try:
            box[0] = (True, action())
        except Exception as error:
            box[0] = (False, error)
    dist.broadcast_object_list(box)
    assert box[0] is not None
    worked, answer = box[0]
    if not worked:
        raise answer
    return cast(Answer, answer)
