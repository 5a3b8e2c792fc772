"""From traces to numbers: which average, which rate. Every function names what it averages over.

A trace is one prompt's rounds. Block length counts the bonus token (math.md section 1); accepted tokens do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """One prompt decoded once. block_lengths: one a round, bonus included; num_tokens: new token ids (the last block
    may be cut). Of the same rounds, None where it was not recorded: expected_block_lengths, the verifier's own given
    the tree, and coverages, C of the tree (a fixed verifier expects 1 + C)."""

    prompt_id: str
    block_lengths: tuple[int, ...]
    num_tokens: int
    expected_block_lengths: tuple[float, ...] | None = None
    coverages: tuple[float, ...] | None = None


@dataclass(frozen=True)
class DepthRate:
    """marginal: share of rounds that accepted at least `depth` tokens; conditional: the same among the rounds that
    accepted at least `depth - 1` (None when there are none). marginal(d) is the product of conditionals up to d."""

    depth: int
    marginal: float
    conditional: float | None


def per_prompt(traces: Sequence[Trace]) -> tuple[Floats, Floats]:
    """([P] sum of block lengths, [P] rounds) of each prompt: any average can be redone from these two."""
    sums = np.array([sum(t.block_lengths) for t in traces], dtype=np.float64)
    return sums, np.array([len(t.block_lengths) for t in traces], dtype=np.float64)


def expected_sums(traces: Sequence[Trace]) -> Floats | None:
    """[P] sum over a prompt's rounds of the expected block length; None where it was not recorded."""
    if any(t.expected_block_lengths is None for t in traces):
        return None
    return np.array([sum(t.expected_block_lengths or ()) for t in traces], dtype=np.float64)


def block_length_prompt_mean(traces: Sequence[Trace]) -> float:
    """Mean over prompts of each prompt's own mean block length: every prompt counts once."""
    sums, rounds = per_prompt(traces)
    return float(np.mean(sums / rounds))


def block_length_pooled(traces: Sequence[Trace]) -> float:
    """All blocks over all rounds: every round counts once, so slow prompts (many rounds) weigh more."""
    sums, rounds = per_prompt(traces)
    return float(sums.sum() / rounds.sum())


def accepted_pooled(traces: Sequence[Trace]) -> float:
    """Accepted tokens a round, bonus not counted: what some repositories call acceptance length."""
    return block_length_pooled(traces) - 1.0


def rates_from_marginals(marginals: Sequence[float]) -> list[DepthRate]:
    """Depth rates from the probabilities of reaching depth 1, 2, ...; trailing zeros are dropped."""
    rates, before = [], 1.0
    for depth, value in enumerate(marginals, start=1):
        if value <= 0 and all(later <= 0 for later in marginals[depth - 1 :]):
            break
        rates.append(DepthRate(depth, float(value), float(value / before) if before > 0 else None))
        before = value
    return rates


def depth_rates(traces: Sequence[Trace]) -> list[DepthRate]:
    """Measured rates: of all rounds pooled, how many accepted at least 1, 2, ... tokens."""
    accepted = np.array([length - 1 for t in traces for length in t.block_lengths])
    deepest = int(accepted.max(initial=0))
    return rates_from_marginals([float(np.mean(accepted >= d)) for d in range(1, deepest + 1)])


def common_prompts(attempted: Sequence[Sequence[Trace]]) -> set[str]:
    """Ids of the prompts that every one of the compared drafters finished: the only ones a comparison may use."""
    finished = [{t.prompt_id for t in traces} for traces in attempted]
    return set.intersection(*finished) if finished else set()
