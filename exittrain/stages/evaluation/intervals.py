"""Paired bootstrap intervals. The unit that is resampled is the prompt (or the sequence a context came from).

Contexts of one sequence, and rounds of one prompt, are not independent: they stay together in every resample. A
comparison resamples units once for both sides, so what is common to them cancels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from exittrain.stages.evaluation.measures import Floats

LEVEL = 0.95
MIN_UNITS = 8  # resampling fewer gives intervals that are far too narrow: then there is none
Statistic = Callable[..., Floats]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; low and high are None below MIN_UNITS units."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """How the interval lies to zero, in words a table can print."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.low > 0:
            return "interval above zero"
        return "interval below zero" if self.high < 0 else "interval holds zero"


@dataclass(frozen=True)
class Bootstrap:
    """resamples: how often units are redrawn; seed: the same everywhere, so equal inputs give equal intervals."""

    resamples: int = 2000
    seed: int = 0

    def __call__(self, statistic: Statistic, *columns: Floats) -> Estimate:
        """BCa interval (Efron 1987) of `statistic(*columns, axis=-1)`; each column [U] holds one number a unit.

        Falls back to the percentile interval where BCa is undefined (a statistic that a left-out unit never moves).
        """
        value = float(statistic(*columns, axis=-1))
        if len(columns[0]) < MIN_UNITS:
            return Estimate(value)
        for method in ("BCa", "percentile"):
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # degenerate data: seen below as a NaN bound
                result = bootstrap(
                    columns, statistic, paired=True, vectorized=True, axis=-1, n_resamples=self.resamples, batch=256,
                    confidence_level=LEVEL, method=method, random_state=np.random.default_rng(self.seed),
                )  # fmt: skip
            low, high = (float(bound) for bound in result.confidence_interval)
            if math.isfinite(low) and math.isfinite(high):
                return Estimate(value, low, high)
        return Estimate(value)


def mean(values: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.mean(values, axis=axis))


def ratio(numerators: Floats, denominators: Floats, axis: int = -1) -> Floats:
    """Sum over sum: a pooled mean whose units differ in size."""
    return np.asarray(numerators.sum(axis=axis) / denominators.sum(axis=axis))


def gain_of_means(values: Floats, control: Floats, axis: int = -1) -> Floats:
    """Relative gain in percent of one mean over another."""
    return np.asarray(100.0 * (values.mean(axis=axis) / control.mean(axis=axis) - 1.0))


def gain_of_ratios(
    tops: Floats, bottoms: Floats, control_tops: Floats, control_bottoms: Floats, axis: int = -1
) -> Floats:
    """Relative gain in percent of one pooled mean over another."""
    return np.asarray(100.0 * (ratio(tops, bottoms, axis) / ratio(control_tops, control_bottoms, axis) - 1.0))


def difference_of_ratios(tops: Floats, others: Floats, bottoms: Floats, axis: int = -1) -> Floats:
    """Difference of two pooled means over the same rounds."""
    return ratio(tops, bottoms, axis) - ratio(others, bottoms, axis)


def cluster_sums(values: Floats, clusters: Sequence[str]) -> tuple[Floats, Floats]:
    """([U] sum of the values, [U] count) of each cluster, clusters in order of first appearance."""
    order = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index = np.array([order[name] for name in clusters])
    return (
        np.bincount(index, weights=values, minlength=len(order)).astype(np.float64),
        np.bincount(index, minlength=len(order)).astype(np.float64),
    )
