"""The study `verifiers` on tiny models: shapes, laws, choices, cross-checks, calibration, resumption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_study import sequences, tiny_model, tiny_target

from exittrain.build.base import TreeShape
from exittrain.build.static import rank_paths
from exittrain.drafters.base import Drafter
from exittrain.drafters.calibration import Calibration
from exittrain.drafters.causal import CausalDrafter
from exittrain.errors import InputError, Interrupted
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.intervals import Bootstrap, Estimate
from exittrain.stages.evaluation.measures import Trace
from exittrain.stages.evaluation.results import DecodeResult
from exittrain.stages.evaluation.setup import Entrant
from exittrain.stages.evaluation.tasks import EvalPrompt, Task, heldout_task
from exittrain.stages.studies import base, verifiers
from exittrain.stages.studies.base import Bench
from exittrain.stages.studies.choices import Option, Split
from exittrain.stages.studies.forests import Forest, acceptance_by_rank, plant
from exittrain.stages.studies.laws import grow_and_score
from exittrain.stages.studies.run import study
from exittrain.stages.studies.settings import VerifierStudy, load_suite
from exittrain.stages.studies.verifier_tables import Decoding, Findings, check_decoding, check_verdicts
from exittrain.stages.studies.verifier_words import advice
from exittrain.verify.registry import get_verifier

BUDGETS, DEPTH, WIDTH = [2, 5], 3, 3


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return CausalDrafter(tiny_model(0, 0.1))


def settings_of(**changes) -> VerifierStudy:
    values = {
        "temperatures": [0.0, 1.0], "budgets": BUDGETS, "contexts": 36, "depth": DEPTH, "width": WIDTH,
        "bootstrap": 40, "draws": 3, "prompts": 4, "max_new_tokens": 8,
    }  # fmt: skip
    return load_suite("verifiers").model_copy(update={**values, **changes})


def run(target, drafter, folder: Path, stop: StopFlag | None = None, saved: Path | None = None, **changes):
    entrants = [Entrant("near", lambda: drafter, folder=saved)]
    return study(target, entrants, settings_of(**changes), folder, lambda: None, sequences(18, 20), stop=stop)


def bench_of(target, drafter, folder: Path, **changes) -> Bench:
    tasks = [heldout_task(sequences(18, 20), None)]
    entrants = [Entrant("near", lambda: drafter)]
    return Bench(target, entrants, tasks, settings_of(**changes), Sampling(), 0, folder, StopFlag())


@pytest.fixture(scope="module")
def whole(target, drafter, tmp_path_factory) -> tuple[Path, dict, list[str]]:
    """The study run once with every builder and verifier: (folder, study.json, advice)."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "drafter").mkdir()
    rules = [*settings_of().verifiers, "block"]
    report = run(target, drafter, folder, saved=folder / "drafter", verifiers=rules)
    return folder, json.loads((folder / "study.json").read_text())["results"], list(report.advice)


def test_every_verifier_stands_on_the_trees_it_is_exact_for(whole):
    _, data, _ = whole
    fixed = {"tev", "predraw", "residual"}
    expected = {
        "best_first": fixed, "beam": fixed, "static": fixed, "sampled_iid": fixed | {"rrs", "traversal"},
        "sampled_wor": fixed | {"rrs_wor", "traversal"}, "sampled_wor chain": {"block"},
    }  # fmt: skip
    for temperature in (0.0, 1.0):
        for budget in BUDGETS:
            laws = [x for x in data["laws"] if (x["temperature"], x["budget"]) == (temperature, budget)]
            found: dict[str, set[str]] = {}
            for law in laws:
                assert law["family"] == ("sampled" if "sampled" in law["trees"] else "fixed")
                assert not found.setdefault(law["trees"], set()) & set(law["verifiers"])
                found[law["trees"]] |= set(law["verifiers"])
                # fixed verifiers share one law on every tree; at temperature 0 all verifiers do
                assert fixed & set(law["verifiers"]) in (set(), fixed)
                assert temperature > 0 or len(laws) == 6
            assert found == expected


