"""Eval on sampled trees and with `auto`: whose expectation a table shows, what was chosen, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from exittrain.build.base import TreeShape
from exittrain.config.schema import EvalSection
from exittrain.drafters.base import Drafter
from exittrain.drafters.calibration import CALIBRATION_FILE, Calibration, Choice
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.target import TargetModel
from exittrain.runtime.signals import StopFlag
from exittrain.stages import evaluate as stage
from exittrain.stages.context import calibrations
from exittrain.stages.conversations.store import TokenSequence
from exittrain.stages.evaluation import contexts as ctx
from exittrain.stages.evaluation import tables
from exittrain.stages.evaluation.results import Comparison
from exittrain.stages.evaluation.setup import Entrant, Setup
from exittrain.stages.evaluation.tasks import choose_contexts, heldout_task
from exittrain.verify.registry import get_verifier

VOCAB = 19
SHAPE = TreeShape(budget=6, depth=3, width=3, branching="2-ary")
SETTINGS = EvalSection(tasks=["heldout"], max_new_tokens=8, contexts=24, bootstrap=50, batch_size=4, speed=False)
WARMER = {"temperatures": [1.5]}  # a law that is spread out: verifiers differ


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def tiny(seed: int, layers: int = 2):
    model = make_causal_lm(VOCAB, 16, layers, 2, 32, max_positions=64, seed=seed)
    with torch.no_grad():
        model.output.weight.mul_(12.0)
    return model


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny(0).module, name="tiny", verify=False)


@pytest.fixture(scope="module")
def drafters() -> dict[str, Drafter]:
    torch.manual_seed(0)
    near = tiny(0)
    with torch.no_grad():
        for parameter in near.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return {"far": CausalDrafter(tiny(1, layers=1)), "near": CausalDrafter(near)}


def sequences(count: int = 8) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(5)
    mask = [0] * 6 + [1] * 18
    rows = [torch.randint(1, VOCAB, (24,), generator=generator).tolist() for _ in range(count)]
    return [TokenSequence(f"s{i}", row, mask, 6, "test") for i, row in enumerate(rows)]


def run(target, drafters, folder, **changes):
    settings = SETTINGS.model_copy(update={**WARMER, **changes})
    return stage.evaluate_drafters(target, drafters, settings, folder, shape=SHAPE, heldout=sequences())


@pytest.fixture(scope="module")
def places() -> ctx.ContextSet:
    task = heldout_task(sequences(), None)
    return ctx.ContextSet.of(task.sequences, choose_contexts(task.sequences, 24, 0))


@pytest.mark.parametrize(
    ("builder", "rules"),
    [
        ("best_first", ["tev", "predraw", "residual"]),
        ("sampled_iid", ["tev", "residual", "rrs", "traversal"]),
        ("sampled_wor", ["tev", "rrs_wor", "traversal"]),
    ],
)
def test_expectations_side_by_side_are_each_trees_own(target, drafters, places, builder, rules) -> None:
    """All trees at once give the numbers of the plain form, tree by tree, and the verdicts' means lie around them."""
    sampling = Sampling(1.5)
    found = ctx.measure_verifiers(
        target, drafters["near"], places, rules, builder, SHAPE, sampling, 60, 3, StopFlag(), "verifiers"
    )
    plain: dict[str, list[float]] = {rule: [] for rule in rules}
    for _, draft, logits in ctx._grown(target, drafters["near"], places, builder, SHAPE, sampling, 3):
        probs = process_logits(logits, sampling).exp()
        for row, tree in enumerate(draft.trees.trees()):
            rows = None if draft.draft_rows is None else draft.draft_rows.of_tree(row, tree.num_nodes)
            for rule in rules:
                part = probs[row, : tree.num_nodes + 1]
                plain[rule].append(float(get_verifier(rule).expected_block_length(tree, part, rows)))
    for rule in rules:
        assert found.expected[rule] == pytest.approx(plain[rule], abs=1e-5)
        assert abs((found.measured[rule] - found.expected[rule]).mean()) < 0.08  # 1,440 verdicts each
    if builder != "best_first":
        assert abs(found.expected["traversal"] - found.expected["tev"]).max() > 0.01  # or the test says nothing


