"""The study `oracle` on tiny models: one tree serves all budgets, the split adds up, cells are kept."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_study import VOCAB, sequences, tiny_model, tiny_target

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.drafters.causal import CausalDrafter
from exittrain.errors import InputError, Interrupted
from exittrain.law.exit_law import batch_exit_law
from exittrain.law.gap import PLACES, first_nodes
from exittrain.models.target import TargetModel
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.contexts import measure_contexts, measure_oracle
from exittrain.stages.evaluation.intervals import Bootstrap, Estimate
from exittrain.stages.evaluation.setup import Entrant
from exittrain.stages.evaluation.tasks import heldout_task
from exittrain.stages.studies import oracle
from exittrain.stages.studies.base import Bench
from exittrain.stages.studies.oracle_tables import Line, advice, curve_plot, lines_of
from exittrain.stages.studies.run import study
from exittrain.stages.studies.settings import OracleStudy, load_suite

BUDGETS, DEPTH = [2, 5, 12], 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def entrants() -> list[Entrant]:
    drafters = {
        "warm start": CausalDrafter(tiny_model(1)),
        "near": CausalDrafter(tiny_model(0, 0.05)),
        "self": CausalDrafter(tiny_model(0)),
    }
    roles = {"warm start": "warm start", "near": "arm", "self": "drafter"}
    return [Entrant(name, partial(drafters.__getitem__, name), roles[name]) for name in drafters]


def settings_of(**changes) -> OracleStudy:
    values = {"temperatures": [1.0, 0.0], "budgets": BUDGETS, "contexts": 14, "depth": DEPTH, "bootstrap": 40}
    return load_suite("oracle").model_copy(update={**values, **changes})


def run(target, entrants, folder: Path, stop: StopFlag | None = None, **changes):
    return study(target, entrants, settings_of(**changes), folder, lambda: None, sequences(9), stop=stop)


def bench_of(target, entrants, folder: Path, **changes) -> Bench:
    tasks = [heldout_task(sequences(9), None)]
    return Bench(target, entrants, tasks, settings_of(**changes), oracle.Sampling(), 0, folder, StopFlag())


def test_the_whole_study(target, entrants, tmp_path):
    report = run(target, entrants, tmp_path)
    data = json.loads((tmp_path / "study.json").read_text())
    lines = data["results"]["lines"]
    assert [(x["temperature"], x["drafter"], x["budget"]) for x in lines] == [
        (t, d, n) for t in (1.0, 0.0) for d in ("warm start", "near") for n in BUDGETS
    ]
    for line in lines:
        best, capped, own = (line[f"{name}block_length"] for name in ("oracle_", "capped_", ""))
        assert 1 <= own["low"] <= own["value"] <= own["high"] and own["value"] <= capped["value"] + 1e-6
        assert capped["value"] <= best["value"] + 1e-6
        assert line["gap_of_depth"]["value"] == pytest.approx(best["value"] - capped["value"], abs=1e-9)
        assert line["gap_of_drafter"]["value"] == pytest.approx(capped["value"] - own["value"], abs=1e-9)
        assert line["gap"]["value"] == pytest.approx(best["value"] - own["value"], abs=1e-9)
        missed = sum(part["value"] for part in line["missed"].values())
        assert line["gap"]["value"] == pytest.approx(missed - line["spare"]["value"], abs=1e-5)
        assert abs(line["rounding"]) < 1e-5
        assert line["tree_efficiency"]["value"] == pytest.approx((own["value"] - 1) / (best["value"] - 1), abs=1e-9)
        assert set(line["exits"]) == set(PLACES) and sum(line["exits"].values()) == pytest.approx(1, abs=1e-6)
        if line["temperature"] == 0:
            assert best["value"] == pytest.approx(1 + line["budget"])
            assert capped["value"] == pytest.approx(1 + min(DEPTH, line["budget"]))
    near = [x["block_length"]["value"] for x in lines if x["drafter"] == "near" and x["temperature"] == 1]
    assert near == sorted(near) and near[0] < near[-1]
    assert len(report.advice) == 2 and all("near" in line for line in report.advice)
    text = (tmp_path / "table.md").read_text()
    assert "C*(N) = N" in text and "near: tree efficiency" in text and "oracle of depth 3: 1 + C*(N)" in text
    for name in ("block-length", "gap"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")


def test_one_tree_serves_all_budgets(target, entrants, tmp_path):
    """Each budget's numbers are those of trees grown for that budget alone."""
    bench = bench_of(target, entrants, tmp_path)
    contexts = bench.contexts(["near"], DEPTH, chain=max(BUDGETS))
    for temperature in (0.0, 1.0):
        result = oracle.gap_cell(bench, "near", contexts, BUDGETS, temperature)
        for budget in BUDGETS:
            shape, sampling = TreeShape(budget, DEPTH), bench.at(temperature)
            best = measure_oracle(target, contexts, shape, sampling, StopFlag(), "")
            drafter = bench.subject("near").drafter
            own = measure_contexts(target, drafter, contexts, "best_first", shape, sampling, StopFlag(), "")
            parts = result.gaps[budget]
            np.testing.assert_allclose(parts["oracle_coverage"], best.coverage, atol=1e-6)
            np.testing.assert_allclose(parts["coverage"], own.coverage, atol=1e-6)
            rest = parts["oracle_coverage"] - parts["coverage"] - parts["missed"].sum(1) + parts["spare"]
            np.testing.assert_allclose(rest, 0, atol=1e-5)  # at every context


