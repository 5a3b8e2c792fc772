"""Drawing by inverse CDF, for one row of weights or for many side by side: every verifier's draws are made here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from exittrain.law.probabilities import Rows
from exittrain.law.sampling import Sampling
from exittrain.verify.base import Generators

Uniform = Callable[[], float]  # the next draw from [0, 1)


def uniform_from(generator: torch.Generator | None) -> Uniform:
    """Draws in float64, so that rare tokens keep their probability."""
    device = "cpu" if generator is None else generator.device
    return lambda: float(torch.rand((), dtype=torch.float64, generator=generator, device=device))


def pick(weights: Rows, uniform: float) -> int:
    """Inverse CDF: an index of weights [n] (not negative, not all zero) by one uniform draw; never one of weight 0."""
    total = np.cumsum(weights)
    index = int(np.searchsorted(total, uniform * total[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


def uniforms(num_trees: int, generators: Generators, sampling: Sampling) -> Tensor:
    """[B, 2] float64: two draws a tree from its own generator; at temperature 0 nothing is left to draw."""
    if sampling.greedy:
        return torch.full((num_trees, 2), 0.5, dtype=torch.float64)
    return torch.stack(
        [torch.rand(2, dtype=torch.float64, generator=g, device=g.device).cpu() for g in generators[:num_trees]]
    )


def pick_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[B]: an index of each row of weights [B, n] by inverse CDF, never one of weight 0."""
    total = weights.cumsum(1)
    index = torch.searchsorted(total, (uniforms * total[:, -1])[:, None], right=True)[:, 0]
    return index.clamp(max=weights.shape[1] - 1)