def test_fixed_contexts_of_sampled_trees_say_whose_expectation_it_is(target, drafters, tmp_path) -> None:
    metrics = run(target, drafters, tmp_path, builder="sampled_wor", verifiers=["traversal", "tev", "rrs_wor"])
    assert (metrics.settings.builder, metrics.settings.branching) == ("sampled_wor", "2-ary")
    (table,) = metrics.contexts
    assert table.verifier == "traversal" and table.num_contexts == 24
    for row in table.drafters:
        assert row.tree_efficiency is None
        assert row.expected_block_length.value == pytest.approx(1 + row.coverage, abs=1e-6)
        assert row.coverage == pytest.approx(sum(d.marginal for d in row.depths), abs=1e-5)
    printed = tables.context_table(metrics, table)
    assert printed.columns[:2] == ("drafter", "expected (traversal)") and "tree efficiency" not in printed.columns
    assert "Verifier traversal" in printed.note and "sampled_wor" in printed.note
    assert printed.rows[-1][0] == "oracle (best fixed trees of this budget)"
    (sides,) = metrics.verifiers  # of the control's trees at the same contexts
    same = {row.verifier: row.expected for row in sides.rows}
    assert same["traversal"] == pytest.approx(table.drafters[0].expected_block_length.value, abs=1e-6)
    assert [decoded.verifier for decoded in metrics.decode] == ["traversal", "tev", "rrs_wor"]
    for decoded in metrics.decode:
        for row in decoded.drafters:
            assert row.agrees is not False and row.expected_block_length_pooled is not None
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    gaps = {rule: [abs(r["expected_block_length"] - 1 - r["coverage"]) for r in lines if r["verifier"] == rule]
            for rule in ("traversal", "tev")}  # fmt: skip
    assert max(gaps["tev"]) < 1e-6 < 0.01 < max(gaps["traversal"])
    assert "expected (same rounds)" in tables.decode_table(metrics, metrics.decode[0]).columns


def test_a_context_of_its_own_draws_the_same_tree(target, drafters, places) -> None:
    """Whatever lies beside it: so cells of more contexts, other groups and other drafters stay comparable."""
    args = ("rrs", "sampled_iid", SHAPE, Sampling(1.5), 3, StopFlag(), "x")
    whole = ctx.measure_sampled(target, drafters["near"], places, *args)
    alone = ctx.measure_sampled(target, drafters["near"], places.select(torch.tensor([7, 2])), *args)
    assert alone.reach == pytest.approx(whole.reach[[7, 2]], abs=1e-5)
    assert (whole.reach[:, 0] > 0).all() and (whole.reach[:, 1:] <= whole.reach[:, :-1] + 1e-12).all()


def test_biased_pairs_are_refused_before_anything_runs(target, drafters, tmp_path) -> None:
    for changes, expected in (
        ({"verifiers": ["tev", "traversal"]}, "'traversal', which is biased on trees of 'best_first'"),
        ({"verifiers": ["rrs"], "builder": "sampled_wor"}, "set 'eval.builder' to sampled_iid"),
        ({"verifiers": ["block"], "builder": "sampled_wor"}, "for chains alone"),
        ({"builder": "sampled_wor", "branching": "eagle"}, "EAGLE's tree has 25 nodes and depth 5"),
        ({"builder": "sampled_wor", "branching": [[0], [2]]}, "elder sibling"),
        ({"builder": "static", "branching": "bushy"}, "no static shape 'bushy'"),
    ):
        with pytest.raises(InputError, match=expected) as caught:
            run(target, drafters, tmp_path / "out", **changes)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no builder 'oracle'"):
        stage.evaluate_drafters(target, drafters, SETTINGS, tmp_path, builder="oracle", heldout=sequences())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folders(target, drafters, tmp_path) -> dict[str, Path]:
    for name, drafter in drafters.items():
        drafter.save(tmp_path / name)
    return {name: tmp_path / name for name in drafters}


CHOSEN = Choice(1.5, 5, "sampled_wor", 2, 2, "2-ary", "traversal", 2.0, None, None, None)


def calibrate(target, folder: Path, *choices: Choice, **changes) -> None:
    (folder / CALIBRATION_FILE).unlink(missing_ok=True)
    fingerprint = load_drafter(folder, target).fingerprint()
    known = Calibration(target.fingerprint(), fingerprint, 0, 1.0, "here", choices or (CHOSEN,))
    replace(known, **changes).save(folder)


