"""Sequoia's tree shape (arXiv 2402.12374 section 3): the best fixed shape where acceptance goes by rank alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from exittrain.build.base import MAX_BUDGET
from exittrain.build.fill import Path
from exittrain.errors import InputError

SUM_TOLERANCE = 1e-6


def ranked_shape(acceptance: Sequence[float], budget: int, depth: int) -> tuple[Path, ...]:
    """The `budget` rank paths of at most `depth` ranks with the largest product of acceptance[rank] along the path,
    best first (ties by depth, then path): a value for `TreeShape.branching`.

    acceptance[k]: probability that the child of rank k is the one accepted, wherever its parent stands (Sequoia's
    positional acceptance); ranks past its end are never used. The sum of the products is then the expected number of
    accepted tokens, so this is the shape that Sequoia's dynamic programme finds, for every budget at once: the first n
    paths are the shape of budget n. A rank never comes before a smaller one, as a draw needs those before it: where a
    measured vector rises, the ranks concerned share their mean (isotonic regression).
    Fewer paths come back where no more exist. Raises InputError on an empty vector, entries that are negative or
    NaN, a sum above 1, and a budget or depth below 1.
    """
    chances = _falling(_checked(acceptance))
    if not 1 <= budget <= MAX_BUDGET or depth < 1:
        raise InputError(f"budget {budget}, depth {depth}: both must be at least 1, the budget at most {MAX_BUDGET}")
    heap: list[tuple[float, int, Path]] = [(-chance, 1, (rank,)) for rank, chance in enumerate(chances)]
    heapq.heapify(heap)
    paths: list[Path] = []
    while heap and len(paths) < budget:
        product, level, path = heapq.heappop(heap)
        paths.append(path)
        if level < depth:
            for rank, chance in enumerate(chances):
                heapq.heappush(heap, (product * chance, level + 1, (*path, rank)))
    return tuple(paths)


def _checked(acceptance: Sequence[float]) -> list[float]:
    values = [float(value) for value in acceptance]
    if not values:
        raise InputError("acceptance is empty; give one probability a rank")
    bad = next((k for k, value in enumerate(values) if not value >= 0), None)  # written so that NaN is bad too
    if bad is not None:
        raise InputError(f"acceptance[{bad}] is {values[bad]}; it must be a probability")
    if math.fsum(values) > 1 + SUM_TOLERANCE:
        raise InputError(
            f"acceptance sums to {math.fsum(values):.6g}; one child at most is accepted, so it is at most 1"
        )
    return values


def _falling(values: list[float]) -> list[float]:
    """The nearest vector that never rises (pool adjacent violators): neighbours out of order share their mean."""
    pools: list[tuple[float, int]] = []  # (mean, length)
    for value in values:
        mean, length = value, 1
        while pools and pools[-1][0] < mean:
            before, count = pools.pop()
            mean, length = (mean * length + before * count) / (length + count), length + count
        pools.append((mean, length))
    return [mean for mean, length in pools for _ in range(length)]
