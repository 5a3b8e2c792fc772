"""The tracker: everything is in the JSONL, wandb never stops training, a resume leaves no line twice."""

from __future__ import annotations

import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from exittrain.runtime import tracker as module
from exittrain.runtime.tracker import Tracker, read_metrics


class FakeRun:
    def __init__(self, fail: bool) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[Any, ...]] = []
        self.fail = fail

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        self.metrics.append((*args, *kwargs.values()))

    def log(self, row: dict[str, Any]) -> None:
        if self.fail:
            raise ConnectionError("server is gone")
        self.logged.append(row)

    def finish(self, exit_code: int | None = None) -> None: ...  # wandb's own signature


def fake_wandb(monkeypatch: pytest.MonkeyPatch, run: FakeRun | Exception) -> None:
    def init(**kwargs: Any) -> FakeRun:
        if isinstance(run, Exception):
            raise run
        return run

    fake = types.SimpleNamespace(init=init, Settings=lambda **kwargs: kwargs)
    monkeypatch.setitem(sys.modules, "wandb", fake)


def test_own_step_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(fail=False)
    fake_wandb(monkeypatch, run)
    tracker = Tracker(tmp_path, "unit")
    tracker.log({"loss": 1.0}, step=5)
    tracker.log({"loss": 0.5}, step=3)
    tracker.finish()
    assert run.logged == [{"loss": 1.0, "global_step": 5}, {"loss": 0.5, "global_step": 3}]
    assert ("global_step",) in run.metrics and ("*", "global_step") in run.metrics
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [5, 3]


@pytest.mark.parametrize("broken", [FakeRun(fail=True), RuntimeError("no key"), OSError("disk")])
def test_wandb_failure_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: Any
) -> None:
    fake_wandb(monkeypatch, broken)
    tracker = Tracker(tmp_path, "unit")
    for step in range(3):
        tracker.log({"loss": float(step)}, step=step)
    tracker.finish()
    tracker.finish()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert capsys.readouterr().err.count("wandb is off") == 1


def test_resume_drops_what_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    first = Tracker(tmp_path, "unit", mode="disabled")
    for step in range(1, 6):
        first.log({"loss": 1.0 / step}, step=step)
    with open(first.path, "a") as file:
        file.write('{"step": 6, "lo')  # cut short by a kill
    second = Tracker(tmp_path, "unit", mode="disabled", resume_step=3)
    second.log({"loss": 0.0}, step=4)
    assert [row["step"] for row in read_metrics(first.path)] == [1, 2, 3, 4]
    assert read_metrics(first.path)[3]["loss"] == 0.0
    Tracker(tmp_path, "unit", mode="disabled")
    assert read_metrics(first.path) == []


def test_not_finite_becomes_null(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "unit", mode="disabled")
    tracker.log({"loss": math.nan, "ratio": math.inf, "word": "x"}, step=1)
    assert read_metrics(tracker.path) == [{"step": 1, "loss": None, "ratio": None, "word": "x"}]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_main", lambda: False)
    tracker = Tracker(tmp_path / "run", "unit")
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_wandb_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(os.environ, "WANDB_MODE", raising=False)
    tracker = Tracker(tmp_path, "unit", {"lr": 1.0})
    assert tracker._wandb is not None
    tracker.log({"loss": 1.0}, step=5)
    tracker.finish()
    assert "wandb is off" not in capsys.readouterr().err
    assert list((tmp_path / "wandb").glob("offline-run-*"))
