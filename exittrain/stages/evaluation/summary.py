"""Cells to the tables of metrics.json. Pure: no model, no file, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from exittrain.errors import InputError
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation import measures as ms
from exittrain.stages.evaluation import schema as sc
from exittrain.stages.evaluation.results import Comparison, ContextResult, DecodeResult, VerifierResult

if TYPE_CHECKING:
    from exittrain.drafters.calibration import Choice

EQUAL = 1e-9  # exact expectations closer than this are the same number
FLOAT_NOISE = 1e-6  # at temperature 0 measured and expected are equal up to this


def _gain(pair: Comparison, estimate: iv.Estimate) -> sc.Gain:
    return sc.Gain(
        drafter=pair.drafter, control=pair.control, basis=pair.basis,  # type: ignore[arg-type]
        percent=sc.Interval.of(estimate), verdict=estimate.verdict,
    )  # fmt: skip


def _depths(rates: Sequence[ms.DepthRate]) -> list[sc.DepthRow]:
    return [sc.DepthRow(depth=r.depth, marginal=r.marginal, conditional=r.conditional) for r in rates]


def summarise_contexts(
    task: str,
    temperature: float,
    results: Mapping[str, ContextResult],
    oracle: ContextResult | None,
    comparisons: Sequence[Comparison],
    bootstrap: iv.Bootstrap,
    verifier: str | None = None,
) -> sc.ContextTable:
    """Exact expectation of each drafter at the same contexts: 1 + C, or a verifier's on sampled trees, whose ceiling
    the oracle's fixed trees are not. Sequences are the bootstrap's units."""
    first = next(iter(results.values()))
    clusters = first.sequence_ids
    places = {(r.sequence_ids, r.anchors) for r in results.values()}
    assert len(places) == 1, "drafters were measured at different contexts"
    sums = {name: iv.cluster_sums(1.0 + result.coverage, clusters) for name, result in results.items()}
    best = None if oracle is None else float(oracle.coverage.mean())
    rows = []
    for name, result in results.items():
        coverage = float(result.coverage.mean())
        rows.append(
            sc.ContextRow(
                drafter=name,
                expected_block_length=sc.Interval.of(bootstrap(iv.ratio, *sums[name])),
                coverage=coverage,
                tree_efficiency=coverage / best if best and verifier is None else None,
                depths=_depths(ms.rates_from_marginals(result.reach.mean(axis=0).tolist())),
            )
        )
    oracle_length, oracle_rates = None, list[ms.DepthRate]()
    if oracle is not None:
        oracle_length = sc.Interval.of(bootstrap(iv.ratio, *iv.cluster_sums(1.0 + oracle.coverage, clusters)))
        oracle_rates = ms.rates_from_marginals(oracle.reach.mean(axis=0).tolist())
    return sc.ContextTable(
        task=task, temperature=temperature, verifier=verifier, num_contexts=len(clusters),
        num_sequences=len(set(clusters)),
        oracle_block_length=oracle_length, oracle_depths=_depths(oracle_rates), drafters=rows,
        gains=[
            _gain(pair, bootstrap(iv.gain_of_ratios, *sums[pair.drafter], *sums[pair.control]))
            for pair in comparisons
        ],
    )  # fmt: skip


def summarise_decoding(
    task: str,
    temperature: float,
    verifier: str,
    results: Mapping[str, DecodeResult],
    comparisons: Sequence[Comparison],
    bootstrap: iv.Bootstrap,
    choices: Mapping[str, Choice] | None = None,
) -> sc.DecodeTable:
    """Measured block lengths on the prompts that every drafter finished; prompts are the bootstrap's units.

    choices: what each drafter was decoded with, where that is its own (`auto`).

    Raises:
        InputError: no prompt was finished by all drafters.
    """
    common = ms.common_prompts([result.traces for result in results.values()])
    if not common:
        reasons = {reason for result in results.values() for reason in result.skipped.values()}
        raise InputError(f"task {task}: no prompt was finished by every drafter ({'; '.join(sorted(reasons))})")
    shared = {
        name: sorted((t for t in result.traces if t.prompt_id in common), key=lambda t: t.prompt_id)
        for name, result in results.items()
    }
    sums = {name: ms.per_prompt(traces) for name, traces in shared.items()}
    means = {name: total / rounds for name, (total, rounds) in sums.items()}
    return sc.DecodeTable(
        task=task, temperature=temperature, verifier=verifier, common_prompts=len(common),
        drafters=[
            _decode_row(name, results[name], shared[name], bootstrap, (choices or {}).get(name)) for name in results
        ],
        gains_prompt_mean=[
            _gain(pair, bootstrap(iv.gain_of_means, means[pair.drafter], means[pair.control])) for pair in comparisons
        ],
        gains_pooled=[
            _gain(pair, bootstrap(iv.gain_of_ratios, *sums[pair.drafter], *sums[pair.control])) for pair in comparisons
        ],
    )  # fmt: skip


def _decode_row(
    name: str, result: DecodeResult, traces: Sequence[ms.Trace], bootstrap: iv.Bootstrap, choice: Choice | None
) -> sc.DecodeRow:
    sums, rounds = ms.per_prompt(traces)
    promised = ms.expected_sums(traces)
    expected, agrees = None, None
    if promised is not None:
        expected, agrees = expected_beside_measured(sums, promised, rounds, bootstrap)
    return sc.DecodeRow(
        drafter=name,
        attempted=len(result.traces) + len(result.skipped),
        finished=len(result.traces),
        skipped=dict(Counter(result.skipped.values())),
        num_rounds=int(rounds.sum()),
        num_tokens=sum(t.num_tokens for t in traces),
        block_length_prompt_mean=sc.Interval.of(bootstrap(iv.mean, sums / rounds)),
        block_length_pooled=sc.Interval.of(bootstrap(iv.ratio, sums, rounds)),
        accepted_pooled=ms.accepted_pooled(traces),
        expected_block_length_pooled=expected,
        agrees=agrees,
        served=None if choice is None else sc.Served.of(choice),
        depths=_depths(ms.depth_rates(traces)),
    )


def expected_beside_measured(
    measured: ms.Floats, expected: ms.Floats, rounds: ms.Floats, bootstrap: iv.Bootstrap
) -> tuple[sc.Interval, bool | None]:
    """The verifier's expectation at the rounds that were decoded, with the interval in which the measured pooled mean
    must lie.

    Given its tree a round's block length has that mean, so measured minus expected is noise around zero: the interval
    is the expectation plus the bootstrap interval of that noise. [P] sums over each prompt's rounds, and rounds.
    """
    noise = bootstrap(iv.difference_of_ratios, measured, expected, rounds)
    centre = float(expected.sum() / rounds.sum())
    if noise.low is None or noise.high is None:
        return sc.Interval(value=centre), None
    low, high = centre + noise.value - noise.high, centre + noise.value - noise.low
    return sc.Interval(value=centre, low=low, high=high), noise.low <= FLOAT_NOISE and noise.high >= -FLOAT_NOISE


def summarise_verifiers(
    task: str, temperature: float, drafter: str, result: VerifierResult, bootstrap: iv.Bootstrap
) -> sc.VerifierTable:
    """Verifiers on the same trees: exact expectation, and the mean of sampled verdicts with its interval."""
    rows = [
        sc.VerifierRow(
            verifier=rule,
            expected=float(np.mean(result.expected[rule])),
            measured=sc.Interval.of(bootstrap(iv.ratio, *iv.cluster_sums(values, result.sequence_ids))),
        )
        for rule, values in result.measured.items()
    ]
    means = {rule: float(np.mean(values)) for rule, values in result.expected.items()}
    longest = max(means, key=lambda rule: means[rule])
    if len(means) > 1 and max(means.values()) - min(means.values()) < EQUAL:
        longest = "equal"
    return sc.VerifierTable(
        task=task, temperature=temperature, drafter=drafter, num_trees=len(result.sequence_ids), draws=result.draws,
        rows=rows, longest=longest,
    )  # fmt: skip