def test_what_was_chosen_is_the_best_on_the_calibration_half(whole):
    folder, data, lines = whole
    assert data["contexts"] == {"calibration": 18, "heldout": 18} and data["sequences"] == 18
    calibration = Calibration.load(folder / "drafter")
    assert len(calibration.choices) == 2 * 2 * 6  # temperatures, budgets, kinds of trees
    assert lines[-1] == f"verifier: auto now serves near by this calibration ({folder / 'drafter'})."
    for best, line in zip(data["longest"], lines, strict=False):
        choice = calibration.choose(best["temperature"], max(BUDGETS))
        assert (best["verifier"], best["budget"]) == (choice.verifier, choice.budget)
        assert best["trees"].startswith(choice.builder)
        name = f"{best['trees']} + {best['verifier']}, {best['budget']} nodes"
        assert line.startswith(f"temperature {best['temperature']:g}: {name}, longest expected block ")
    for one in data["contests"]:
        picked = calibration.choose(one["fixed"]["temperature"], one["budget"])
        assert picked.verifier == one[one["picked"]]["verifier"]
    assert {choice.branching for choice in calibration.choices if choice.verifier == "block"} == {"chain"}
    seconds = {(r["trees"], r["verifier"], r["budget"]): sum(r["seconds"].values()) for r in data["timing"]["rounds"]}
    for choice in calibration.choices:
        trees = "sampled_wor chain" if choice.verifier == "block" else choice.builder
        assert choice.round_seconds == pytest.approx(seconds[trees, choice.verifier, choice.budget])
        assert choice.low <= choice.expected_block_length <= choice.high


def test_decoding_and_verdicts_agree_with_the_expectations(whole):
    _, data, _ = whole
    decoded = data["decoded"]
    pooled = [x for x in decoded if x["trees"] is None]
    assert {x["verifier"] for x in pooled} == {"tev", "predraw", "residual", "rrs", "rrs_wor", "traversal", "block"}
    assert {x["temperature"] for x in decoded} == {0.0, 1.0, None}
    assert all(x["num_rounds"] > 0 and x["measured"] >= 1 for x in decoded)
    assert all(x["agrees"] for x in decoded if x["temperature"] == 0.0)  # nothing is drawn
    assert sum(x["agrees"] is False for x in pooled) <= 1  # of seven
    for one in data["verdicts"]:
        assert abs(one["difference"]["value"]) < 0.15
        assert one["num_trees"] % 36 == 0


def test_tables_and_plot_are_written(whole):
    folder, data, _ = whole
    text = (folder / "table.md").read_text()
    assert "| best_first + tev = predraw = residual | " in text
    assert text.count("expected block length by budget") == 2
    assert "| traversal | " in text and "Milliseconds of a round" in text
    assert (folder / "block-length.svg").read_text().startswith("<svg")
    clock = json.dumps({key: value for key, value in data.items() if key != "timing"})
    assert "second" not in clock  # only `timing` and the advice hold clock values


def test_a_second_run_measures_nothing_and_gives_the_same_bytes(target, drafter, tmp_path, monkeypatch):
    small = {"builders": ["best_first", "sampled_iid"], "verifiers": ["tev", "rrs"], "temperatures": [1.0]}
    calls: list[str] = []

    def counted(name, function):
        return lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs)

    stop = StopFlag()

    def stopping(*args, **kwargs):
        calls.append("decode")
        if len(calls) > 4:
            stop.set("SIGTERM")
        return original(*args, **kwargs)

    original = verifiers.decode_cell
    monkeypatch.setattr(base, "measure_laws", counted("laws", base.measure_laws))
    monkeypatch.setattr(verifiers, "decode_cell", stopping)
    with pytest.raises(Interrupted):
        run(target, drafter, tmp_path, stop=stop, **small)
    assert calls.count("laws") == 3 and not (tmp_path / "study.json").exists()  # acceptance, and two kinds of trees
    monkeypatch.setattr(verifiers, "decode_cell", counted("decode", original))
    run(target, drafter, tmp_path, **small)
    first, made = (tmp_path / "study.json").read_bytes(), len(calls)
    run(target, drafter, tmp_path, **small)
    assert len(calls) == made and (tmp_path / "study.json").read_bytes() == first
    assert "The calibration is not saved: near has no folder" in (tmp_path / "table.md").read_text()
    (tmp_path / "file").write_text("")  # no folder can lie below it: as good as one that may not be written
    run(target, drafter, tmp_path, saved=tmp_path / "file" / "drafter", **small)
    assert "cannot be written (Not a directory)" in (tmp_path / "table.md").read_text() and len(calls) == made


