"""The eval stage on tiny models: same bytes again, resumable cells, common prompts, measured beside expected."""

from __future__ import annotations

import json

import pytest
import torch

from exittrain.build.base import TreeShape
from exittrain.config.schema import EvalSection
from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError, Interrupted
from exittrain.models.target import TargetModel
from exittrain.runtime.signals import StopFlag
from exittrain.stages import evaluate as stage
from exittrain.stages.conversations.store import TokenSequence
from exittrain.stages.evaluation import decoding
from exittrain.stages.evaluation.schema import Metrics
from exittrain.stages.evaluation.tasks import EvalPrompt, Task, choose_contexts, heldout_task

VOCAB = 23
SHAPE = TreeShape(budget=6, depth=3, width=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def tiny(seed: int, layers: int = 2):
    model = make_causal_lm(VOCAB, 16, layers, 2, 32, max_positions=64, seed=seed)
    with torch.no_grad():
        model.output.weight.mul_(20.0)  # peaked enough that trees catch something
    return model


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny(0).module, name="tiny")


@pytest.fixture(scope="module")
def drafters(target) -> dict[str, Drafter]:
    torch.manual_seed(0)
    near = tiny(0)
    with torch.no_grad():
        for parameter in near.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return {"far": CausalDrafter(tiny(1, layers=1)), "near": CausalDrafter(near)}


def sequences(count: int = 8, length: int = 24, prompt: int = 6) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(5)
    mask = [0] * prompt + [1] * (length - prompt)
    return [
        TokenSequence(f"s{i}", torch.randint(1, VOCAB, (length,), generator=generator).tolist(), mask, prompt, "test")
        for i in range(count)
    ]


SETTINGS = EvalSection(
    tasks=["heldout"], temperatures=[1.0, 0.0], verifiers=["tev", "residual"], max_new_tokens=8, contexts=12,
    bootstrap=50, batch_size=2,
)  # fmt: skip


def run(target, drafters, folder, settings=SETTINGS, **kwargs) -> Metrics:
    return stage.evaluate_drafters(
        target, drafters, settings, folder / "out", shape=SHAPE, heldout=sequences(), **kwargs
    )


def files(folder) -> dict[str, bytes]:
    names = ("metrics.json", "rounds.jsonl", "contexts.parquet")
    return {name: (folder / "out" / name).read_bytes() for name in names}


def test_the_same_bytes_again_whatever_the_order_and_after_an_interruption(
    target, drafters, tmp_path, monkeypatch, capsys
):
    settings = SETTINGS.model_copy(update={"speed": False})  # the clock has tests of its own
    run(target, drafters, tmp_path / "a", settings)
    first = files(tmp_path / "a")
    Metrics.model_validate_json(first["metrics.json"])

    stop = StopFlag()
    made = []
    original = decoding.decode_cell

    def stops_after_two(*args, **kwargs):
        made.append(1)
        if len(made) == 3:
            stop.set("SIGTERM")
        return original(*args, **kwargs)

    monkeypatch.setattr(decoding, "decode_cell", stops_after_two)
    with pytest.raises(Interrupted):
        run(target, drafters, tmp_path / "b", settings, stop=stop)
    assert not (tmp_path / "b" / "out" / "metrics.json").exists()
    cells = sorted((tmp_path / "b" / "out" / "cells").iterdir())
    cells[0].write_text(cells[0].read_text()[:-40])  # a damaged cell is made again
    made.clear()
    run(target, drafters, tmp_path / "b", settings, stop=None)
    assert 30 <= len(made) <= 31  # of 4 batches x 2 drafters x 2 temperatures x 2 verifiers; 2 were whole
    assert files(tmp_path / "b") == first
    assert f"{cells[0]} is damaged" in capsys.readouterr().err

    reverse = dict(reversed(drafters.items()))
    metrics = run(target, reverse, tmp_path / "c", settings, control="far")
    before = Metrics.model_validate_json(first["metrics.json"])
    for old, new in zip(before.decode, metrics.decode, strict=True):
        assert {r.drafter: r for r in old.drafters} == {r.drafter: r for r in new.drafters}
        assert old.gains_pooled == new.gains_pooled


def test_numbers_agree_with_each_other(target, drafters, tmp_path):
    settings = SETTINGS.model_copy(update={"max_new_tokens": 32, "speed": False})
    metrics = run(target, drafters, tmp_path, settings)
    for table in metrics.contexts:
        assert table.num_contexts == 12 and table.num_sequences == 8
        best = table.oracle_block_length.value - 1
        for row in table.drafters:
            assert 0 < row.coverage <= best + 1e-6
            assert row.coverage == pytest.approx(sum(d.marginal for d in row.depths), abs=1e-5)
            assert row.tree_efficiency == pytest.approx(row.coverage / best, abs=1e-5)
    far, near = metrics.contexts[0].drafters
    assert near.coverage > far.coverage
    gain = metrics.contexts[0].gains[0]
    expected = 100 * (near.expected_block_length.value / far.expected_block_length.value - 1)
    assert gain.percent.value == pytest.approx(expected, abs=1e-4) and gain.drafter == "near"
    for table in metrics.decode:
        for row in table.drafters:
            assert row.attempted == row.finished == 8 and row.skipped == {}
            assert row.block_length_pooled.value == pytest.approx(row.accepted_pooled + 1, abs=1e-6)
            if table.temperature == 0:  # no randomness: measured and expected are the same number
                assert row.agrees
                assert row.expected_block_length_pooled.value == pytest.approx(row.block_length_pooled.value, abs=1e-4)
    at_zero = [t for t in metrics.decode if t.temperature == 0]
    assert at_zero[0].drafters == at_zero[1].drafters  # greedy: every verifier takes the same path
    for table in metrics.verifiers:
        assert table.longest == "equal"
        assert all(row.expected == pytest.approx(table.rows[0].expected, abs=1e-6) for row in table.rows)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    first = metrics.decode[0].drafters[0]
    mine = [r for r in rows if (r["drafter"], r["temperature"], r["verifier"]) == ("far", 1.0, "tev")]
    assert len(mine) == first.num_rounds
    assert sum(r["block_length"] for r in mine) / len(mine) == pytest.approx(first.block_length_pooled.value)


