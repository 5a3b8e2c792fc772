"""What a step's log says beside the losses: exit mass by depth, block length, throughput and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_heads import VOCAB, make_head, make_target
from tiny_training import make_rows

from exittrain.build.base import TreeShape
from exittrain.runtime.tracker import Tracker, read_metrics
from exittrain.stages.training import rates as module
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.loop import Hooks, Trainer, train
from exittrain.stages.training.rates import Rates
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import deepspeed_config

MASSES = [f"exit_mass/depth_{depth}" for depth in range(4)]


def lines_of(made: object, folder: Path) -> list[dict[str, float]]:
    hooks = Hooks(tracker=lambda step: Tracker(folder, "test", step))
    train(made.task, made.settings, folder, deepspeed_config("zero0"), hooks)  # type: ignore[attr-defined]
    return read_metrics(folder / "metrics.jsonl")


def test_the_exits_of_every_step_sum_to_one(make_task: Callable, tmp_path: Path) -> None:
    lines = lines_of(make_task({"steps": 3, "log_every": 1}, {"objective": "reach_kl"}), tmp_path)
    for line in lines:
        masses = [line[name] for name in MASSES]
        assert sum(masses) == pytest.approx(1, abs=1e-9) and min(masses) >= 0
        # Each step down that is taken is one accepted token: coverage is the mean depth of the leaving node.
        assert sum(depth * mass for depth, mass in enumerate(masses)) == pytest.approx(line["coverage"], abs=1e-9)
        assert line["expected_block_length"] == 1 + line["coverage"]
        assert 0 <= line["node_gradient_share"] <= 1
        assert all(value is None or math.isfinite(value) for value in line.values())


def test_sampled_trees_have_no_block_length_here(make_task: Callable, tmp_path: Path) -> None:
    """Coverage is no block length of theirs: a verifier's expectation is measured in the held-out evaluation."""
    loss = {"objective": "accept_lk", "builder": "sampled_iid", "shape": TreeShape(6, 3, branching="2-ary")}
    (first, *_) = lines_of(make_task({"steps": 1, "log_every": 1}, loss), tmp_path)
    assert "expected_block_length" not in first and "coverage" in first and MASSES[1] in first


def test_token_arms_have_no_trees(make_task: Callable, tmp_path: Path) -> None:
    (line,) = lines_of(make_task({"steps": 1, "log_every": 1}), tmp_path)
    assert not any(name.startswith("exit_mass") for name in line)
    assert {"time/tokens_per_second", "time/sequences_per_second", "memory/peak_gib"} <= set(line)
    assert "time/trees_per_second" not in line and line["memory/peak_gib"] > 0.05


def test_rates_are_of_all_steps_since_the_last_line() -> None:
    rates = Rates()
    rates.add(1.0, {"trained_tokens": 100.0, "sequences": 4.0})
    rates.add(3.0, {"trained_tokens": 300.0, "sequences": 4.0})
    taken = rates.take()
    assert (taken["time/step_seconds"], taken["time/tokens_per_second"], taken["time/sequences_per_second"]) == (
        3,
        100,
        2,
    )
    rates.add(2.0, {"trained_tokens": 20.0, "sequences": 2.0, "trees": 8.0})
    assert rates.take()["time/trees_per_second"] == 4
    assert set(rates.take()) == {"memory/peak_gib"}


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_tokens_are_counted_once_where_a_head_weights_its_rows(kind: str) -> None:
    """The loss is divided by the rows' weights, which are no number of tokens."""
    target = make_target()
    sequences = SequenceSet.from_rows(make_rows(3, vocab=VOCAB))
    settings = LoopSettings(steps=1, batch_size=3, micro_batch_size=2)
    task = DrafterTask(make_head(kind, target), target, sequences, settings, LossSettings())
    trainer = Trainer(task, settings, deepspeed_config("zero0"))
    sums, totals, _ = trainer.step(0)
    trainer.engine.close()
    trained = sum(int(mask.sum()) for mask in sequences.trained)
    assert totals["trained_tokens"] == trained and totals["tokens"] != trained
    numbers = task.metrics(0, sums, totals)
    assert numbers["num_tokens"] == trained and numbers["token_loss"] == sums["token_loss"] / totals["tokens"]


def test_memory_is_the_largest_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "world_size", lambda: 3)
    monkeypatch.setattr(module, "rank", lambda: 1)
    own = {}

    def reduce(given: dict[str, float]) -> dict[str, float]:
        own.update(given)
        return {"0": 0.5, "1": given["1"], "2": 99.0}

    monkeypatch.setattr(module, "all_reduce_sums", reduce)
    assert module.peak_memory() == 99.0
    assert own["0"] == own["2"] == 0 and own["1"] > 0
