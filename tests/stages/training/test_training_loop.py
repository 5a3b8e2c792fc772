"""The loop: exact resume, checkpoints that survive anything, stopping, empty batches, bad numbers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_training import make_rows

from exittrain.build.base import TreeShape
from exittrain.errors import InputError, Interrupted
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.records.files import read_json, write_json
from exittrain.runtime.signals import StopFlag
from exittrain.runtime.tracker import Tracker, read_metrics
from exittrain.stages.training import checkpoints
from exittrain.stages.training.checkpoints import latest_checkpoint
from exittrain.stages.training.loop import Hooks, Trainer, train
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import deepspeed_config

TREE_LOSS = {"objective": "reach_kl", "refresh_every": 4}
SAMPLED_LOSS = {
    "objective": "accept_lk",
    "refresh_every": 4,
    "builder": "sampled_iid",
    "shape": TreeShape(6, 3, branching="2-ary"),
}


class StopAfter(StopFlag):
    """Says stop once the loop has asked `count` times: it asks once a step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    @property
    def is_set(self) -> bool:
        self.count -= 1
        return self.count <= 0


def run(made: SimpleNamespace, folder: Path, stop: StopFlag | None = None, **hooks) -> object:
    tracker = lambda step: Tracker(folder, "test", step)  # noqa: E731
    hooks = {"tracker": tracker, "stop": stop or StopFlag(), **hooks}
    return train(made.task, made.settings, folder, deepspeed_config("zero0"), Hooks(**hooks))


def parameters(made: SimpleNamespace) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.drafter.model.module.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def without_clock(path: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in read_metrics(path)]


@pytest.mark.parametrize("loss", [{}, TREE_LOSS, SAMPLED_LOSS], ids=["token", "trees", "sampled"])
def test_resumed_twice_equals_uninterrupted(make_task: Callable, tmp_path: Path, loss: dict) -> None:
    """Parameters, learning rates and the log are equal to the last bit (cases.md 74, 75, 76)."""
    loop = {"steps": 9, "save_every": 100, "log_every": 1}
    whole = make_task(loop, loss)
    run(whole, tmp_path / "whole")
    for stop in (StopAfter(2), StopAfter(4), None):
        made = make_task(loop, loss)
        if stop is None:
            run(made, tmp_path / "parts")
        else:
            with pytest.raises(Interrupted, match="is saved"):
                run(made, tmp_path / "parts", stop)
    assert_equal(parameters(made), parameters(whole))
    assert without_clock(tmp_path / "parts/metrics.jsonl") == without_clock(tmp_path / "whole/metrics.jsonl")
    assert len(without_clock(tmp_path / "parts/metrics.jsonl")) == 9


def test_a_kill_loses_only_steps_not_numbers(make_task: Callable, tmp_path: Path) -> None:
    """Steps done after the last checkpoint are done again, and the log forgets them first."""
    loop = {"steps": 6, "save_every": 2, "log_every": 1}
    whole = make_task(loop, TREE_LOSS)
    run(whole, tmp_path / "whole")
    killed = make_task(loop, TREE_LOSS)

    class Killed(BaseException):
        pass

    original = killed.task.prepare

    def prepare(number: int) -> object:
        if number == 3:
            raise Killed
        return original(number)

    killed.task.prepare = prepare
    with pytest.raises(Killed):
        run(killed, tmp_path / "parts")
    made = make_task(loop, TREE_LOSS)
    run(made, tmp_path / "parts")
    assert_equal(parameters(made), parameters(whole))
    assert without_clock(tmp_path / "parts/metrics.jsonl") == without_clock(tmp_path / "whole/metrics.jsonl")


@pytest.fixture
def saved(make_task: Callable, tmp_path: Path) -> Path:
    run(make_task({"steps": 6, "save_every": 2}), tmp_path / "arm")
    return tmp_path / "arm"


def test_the_last_two_are_kept(saved: Path) -> None:
    assert sorted(p.name for p in saved.glob("step-*")) == ["step-000004", "step-000006"]
    assert latest_checkpoint(saved) == (saved / "step-000006", 6)