def test_the_capped_oracle_is_the_best_tree_of_its_depth(target, entrants, tmp_path):
    """Between the drafter's and the oracle's at every context, equal to a target that drafts for itself under the same
    limit, and to the oracle wherever that is no deeper. The first n nodes are the tree of budget n, ties included."""
    bench = bench_of(target, entrants, tmp_path)
    contexts = bench.contexts(["near"], DEPTH, chain=max(BUDGETS))
    places = (contexts.sequences, contexts.tree_sequence, contexts.anchors)
    deep = oracle.target_trees(bench, contexts, max(BUDGETS), 1.0)
    capped = oracle.capped_coverage(bench, contexts, BUDGETS, 1.0)
    near, own = (oracle.gap_cell(bench, name, contexts, BUDGETS, 1.0).gaps for name in ("near", "self"))
    shared = 0
    for budget, coverage in capped.items():
        assert (coverage <= near[budget]["oracle_coverage"] + 1e-6).all()
        assert (near[budget]["coverage"] <= coverage + 1e-6).all()
        np.testing.assert_allclose(own[budget]["coverage"], coverage, atol=1e-6)  # width 8 is no limit here
        alone = get_builder("best_first")(
            target.session(*places, bench.at(1.0)), TreeShape(budget, DEPTH, budget)
        ).trees
        np.testing.assert_allclose(batch_exit_law(alone, alone.draft_logprobs.double()).coverage, coverage, atol=1e-6)
        shallow = first_nodes(deep, deep.draft_logprobs.double(), budget)[0].depths.amax(1).numpy() <= DEPTH
        np.testing.assert_allclose(coverage[shallow], near[budget]["oracle_coverage"][shallow], atol=1e-6)
        shared += int(shallow.sum())
    assert 0 < shared < len(BUDGETS) * len(contexts)
    assert (near[12]["oracle_coverage"] - capped[12]).max() > 0.01
    free = bench_of(target, entrants, tmp_path, depth=max(BUDGETS))
    for budget, coverage in oracle.capped_coverage(free, contexts, BUDGETS, 1.0).items():
        np.testing.assert_allclose(coverage, near[budget]["oracle_coverage"], atol=1e-6)