def evaluate(target, folders, out, *verifiers: str):
    settings = SETTINGS.model_copy(update={**WARMER, "verifiers": list(verifiers), "contexts": None, "speed": True})
    entrants = [Entrant(name, partial(load_drafter, folder, target), folder=folder) for name, folder in folders.items()]
    pairs = (Comparison("near", "far", "as trained"),)
    setup = Setup("auto", settings, "best_first", SHAPE, Sampling(), 0, pairs, "far")
    return stage.evaluate(target, entrants, setup, [heldout_task(sequences(), None)], out, StopFlag())


def test_auto_decodes_as_each_calibration_says(target, folders, tmp_path) -> None:
    calibrate(target, folders["near"])
    calibrate(
        target, folders["far"], replace(CHOSEN, builder="static", verifier="tev", branching=((0,), (1,)), depth=1)
    )
    metrics = evaluate(target, folders, tmp_path / "out", "tev", "auto")
    fixed, chosen = metrics.decode
    assert (fixed.verifier, chosen.verifier) == ("tev", "auto") and len(chosen.gains_pooled) == 1
    assert all(row.served is None for row in fixed.drafters)
    far, near = chosen.drafters
    assert (near.served.verifier, near.served.builder, near.served.budget) == ("traversal", "sampled_wor", 5)
    assert far.served.branching == [[0], [1]]
    printed = tables.decode_table(metrics, chosen)
    assert printed.columns[-1] == "chosen by its calibration"
    assert printed.rows[1][-1] == "traversal on sampled_wor (2-ary), at most 5 nodes of depth 2"
    assert "chosen by its calibration" not in tables.decode_table(metrics, fixed).columns
    assert max(depth.depth for depth in near.depths) <= 2 and max(depth.depth for depth in far.depths) == 1
    named = stage.evaluate_drafters(
        target, {"near": load_drafter(folders["near"], target)},
        SETTINGS.model_copy(update={**WARMER, "verifiers": ["traversal"], "contexts": None, "builder": "sampled_wor"}),
        tmp_path / "named", shape=CHOSEN.shape, heldout=sequences(),
    )  # fmt: skip
    assert named.decode[0].drafters[0] == near.model_copy(update={"served": None})
    timing = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert [(row["drafter"], row["verifier"]) for row in timing["speed"]] == [("far", "tev"), ("near", "tev")]


def test_auto_leaves_out_who_has_no_calibration_and_says_so(target, folders, tmp_path) -> None:
    calibrate(target, folders["near"])
    metrics = evaluate(target, folders, tmp_path / "out", "auto")
    (table,) = metrics.decode
    assert [row.drafter for row in table.drafters] == ["near"] and table.gains_pooled == []
    assert "Without a calibration, so not here: far." in tables.decode_table(metrics, table).note
    timing = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert [(row["drafter"], row["verifier"]) for row in timing["speed"]] == [("near", "auto")]


def test_auto_is_refused_before_anything_runs(target, folders, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"none of far, near has a calibration: measure it with .* --suite verifiers"):
        evaluate(target, folders, out, "tev", "auto")
    for changes, expected in (
        ({"top_p": 0.9}, "beside near is of top_k 0 and top_p 0.9, not 0 and 1"),
        ({"target_fingerprint": "x"}, "beside near is of another target"),
        ({"choices": (replace(CHOSEN, budget=30),)}, "at most 6 nodes: the smallest budget is 30"),
    ):
        calibrate(target, folders["near"], **changes)
        with pytest.raises(InputError, match=expected):
            evaluate(target, folders, out, "auto")
    (folders["near"] / CALIBRATION_FILE).write_text("{")
    with pytest.raises(InputError, match=r"calibration\.json cannot be used"):
        evaluate(target, folders, out, "auto")
    assert not out.exists()
    calibrate(target, folders["near"], drafter_fingerprint="x")
    with pytest.raises(InputError, match="of other weights"):
        evaluate(target, folders, out, "auto")


def test_a_new_calibration_makes_a_new_eval_where_auto_goes_by_it(tmp_path) -> None:
    assert calibrations(tmp_path) == {}
    last = tmp_path / "train" / "arm" / "last"
    known = Calibration("t", "d", 0, 1.0, "here", (CHOSEN,))
    known.save(last)
    known.save(tmp_path / "warmup" / "drafter")
    before = calibrations(tmp_path)
    assert list(before) == ["train/arm/last/calibration.json", "warmup/drafter/calibration.json"]
    replace(known, hardware="there").save(last)
    assert calibrations(tmp_path) != before