@pytest.mark.parametrize("name", ["model.pt", "rank-00000.pt", "COMPLETE.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "changed"])
def test_a_damaged_checkpoint_is_not_used(saved: Path, name: str, damage: str, capsys: pytest.CaptureFixture) -> None:
    file = saved / "step-000006" / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"{" + data[1:-1] + b"?")
    found = latest_checkpoint(saved)
    if damage == "changed" and name == "COMPLETE.json":
        assert found is not None
    else:
        assert found == (saved / "step-000004", 4)
        assert "step-000006" in capsys.readouterr().out


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=() if moment in (0, 3, 7) else pytest.mark.slow) for moment in range(8)]
)
def test_killed_while_saving(make_task: Callable, tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the save dies, the checkpoint before (or this one, whole) is what a resumed run takes (cases.md 78)."""
    folder = tmp_path / "arm"
    run(make_task({"steps": 2, "save_every": 2}), folder)
    calls = iter(range(100))

    class Killed(BaseException):
        pass

    def dying(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            if next(calls) == moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    targets = [(checkpoints.torch, "save"), (checkpoints.os, "replace"), (checkpoints.shutil, "rmtree")]
    targets += [(checkpoints, name) for name in ("fsync_tree", "record_of", "write_json", "fsync_folder")]
    with monkeypatch.context() as patch:
        for module, name in targets:
            patch.setattr(module, name, dying(getattr(module, name)))
        made = make_task({"steps": 6, "save_every": 2})
        with pytest.raises(Killed):
            run(made, folder)
    found = latest_checkpoint(folder)
    assert found is not None and found[1] in (2, 4)
    resumed, whole = make_task({"steps": 6, "save_every": 2}), make_task({"steps": 6, "save_every": 2})
    run(resumed, folder)
    run(whole, tmp_path / "whole")
    assert not list(folder.glob(".tmp-*"))
    # The first two steps ran under a two-step schedule; from there on both are one run.
    assert latest_checkpoint(folder)[1] == latest_checkpoint(tmp_path / "whole")[1] == 6


def test_the_newest_is_the_one_of_most_steps(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(state=lambda: {})
    for step in (999_998, 999_999, 1_000_000):
        checkpoints.save_checkpoint(tmp_path, step, engine, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    assert checkpoints.latest_checkpoint(tmp_path) == (tmp_path / "step-1000000", 1_000_000)


def test_a_file_that_a_rank_wrote_elsewhere_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node sees another folder of that name: nothing is marked as whole."""
    engine: Any = SimpleNamespace(state=lambda: {})
    monkeypatch.setattr(checkpoints, "world_size", lambda: 2)
    with pytest.raises(InputError, match=r"rank-00001\.pt is not there: all nodes must see"):
        checkpoints.save_checkpoint(tmp_path, 1, engine, {})
    assert not list(tmp_path.iterdir())


def test_nothing_unsafe_is_pickled(saved: Path) -> None:
    for file in (saved / "step-000006").glob("*.pt"):
        assert torch.load(file, weights_only=True)


def remark(saved: Path, **changes: object) -> None:
    mark = saved / "step-000006" / "COMPLETE.json"
    record = {**read_json(mark), **changes}
    write_json(mark, {name: value for name, value in record.items() if value is not None}, seal=True)


def test_another_number_of_ranks_is_said(saved: Path, capsys: pytest.CaptureFixture) -> None:
    """cases.md 80."""
    remark(saved, world_size=2)
    assert latest_checkpoint(saved) == (saved / "step-000006", 6)
    assert "step-000006 was written by 2 ranks, going on with 1" in capsys.readouterr().out


@pytest.mark.parametrize("version", [None, 3])
def test_another_format_is_refused(saved: Path, version: int | None) -> None:
    remark(saved, format=version)
    with pytest.raises(InputError, match=f"another format .{version or 1}, this version reads 2.*delete .*arm"):
        latest_checkpoint(saved)
    assert (saved / "step-000006" / "model.pt").exists()


def test_no_whole_checkpoint_is_an_error(saved: Path, make_task: Callable) -> None:
    """Never a silent start from zero: all are named, nothing is removed, and the user decides."""
    for name, file in (("step-000004", "rank-00000.pt"), ("step-000006", "model.pt")):
        (saved / name / file).write_bytes(b"?")
    for _ in range(2):
        with pytest.raises(InputError, match=r"none is whole .step-000006: model.pt .*step-000004: rank-00000.pt"):
            run(make_task({"steps": 6}), saved)
    shutil.rmtree(saved)
    assert latest_checkpoint(saved) is None


def test_sigterm_finishes_the_step(make_task: Callable, folder: Path) -> None:
    made = make_task({"steps": 50, "save_every": 100})
    stop = StopFlag()
    original = made.task.prepare

    def prepare(step: int) -> object:
        if step == 2:
            stop.set("SIGTERM")
        return original(step)

    made.task.prepare = prepare
    with pytest.raises(Interrupted, match="SIGTERM after step 3"):
        run(made, folder, stop)
    assert latest_checkpoint(folder) == (folder / "step-000003", 3)


def test_batches_without_trained_tokens_update_nothing(make_task: Callable, sequences: SequenceSet) -> None:
    """No NaN, no step of the optimiser (cases.md 6); beside a full micro-batch an empty one adds nothing (case 7)."""
    made = make_task({"batch_size": 2, "micro_batch_size": 1}, TREE_LOSS)
    trainer = Trainer(made.task, made.settings, deepspeed_config("zero0"))
    before = parameters(made)
    original = made.task.prepare
    empty = made.task._without_trees([], Sampling(), 0)
    made.task.prepare = lambda step: [empty, empty]
    sums, totals, _ = trainer.step(0)
    assert sums == {} and not any(totals.values())
    assert_equal(parameters(made), before)
    made.task.prepare = lambda step: [empty, *original(step), empty]
    assert all(math.isfinite(value) for value in trainer.step(0)[0].values())
    trainer.engine.close()
    alone = make_task({"batch_size": 2, "micro_batch_size": 1}, TREE_LOSS)
    trainer = Trainer(alone.task, alone.settings, deepspeed_config("zero0"))
    trainer.step(0)
    trainer.engine.close()
    assert_equal(parameters(made), parameters(alone))


def test_not_finite_stops_with_the_samples(make_task: Callable) -> None:
    """Nothing is updated and the samples are named (cases.md 72)."""
    made = make_task({"batch_size": 2, "micro_batch_size": 1})
    trainer = Trainer(made.task, made.settings, deepspeed_config("zero0"))
    before = parameters(made)
    batches = made.task.prepare(0)
    batches[1].token_hidden[0, 0] = 3e38
    made.task.prepare = lambda step: batches
    original = made.task.module._token_sum
    made.task.module._token_sum = lambda batch, rows: (
        original(batch, rows) * (float("nan") if batch is batches[1] else 1.0)
    )
    with pytest.raises(FloatingPointError, match=batches[1].sample_ids[0]) as caught:
        trainer.step(0)
    assert batches[0].sample_ids[0] not in str(caught.value)
    trainer.engine.close()
    assert_equal(parameters(made), before)


def test_an_infinite_gradient_updates_nothing(make_task: Callable) -> None:
    made = make_task()
    trainer = Trainer(made.task, made.settings, deepspeed_config("zero0"))
    before = parameters(made)
    next(made.drafter.model.module.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match="gradient's norm"):
        trainer.step(0)
    trainer.engine.close()
    assert_equal(parameters(made), before)


def test_the_best_evaluation_is_kept(make_task: Callable, folder: Path) -> None:
    scores = iter([1.0, 3.0, 2.0])
    saved: list[float] = []
    made = make_task({"steps": 6, "eval_every": 2})
    result = run(made, folder, evaluate=lambda: {"score": next(scores)}, save_best=lambda: saved.append(1.0))
    assert (result.best.score, result.best.step, len(saved)) == (3.0, 4, 2)


def test_learning_rate() -> None:
    settings = LoopSettings(steps=20, batch_size=1, lr=1.0, warmup_ratio=0.2, min_lr_ratio=0.1)
    rates = [settings.lr_at(step) for step in range(20)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0.1 < rates[-1] < 0.15
    constant = LoopSettings(steps=20, batch_size=1, lr=1.0, schedule="constant", warmup_ratio=0.0)
    assert {constant.lr_at(step) for step in range(20)} == {1.0}


def test_frozen_parameters_stay(make_task: Callable, folder: Path) -> None:
    made = make_task()
    made.drafter.model.embeddings.weight.requires_grad_(False)
    before = parameters(made)
    run(made, folder)
    after = parameters(made)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("embed" in name for name in moved)


def test_fewer_sequences_than_a_batch(make_task: Callable, folder: Path) -> None:
    run(make_task({"batch_size": 64, "micro_batch_size": 3}, TREE_LOSS, SequenceSet.from_rows(make_rows(2))), folder)


def test_a_finished_run_is_only_read(make_task: Callable, folder: Path) -> None:
    made, again = make_task(), make_task()
    run(made, folder)
    run(again, folder)
    assert_equal(parameters(again), parameters(made))
    shutil.rmtree(folder)


def test_autocast_keeps_float32_weights(make_task: Callable) -> None:
    """Half precision is for the arithmetic: losses move by rounding only, weights and resume stay as they are."""
    losses = {}
    for config in ("zero0", "zero0-autocast"):
        made = make_task(None, TREE_LOSS)
        trainer = Trainer(made.task, made.settings, deepspeed_config(config))
        sums, totals, _ = trainer.step(0)
        trainer.engine.close()
        losses[config] = sums["token_loss"] / totals["tokens"]
        assert {p.dtype for p in parameters(made).values()} == {torch.float32} and trainer.engine.plain
    assert losses["zero0"] != losses["zero0-autocast"] == pytest.approx(losses["zero0"], rel=0.02)


def test_autocast_leaves_the_labels_alone(
    make_task: Callable, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own logits, not rounded to half precision: near ties would change its argmax."""
    made = make_task(None, TREE_LOSS)
    trainer, head, labels = Trainer(made.task, made.settings, deepspeed_config("zero0-autocast")), target.head, []

    def kept(hidden: torch.Tensor) -> torch.Tensor:
        labels.append((hidden, head(hidden)))
        return labels[-1][1]

    monkeypatch.setattr(target, "head", kept)
    trainer.step(0)
    trainer.engine.close()
    assert labels and all(torch.equal(logits, head(hidden)) for hidden, logits in labels)
