"""Which process this is. Everything works without torch.distributed: then there is one rank, 0 of 1."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number among all; 0 when alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


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
