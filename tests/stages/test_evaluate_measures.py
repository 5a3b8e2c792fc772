"""Averages, rates and intervals on traces whose numbers are known (cases 111, 113, 117)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exittrain.errors import InputError
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation import measures as ms
from exittrain.stages.evaluation import summary, tables
from exittrain.stages.evaluation.results import (
    CellStore,
    Comparison,
    ContextResult,
    DecodeResult,
    VerifierResult,
    cell_key,
)  # fmt: skip
from exittrain.stages.evaluation.schema import DrafterInfo, Metrics, Settings, json_schema

SCHEMA = Path(__file__).parents[2] / "eval" / "schema" / "metrics.schema.json"
FAST = iv.Bootstrap(resamples=300, seed=1)


def trace(prompt: str, accepted: list[int], coverages: list[float] | None = None) -> ms.Trace:
    blocks = tuple(a + 1 for a in accepted)
    expected = None if coverages is None else tuple(1 + c for c in coverages)
    return ms.Trace(prompt, blocks, sum(blocks), expected, None if coverages is None else tuple(coverages))


def test_three_averages_of_one_trace_are_three_numbers():
    traces = [trace("a", [5, 5, 5, 5]), trace("b", [0] * 12)]
    assert ms.accepted_pooled(traces) == 1.25
    assert ms.block_length_pooled(traces) == 2.25
    assert ms.block_length_prompt_mean(traces) == 3.5
    table = summary.summarise_decoding("t", 1.0, "tev", {"d": DecodeResult(tuple(traces))}, [], FAST)
    row = table.drafters[0]
    found = (row.accepted_pooled, row.block_length_pooled.value, row.block_length_prompt_mean.value)
    assert found == (1.25, 2.25, 3.5)
    columns = tables.decode_table(metrics_with(decode=[table]), table).columns
    for name in ("block length (mean per prompt)", "block length (pooled over rounds)", "accepted tokens (pooled)"):
        assert name in columns


def test_depth_rates_are_marginal_and_conditional():
    rates = ms.rates_from_marginals([0.8, 0.48, 0.24, 0.0, 0.0])
    assert [r.depth for r in rates] == [1, 2, 3]
    assert [r.marginal for r in rates] == [0.8, 0.48, 0.24]
    assert [r.conditional for r in rates] == pytest.approx([0.8, 0.6, 0.5])
    # The same chain as counts: of 25 rounds 20 reach depth 1, 12 depth 2, 6 depth 3.
    measured = ms.depth_rates([trace("a", [0] * 5 + [1] * 8 + [2] * 6 + [3] * 6)])
    assert [r.marginal for r in measured] == pytest.approx([0.8, 0.48, 0.24])
    assert [r.conditional for r in measured] == pytest.approx([0.8, 0.6, 0.5])
    assert ms.depth_rates([trace("a", [0, 0])]) == []
    assert ms.rates_from_marginals([0.5, 0.0, 0.1])[2].conditional is None


def test_only_common_prompts_are_compared():
    ours = DecodeResult((trace("a", [3, 3]), trace("b", [1, 1])), {"c": "too long"})
    control = DecodeResult((trace("b", [0, 2]), trace("a", [1, 1]), trace("c", [9])))
    table = summary.summarise_decoding(
        "t", 1.0, "tev", {"ours": ours, "control": control}, [Comparison("ours", "control", "equal steps")], FAST
    )
    assert table.common_prompts == 2
    mine, other = table.drafters
    assert (mine.attempted, mine.finished, mine.skipped) == (3, 2, {"too long": 1})
    assert (other.attempted, other.finished, other.skipped) == (3, 3, {})
    assert other.block_length_pooled.value == 2.0  # the prompt only it finished is left out
    assert table.gains_pooled[0].percent.value == pytest.approx(50.0)
    empty = DecodeResult((), {"a": "too long"})
    with pytest.raises(InputError, match="no prompt was finished by every drafter"):
        summary.summarise_decoding("t", 1.0, "tev", {"ours": ours, "empty": empty}, [], FAST)


def test_the_order_of_prompts_does_not_matter():
    rng = np.random.default_rng(0)
    traces = [trace(f"p{i}", rng.integers(0, 4, 5).tolist()) for i in range(12)]
    forward, backward = (
        summary.summarise_decoding("t", 1.0, "tev", {"d": DecodeResult(tuple(order))}, [], FAST)
        for order in (traces, traces[::-1])
    )
    assert forward == backward


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        control = rng.gamma(4.0, 0.5, 60)  # mean 2
        ours = 1.02 * control + rng.normal(0, 0.05, 60)
        estimate = iv.Bootstrap(resamples=200, seed=0)(iv.gain_of_means, ours, control)
        held += estimate.low <= 2.0 <= estimate.high
        assert estimate.low <= estimate.value <= estimate.high
    assert 0.87 * 200 <= held <= 200


def test_pairing_and_clusters_decide_the_width():
    rng = np.random.default_rng(0)
    control = rng.gamma(4.0, 0.5, 80)
    ours = 1.05 * control
    paired = FAST(iv.gain_of_means, ours, control)
    assert paired.high - paired.low < 1e-6 and paired.verdict == "interval above zero"
    alone = FAST(iv.mean, ours)
    assert alone.high - alone.low > 0.1
    # 20 copies of each value in one cluster are no more evidence than one.
    names = [f"s{i // 20}" for i in range(20 * 80)]
    clustered = FAST(iv.ratio, *iv.cluster_sums(np.repeat(ours, 20), names))
    assert clustered.high - clustered.low == pytest.approx(alone.high - alone.low, rel=0.05)


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ((0.1, 0.3), "interval above zero"),
        ((-0.3, -0.1), "interval below zero"),
        ((-0.1, 0.1), "interval holds zero"),
        ((None, None), "no interval"),
    ],
)
def test_verdicts(bounds, verdict):
    assert iv.Estimate(0.0, *bounds).verdict == verdict


def test_degenerate_data_gets_an_interval_or_none():
    same = np.full(10, 2.0)
    assert FAST(iv.gain_of_means, same, same) == iv.Estimate(0.0, 0.0, 0.0)
    few = FAST(iv.mean, np.array([3.0, 4.0, 5.0]))
    assert few == iv.Estimate(4.0) and few.verdict == "no interval"  # three units resampled say next to nothing
    one_moves = np.array([1.0] * 9 + [2.0])
    estimate = FAST(iv.mean, one_moves)
    assert estimate.low is not None and estimate.low <= 1.1 <= estimate.high


def test_measured_block_length_lies_in_the_interval_of_its_expectation():
    rng = np.random.default_rng(0)
    chance = rng.uniform(0.2, 0.9, (40, 30))  # 40 prompts of 30 rounds with one drafted node each
    accepted = (rng.uniform(size=chance.shape) < chance).astype(int)
    traces = [trace(f"p{i}", accepted[i].tolist(), chance[i].tolist()) for i in range(40)]
    table = summary.summarise_decoding("t", 1.0, "tev", {"d": DecodeResult(tuple(traces))}, [], FAST)
    row = table.drafters[0]
    expected = row.expected_block_length_pooled
    assert row.agrees and expected.low <= row.block_length_pooled.value <= expected.high
    assert expected.value == pytest.approx(1 + chance.mean())
    wrong = [trace(f"p{i}", accepted[i].tolist(), (chance[i] + 0.1).tolist()) for i in range(40)]
    row = summary.summarise_decoding("t", 1.0, "tev", {"d": DecodeResult(tuple(wrong))}, [], FAST).drafters[0]
    expected = row.expected_block_length_pooled
    assert not row.agrees and not expected.low <= row.block_length_pooled.value <= expected.high


def context_results() -> dict[str, ContextResult]:
    ids, anchors = ("a", "a", "b", "c"), (3, 5, 2, 9)
    base = np.array([[0.8, 0.5], [0.6, 0.2], [0.9, 0.7], [0.4, 0.1]])
    return {name: ContextResult(ids, anchors, base * factor) for name, factor in (("token", 1.0), ("arm", 1.1))}


def test_context_table_and_oracle():
    results = context_results()
    oracle = ContextResult(results["arm"].sequence_ids, results["arm"].anchors, results["arm"].reach * 1.25)
    pair = Comparison("arm", "token", "equal time")
    table = summary.summarise_contexts("heldout", 0.5, results, oracle, [pair], FAST)
    assert (table.num_contexts, table.num_sequences) == (4, 3)
    token, arm = table.drafters
    assert token.expected_block_length.value == pytest.approx(2.05)
    assert arm.tree_efficiency == pytest.approx(0.8)
    assert [d.marginal for d in token.depths] == pytest.approx([0.675, 0.375])
    assert table.gains[0].percent.value == pytest.approx(100 * (2.155 / 2.05 - 1), abs=1e-6)
    metrics = metrics_with(contexts=[table])
    assert "equal time" in tables.context_table(metrics, table).columns[2]
    assert tables.context_table(metrics, table).title.startswith("heldout, ")


@pytest.mark.parametrize(
    ("source", "shown"),
    [("gsm8k (fixture)", "gsm8k (fixture)"), ("gsm8k", "gsm8k"), ("held-out data of the run", "gsm8k")],
)
def test_titles_say_fixture(source, shown):
    assert tables.task_name(metrics_with(tasks={"gsm8k": source}), "gsm8k") == shown


def test_verifiers_side_by_side_name_the_longer():
    ids = ("a", "b", "c")
    expected = {"tev": np.array([1.5, 2.0, 2.5]), "residual": np.array([1.4, 2.0, 2.5])}
    result = VerifierResult(ids, 4, expected, expected, {"tev": 1e-5, "residual": 2e-5})
    table = summary.summarise_verifiers("t", 1.0, "d", result, FAST)
    assert table.longest == "tev"
    printed = tables.verifier_table(metrics_with(), table, result.seconds)
    assert "longest for tev" in printed.note and "cheapest: tev" in printed.note
    same = VerifierResult(ids, 4, dict.fromkeys(expected, expected["tev"]), expected, result.seconds)
    assert summary.summarise_verifiers("t", 1.0, "d", same, FAST).longest == "equal"


def metrics_with(**parts) -> Metrics:
    names = ("d", "token", "arm", "ours", "control")
    return Metrics(
        name="n", target_fingerprint="f",
        settings=Settings(
            builder="best_first", budget=4, depth=2, width=2, top_k=0, top_p=1.0, max_new_tokens=8, bootstrap=300,
            seed=0,
        ),
        drafters=[DrafterInfo(name=name, role="drafter", fingerprint="f") for name in names],
        **{"tasks": {"t": "here"}, "contexts": [], "decode": [], "verifiers": [], **parts},
    )  # fmt: skip


def test_schema_file_is_the_types():
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == json_schema(), (
        "run: python -m exittrain.stages.evaluation.schema > eval/schema/metrics.schema.json"
    )
    results = context_results()
    table = summary.summarise_contexts("heldout", 1.0, results, None, [], FAST)
    metrics = metrics_with(contexts=[table])
    text = metrics.model_dump_json()
    assert Metrics.model_validate_json(text).model_dump_json() == text
    with pytest.raises(ValueError, match="surplus"):
        Metrics.model_validate({**json.loads(text), "surplus": 1})


def test_cells_are_kept_by_key_and_made_again_when_damaged(tmp_path):
    store, made = CellStore(tmp_path), []

    def make() -> ContextResult:
        made.append(1)
        return context_results()["arm"]

    key = cell_key({"a": 1})
    first = store.get(ContextResult, key, make)
    again = store.get(ContextResult, key, make)
    assert len(made) == 1 and (again.reach == first.reach).all() and again.anchors == first.anchors
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:50])
    store.get(ContextResult, key, make)
    assert len(made) == 2
    store.get(ContextResult, cell_key({"a": 2}), make)
    assert len(made) == 3


def test_markdown_is_whole():
    table = summary.summarise_contexts(
        "heldout", 1.0, context_results(), None, [Comparison("arm", "token", "equal steps")], FAST
    )
    text = tables.markdown(metrics_with(contexts=[table]), {})
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows if row.startswith("| ")}) <= 2  # the main and the depth table
    assert "gain over token (equal steps)" in text and "Block length counts the bonus token" in text
