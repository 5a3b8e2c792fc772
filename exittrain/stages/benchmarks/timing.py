"""Jobs timed side by side in one process: ratios travel between machines, seconds do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


@dataclass
class Runs(Generic[Result]):
    """The measured rounds of one job, in order: wall milliseconds and what the job returned."""

    milliseconds: list[float] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.milliseconds)


def race(
    jobs: Mapping[str, Callable[[], Result]], repeats: int, device: str | torch.device = "cpu"
) -> dict[str, Runs[Result]]:
    """`repeats` rounds, all jobs in turn in each, so that a busy moment strikes all of them; one more round goes before
    them and is not counted. On a GPU the clock is read when the device has finished."""
    runs: dict[str, Runs[Result]] = {name: Runs() for name in jobs}
    for round_number in range(repeats + 1):
        for name, job in jobs.items():
            _wait(device)
            began = time.perf_counter()
            result = job()
            _wait(device)
            spent = 1e3 * (time.perf_counter() - began)
            if round_number:
                runs[name].milliseconds.append(spent)
                runs[name].results.append(result)
    return runs


def _wait(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
