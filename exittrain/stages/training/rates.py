"""Wall clock and memory of a loop, for its log: they differ from run to run, and nothing else is made of them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

import torch

from exittrain.runtime.ranks import all_reduce_sums, rank, world_size

COUNTED = {"trained_tokens": "tokens", "sequences": "sequences", "trees": "trees"}  # a step's counts, where it has them


class Rates:
    """What was done since it was last asked. `add` every step; `take` on all ranks together."""

    def __init__(self) -> None:
        self._step_seconds, self._seconds = 0.0, 0.0
        self._done: dict[str, float] = {}

    def add(self, seconds: float, totals: Mapping[str, float]) -> None:
        """One optimiser step: its seconds, and its counts over micro-batches and ranks."""
        self._step_seconds = seconds
        self._seconds += seconds
        for count, name in COUNTED.items():
            if count in totals:
                self._done[name] = self._done.get(name, 0.0) + totals[count]

    def take(self) -> dict[str, float]:
        """time/step_seconds of the last step, time/<what>_per_second since the last call, memory/peak_gib."""
        numbers = {"memory/peak_gib": peak_memory()}
        if self._seconds:
            numbers["time/step_seconds"] = self._step_seconds
            numbers |= {f"time/{name}_per_second": count / self._seconds for name, count in self._done.items()}
        self._seconds, self._done = 0.0, {}
        return numbers


def peak_memory() -> float:
    """GiB this process has held at most, the largest of all ranks: on its GPU where it uses one, else resident."""
    held = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if not held:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    own = held / 2**30
    # A sum in which each rank has its own entry: the largest of them, by the one reduction there is.
    return max(all_reduce_sums({str(i): own if i == rank() else 0.0 for i in range(world_size())}).values())