@pytest.mark.parametrize("builder", ["static", "sampled_iid", "sampled_wor"])
def test_acceptance_by_rank_is_the_exit_law_of_a_tree_of_one_level(target, drafter, tmp_path, builder):
    bench = bench_of(target, drafter, tmp_path, contexts=10)
    contexts = bench.contexts(["near"], DEPTH)
    found = acceptance_by_rank(bench, bench.settings, "near", contexts, builder, 1.0)
    forest = Forest(1.0, builder, builder, (), {WIDTH: TreeShape(WIDTH, 1, WIDTH, ((0,), (1,), (2,)))})
    (source,) = forest.sources()
    draft, logits = grow_and_score(target, drafter, contexts, torch.arange(10), source, Sampling(), 0)
    rule = {"static": "tev", "sampled_iid": "rrs", "sampled_wor": "rrs_wor"}[builder]
    exits = get_verifier(rule).exit_probabilities(draft.trees, logits, Sampling(), draft.draft_rows)
    assert found == pytest.approx(exits[:, 1:].mean(0).tolist(), abs=1e-9)


def test_shapes_are_nested_and_made_of_acceptance(target, drafter, tmp_path):
    bench = bench_of(target, drafter, tmp_path, builders=["static", "beam"], temperatures=[1.0])
    static, beam = plant(bench, bench.settings, "near", bench.contexts(["near"], DEPTH))
    small, large = (set(rank_paths(static.shapes[budget])) for budget in BUDGETS)
    assert small < large and len(large) == max(BUDGETS) + 1
    (source,) = static.sources()
    assert source.shape == static.shapes[max(BUDGETS)] and set(source.parts) == {"2", "5"}
    assert [(s.shape.budget, s.parts) for s in beam.sources()] == [(2, {"2": 2}), (5, {"5": 5})]
    with pytest.raises(InputError, match="no verifier of the study is exact for trees of static"):
        plant(bench, settings_of(verifiers=["rrs"], builders=["static"]), "near", bench.contexts(["near"], DEPTH))


def test_prompts_come_in_turn_and_not_from_the_half_that_chose(target, drafter, tmp_path):
    many = [Task(name, tuple(EvalPrompt(f"{name}{i}", (1, 2)) for i in range(3)), name) for name in ("a", "b")]
    bench = replace(bench_of(target, drafter, tmp_path, prompts=4), tasks=many)
    chosen = verifiers.choose_prompts(bench, "near", bench.settings, {"a0", "b0", "b1"})
    assert [prompt.id for prompt in chosen.prompts] == ["a/a1", "a/a2", "b/b2", "a/a0"]
    with pytest.raises(InputError, match="no prompt leaves room for 63 new tokens in 64 positions"):
        verifiers.choose_prompts(bench, "near", settings_of(max_new_tokens=63), set())


def test_prompts_are_decoded_at_the_warmest_and_the_lowest_positive_temperature():
    assert verifiers.check_temperatures([0.0, 0.3, 0.6, 1.0]) == {0.3, 1.0}
    assert verifiers.check_temperatures([0.0, 1.0, 1.5]) == {1.0}
    assert verifiers.check_temperatures([0.0, 0.3, 0.6]) == {0.3, 0.6}
    assert verifiers.check_temperatures([0.0, 0.7]) == {0.0, 0.7}


def findings(options: list[Option], split: Split, decoded: list[Decoding] = []) -> Findings:  # noqa: B006
    return Findings("d", options, split, decoded, 8, {}, 1.0, "a machine", 4, Bootstrap(50, 0))


