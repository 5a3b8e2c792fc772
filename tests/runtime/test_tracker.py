"""The tracker: everything is in the JSONL, a resume leaves no line twice, wandb and TensorBoard show the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from exittrain.errors import InputError
from exittrain.runtime import tracker as module
from exittrain.runtime.tracker import Tracker, check_tensorboard, read_metrics, write_page


class Rows:
    """Stands for a WandbRun."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int]] = []

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((row, step))


def test_wandb_gets_every_line_named_by_stage_and_arm(tmp_path: Path) -> None:
    rows = Rows()
    tracker = Tracker(tmp_path, "train/reach_kl", wandb=rows)  # type: ignore[arg-type]
    tracker.log({"loss": 1.0, "lr": math.nan}, step=5)
    tracker.log({"eval/score": 1.5}, step=3)
    tracker.finish()
    assert rows.rows == [
        ({"train/reach_kl/loss": 1.0, "train/reach_kl/lr": None}, 5),
        ({"train/reach_kl/eval/score": 1.5}, 3),
    ]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [5, 3]


def test_resume_drops_what_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    first = Tracker(tmp_path, "unit")
    for step in range(1, 6):
        first.log({"loss": 1.0 / step}, step=step)
    with open(first.path, "a") as file:
        file.write('{"step": 6, "lo')  # cut short by a kill
    second = Tracker(tmp_path, "unit", 3)
    second.log({"loss": 0.0}, step=4)
    assert [row["step"] for row in read_metrics(first.path)] == [1, 2, 3, 4]
    assert read_metrics(first.path)[3]["loss"] == 0.0
    Tracker(tmp_path, "unit")
    assert read_metrics(first.path) == []


def test_not_finite_becomes_null(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "unit")
    tracker.log({"loss": math.nan, "ratio": math.inf, "word": "x"}, step=1)
    assert read_metrics(tracker.path) == [{"step": 1, "loss": None, "ratio": None, "word": "x"}]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_main", lambda: False)
    rows = Rows()
    tracker = Tracker(tmp_path / "run", "unit", wandb=rows, tensorboard=True)  # type: ignore[arg-type]
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    assert not (tmp_path / "run").exists() and rows.rows == []


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What a reader of TensorBoard sees."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_through_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = Tracker(tmp_path, "unit", tensorboard=True)
    for step in range(1, 6):
        first.log({"loss": float(step), "lr": None}, step=step)  # never finished: killed after step 5
    second = Tracker(tmp_path, "unit", 3, tensorboard=True)
    for step in range(4, 8):
        second.log({"loss": 10.0 * step}, step=step)
    second.finish()
    assert points(tmp_path / "tensorboard") == {"loss": [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60), (7, 70)]}
    anew = Tracker(tmp_path, "unit", tensorboard=True)
    anew.log({"loss": 0.5}, step=1)
    anew.finish()
    assert points(tmp_path / "tensorboard") == {"loss": [(1, 0.5)]}


def test_a_failing_tensorboard_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    tracker = Tracker(tmp_path, "unit", tensorboard=True)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    tracker._writer.add_scalar = full
    for step in range(3):
        tracker.log({"loss": 1.0}, step=step)
    tracker.finish()
    assert len(read_metrics(tracker.path)) == 3
    assert capsys.readouterr().err.count("TensorBoard is off from here on (OSError") == 1


def test_results_in_tensorboard_replace_earlier_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for value in (1.0, 2.0):
        write_page(tmp_path / "tensorboard", {"eval/T1/block_length": value}, {"eval/table": "| a |\n|---|\n| 1 |"})
    assert points(tmp_path / "tensorboard") == {"eval/T1/block_length": [(0, 2.0)]}


def test_a_missing_tensorboard_is_told_up_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    check_tensorboard(False)
    with pytest.raises(InputError, match=r"pip install 'exittrain\[tensorboard\]'"):
        check_tensorboard(True)