def test_the_targets_own_trees_miss_only_what_lies_below_the_limit(target, entrants, tmp_path):
    bench = bench_of(target, entrants, tmp_path, depth=2, width=VOCAB)
    contexts = bench.contexts(["near"], DEPTH, chain=max(BUDGETS))
    for parts in oracle.gap_cell(bench, "self", contexts, BUDGETS, 1.0).gaps.values():
        assert parts["missed"][:, :3].max() < 1e-6
    assert parts["missed"][:, 3].max() > 0.01
    free = bench_of(target, entrants, tmp_path, depth=max(BUDGETS), width=VOCAB)
    gaps = oracle.gap_cell(free, "self", contexts, BUDGETS, 1.0).gaps
    assert max(parts["missed"].max() + parts["spare"].max() for parts in gaps.values()) < 1e-6
    capped = oracle.capped_coverage(free, contexts, BUDGETS, 1.0)
    lines = lines_of("self", 1.0, gaps, capped, contexts.ids, Bootstrap(20))
    assert "nothing is missed" in advice(lines, "self", max(BUDGETS))[0]


def test_a_stopped_study_goes_on_from_its_cells(target, entrants, tmp_path, monkeypatch):
    run(target, entrants, tmp_path / "whole")
    grown, stop = [], StopFlag()
    original = oracle.grow_oracles

    def counted(*args):
        grown.append(1)
        if len(grown) == 3:
            stop.set("SIGTERM")
        return original(*args)

    monkeypatch.setattr(oracle, "grow_oracles", counted)
    with pytest.raises(Interrupted):
        run(target, entrants, tmp_path / "cut", stop=stop)
    assert not (tmp_path / "cut" / "study.json").exists()
    cells = sorted((tmp_path / "cut" / "cells").iterdir())
    assert len(cells) == 2  # both temperatures' capped oracles
    for cell in cells:
        if "token_ids" in cell.read_text():
            cell.write_text(cell.read_text().replace('"parents"', '"fathers"'))  # damaged: made again where needed
    run(target, entrants, tmp_path / "cut")
    assert len(grown) == 7  # cut off, two damaged, and the two that were never made
    names = ("study.json", "table.md", "gap.svg", "block-length.svg")
    assert all((tmp_path / "cut" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)
    run(target, entrants, tmp_path / "cut")
    assert len(grown) == 7


def test_which_drafters(target, entrants, tmp_path):
    assert oracle.drafters_of(bench_of(target, entrants, tmp_path)) == ["warm start", "near"]
    assert oracle.drafters_of(bench_of(target, entrants, tmp_path, drafters=["self"])) == ["self"]
    assert oracle.drafters_of(bench_of(target, entrants[:1], tmp_path)) == ["warm start"]
    with pytest.raises(InputError, match="no drafter 'nea', did you mean 'near'"):
        run(target, entrants, tmp_path, drafters=["near", "nea"])
    assert not (tmp_path / "cells").exists()  # said before anything is measured


def line_with(budget: int = 8, **missed: float) -> Line:
    some = Estimate(1.0)
    parts = {place: Estimate(missed.get(place, 0.0)) for place in PLACES}
    exits = dict.fromkeys(PLACES, 0.25)
    return Line("d", 0.5, budget, some, Estimate(2.5), some, some, some, some, some, parts, some, exits, 0.0)


@pytest.mark.parametrize(
    ("missed", "words"),
    [
        ({"root": 3, "horizon": 1}, "75 % of what it misses leaves at the root"),
        ({"root": 3, "branch": 1, "leaf": 3}, "57 % of what it misses leaves inside the tree, mostly at leaves"),
        ({"root": 3, "branch": 3, "leaf": 1}, "mostly where nodes have children"),
        ({"root": 1, "branch": 1, "horizon": 2}, "Draw deeper trees"),
    ],
)
def test_advice_names_where_most_is_missed(missed, words):
    sentences = advice([line_with(4, root=9), line_with(8, **missed)], "d", 6)
    assert len(sentences) == 1 and words in sentences[0] and "8 nodes" in sentences[0]
    assert "the best tree of at most 6 levels 2.50" in sentences[0]


def test_one_budget_is_still_a_plot():
    drawn = curve_plot([line_with()], 6)
    assert drawn.startswith("<svg") and "oracle of depth 6" in drawn