def option(gap: float, name: str, budget: int, **more) -> Option:
    trees, verifier = name.split(" + ")
    values = 2.0 + gap + np.linspace(0, 0.5, 20)
    return Option(1.0, trees, verifier, budget, "sampled" if "sampled" in trees else "fixed", values, **more)


def test_advice_says_who_wins_and_what_is_fastest():
    split = Split.alternate([f"s{i}" for i in range(20)])
    fixed = option(0.0, "best_first + tev", 16, round_seconds=0.25)
    (line,) = advice(findings([fixed, option(0.12, "sampled_wor + traversal", 64, round_seconds=1.0)], split))
    assert line.startswith("temperature 1: sampled_wor + traversal, 64 nodes, longest expected block 2.38 [2.")
    assert "; sampled trees beat fixed ones by +0.12 [0.12, 0.12] on held-out contexts." in line
    assert line.endswith(" Most tokens/s here: best_first + tev, 16 nodes (about 9.1).")
    (line,) = advice(findings([fixed, option(-0.2, "sampled_wor + traversal", 64)], split))
    assert "fixed trees beat sampled ones by +0.20 [0.20, 0.20] on held-out contexts" in line
    (line,) = advice(findings([fixed, option(0.0, "sampled_wor + traversal", 64)], split))
    assert "sampled against fixed trees +0.00 [0.00, 0.00] on held-out contexts, too close to call" in line
    (line,) = advice(findings([option(0.0, "best_first + tev", 16)], split))
    assert "against" not in line and "tokens/s" not in line
    few = Split.alternate([f"s{i // 4}" for i in range(20)])
    (line,) = advice(findings([fixed, option(0.1, "sampled_wor + rrs_wor", 16)], few))
    assert "+0.10 on held-out contexts, too few held-out sequences for an interval" in line


def test_a_decoding_that_is_off_is_seen():
    def decoding(excess: float) -> Decoding:
        rng = np.random.default_rng(0)
        traces = []
        for prompt in range(12):
            expected = 1.5 + rng.random(30)
            lengths = 1 + (rng.random(30) < (expected - 1 + excess) / 2).astype(int) * 2
            traces.append(Trace(str(prompt), tuple(lengths.tolist()), 60, tuple(expected.tolist())))
        return Decoding(1.0, "static", "tev", DecodeResult(tuple(traces)))

    right, wrong = (check_decoding([decoding(excess)], Bootstrap(400, 0)) for excess in (0.0, 0.4))
    assert right.agrees is True and right.expected.low < right.measured < right.expected.high
    assert wrong.agrees is False and wrong.measured > wrong.expected.high
    both = check_decoding([decoding(0.0)] * 2, Bootstrap(400, 0))
    assert (both.trees, both.num_rounds) == (None, 2 * right.num_rounds)
    assert both.measured == pytest.approx(right.measured)


@pytest.mark.parametrize(("chance", "agrees"), [(0.02, None), (0.0, True)])
def test_rounds_that_never_varied_judge_nothing_unless_all_was_sure(chance, agrees):
    trace = Trace("a", (1,) * 20, 20, (1.0 + chance,) * 20)
    found = check_decoding([Decoding(1.0, "static", "tev", DecodeResult((trace,)))], Bootstrap(50, 0))
    assert (found.agrees, found.expected.low is None) == (agrees, agrees is None)
    assert found.expected.value == pytest.approx(1.0 + chance)


def test_verdicts_are_pooled_over_all_trees_of_a_verifier():
    split = Split.alternate([f"s{i // 2}" for i in range(20)])
    values = np.linspace(1, 2, 20)
    options = [
        Option(1.0, "static", rule, budget, "fixed", values, values + gap)
        for rule, budget, gap in (("tev", 8, 0.1), ("tev", 16, 0.3), ("predraw", 8, 0.0))
    ]
    tev, predraw = (check_verdicts(options, split, rule, Bootstrap(50, 0)) for rule in ("tev", "predraw"))
    assert (tev.num_trees, predraw.num_trees) == (40, 20)
    assert tev.difference == Estimate(pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.2))
    assert predraw.difference.value == 0.0