def test_long_prompts_are_skipped_and_counted(target, drafters, tmp_path):
    settings = SETTINGS.model_copy(
        update={"contexts": None, "temperatures": [1.0], "verifiers": ["tev"], "max_new_tokens": 50, "speed": False}
    )
    rows = sequences(3) + sequences(1, length=40, prompt=30)
    rows[-1] = TokenSequence("long", rows[-1].token_ids, rows[-1].loss_mask, 30, "test")
    metrics = stage.evaluate_drafters(target, drafters, settings, tmp_path, shape=SHAPE, heldout=rows)
    row = metrics.decode[0].drafters[0]
    assert (row.attempted, row.finished) == (4, 3)
    assert row.skipped == {"prompt too long for the models' positions": 1}
    assert metrics.decode[0].common_prompts == 3
    assert "1 skipped: prompt too long" in (tmp_path / "table.md").read_text()


def test_speed_is_in_timing_and_nowhere_else(target, drafters, tmp_path):
    settings = SETTINGS.model_copy(update={"contexts": None, "temperatures": [1.0], "verifiers": ["tev"]})
    run(target, drafters, tmp_path, settings)
    timing = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert [row["drafter"] for row in timing["speed"]] == ["far", "near"]
    for row in timing["speed"]:
        assert row["tokens"] == row["plain_tokens"] == 4 * 8  # the same counter on both sides
        ratio = row["tokens_per_second"] / row["plain_tokens_per_second"]
        assert row["speed_up"] == pytest.approx(ratio)
    assert set(timing["stages"][0]["milliseconds"]) == {"draft", "build", "score", "verify", "commit"}
    assert "second" not in (tmp_path / "out" / "metrics.json").read_text()


def test_benchmarks_get_contexts_from_the_targets_own_answers(target, drafters, tmp_path, monkeypatch):
    prompts = tuple(EvalPrompt(f"p{i}", tuple(range(1, 5 + i))) for i in range(3))
    monkeypatch.setattr(stage, "eval_tasks", lambda *_: [Task("bench", prompts, "made up")])
    settings = EvalSection(tasks=["bench"], contexts=9, decode=False, max_new_tokens=6, bootstrap=20)
    metrics = run(target, drafters, tmp_path, settings)
    (table,) = metrics.contexts
    assert (table.task, table.num_contexts, table.num_sequences) == ("bench", 9, 3)
    assert metrics.decode == [] and table.oracle_block_length is not None
    before = (tmp_path / "out" / "metrics.json").read_bytes()
    run(target, drafters, tmp_path, settings)
    assert (tmp_path / "out" / "metrics.json").read_bytes() == before


def test_contexts_are_spread_and_nested():
    task = heldout_task(sequences(), None)
    few, more = (choose_contexts(task.sequences, n, seed=0) for n in (8, 14))
    assert {c.sequence for c in few} == set(range(8))
    assert set(few) < set(more) and len(more) == 14
    for context in more:
        assert context.anchor + 1 < 24 and sequences()[context.sequence].loss_mask[context.anchor + 1] == 1
    assert len(choose_contexts(task.sequences, 10_000, seed=0)) == 8 * 18


def test_contexts_leave_room_for_the_deepest_tree(target, drafters, tmp_path):
    """Beyond the last position a model's numbers mean nothing: no tree, the oracle's chain included, may grow there."""
    short = TargetModel(tiny(0).module, name="short", verify=False)
    short.module.config.max_position_embeddings = 24
    settings = EvalSection(contexts=10_000, decode=False, oracle=True, bootstrap=200)
    args = {"shape": SHAPE, "heldout": sequences()}
    metrics = stage.evaluate_drafters(short, {"near": drafters["near"]}, settings, tmp_path / "a", **args)
    assert metrics.contexts[0].num_contexts == 8 * (24 - 1 - SHAPE.budget - 5 + 1)
    with pytest.raises(InputError, match="no context leaves room for trees in the target's 24 positions"):
        args["shape"] = TreeShape(budget=30)
        stage.evaluate_drafters(short, {"near": drafters["near"]}, settings, tmp_path / "b", **args)


def test_user_mistakes_name_the_remedy(target, drafters, tmp_path):
    with pytest.raises(InputError, match="held-out data"):
        stage.evaluate_drafters(target, drafters, EvalSection(tasks=["heldout"]), tmp_path)
    with pytest.raises(InputError, match=r"eval\.tasks"):
        stage.evaluate_drafters(target, drafters, EvalSection(contexts=5), tmp_path)
    with pytest.raises(InputError, match="control 'x'"):
        stage.evaluate_drafters(target, drafters, SETTINGS, tmp_path, control="x")
    with pytest.raises(InputError, match="at least one"):
        stage.evaluate_drafters(target, {}, SETTINGS, tmp_path)
    with pytest.raises(InputError, match="task heldout: no prompt leaves room for 60 new tokens"):
        run(target, drafters, tmp_path, SETTINGS.model_copy(update={"max_new_tokens": 60}))
    assert list(tmp_path.iterdir()) == []
