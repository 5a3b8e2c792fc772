"""Which process this is. Without a launcher there is one rank, 0 of 1, and nothing here touches torch.distributed.

A launcher (`deepspeed`, `torchrun`) is known by RANK, LOCAL_RANK and WORLD_SIZE, which it sets for its own children;
SLURM's variables are not looked at, since an interactive allocation sets them for a single process too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from exittrain.errors import InputError

Answer = TypeVar("Answer")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    return int(os.environ["RANK"]) if _launched() else 0


def world_size() -> int:
    """How many processes take part."""
    if is_distributed():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if _launched() else 1


def _launched() -> bool:
    return not _alone and all(os.environ.get(name, "").isdigit() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def setup(device: torch.device) -> None:
    """Join the launcher's other processes; nothing to do when alone. Safe to call again.

    The timeout is long because ranks also wait here while the main one does what one process does best.

    Raises:
        InputError: a launcher's variables are there only in part.
    """
    given = [name for name in LAUNCHER if os.environ.get(name)]
    if is_distributed() or not {"RANK", "WORLD_SIZE"}.intersection(given):
        return
    missing = [name for name in LAUNCHER if name not in given]
    if missing or not _launched():
        what = f"without {', '.join(missing)}" if missing else "but are no whole numbers"
        raise InputError(f"{', '.join(given)} are set {what}: start with a launcher, or unset them")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=12))


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
