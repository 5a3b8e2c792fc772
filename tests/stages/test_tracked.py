"""What an evaluation found reaches wandb and TensorBoard: tables, trees, the page, and the numbers one looks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_run import make_run
from wandb_files import read_segment

from exittrain.config.load import load_recipe
from exittrain.errors import InputError
from exittrain.records.run_folder import RunFolder
from exittrain.runtime import tracker
from exittrain.runtime.parts import Part
from exittrain.runtime.wandb_run import read_identity, segments
from exittrain.stages import context as context_module
from exittrain.stages.context import StageContext
from exittrain.stages.report import run_report
from exittrain.stages.sources import check_sources
from exittrain.stages.tracked import find_results, track_results

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"


def context_of(folder: Path, *overrides: str) -> StageContext:
    return StageContext(load_recipe(str(TINY), list(overrides)), RunFolder(folder))


def test_everything_found(tmp_path: Path) -> None:
    found = find_results(make_run(tmp_path / "run"))
    assert {"eval/contexts/heldout/T1", "eval/decoding/heldout/T1/tev", "eval/verifiers/heldout/T1/token"} <= set(
        found.tables
    )
    assert "eval/speed" in found.tables and "report/page" not in found.pages
    rates = found.values["eval/heldout/T1/reach_kl/coverage"], found.values["eval/heldout/T1/token/coverage"]
    assert rates[0] > rates[1] > 0
    assert found.values["eval/heldout/T1/reach_kl/expected_block_length"] == pytest.approx(1 + rates[0])
    assert 0 < found.values["eval/heldout/T0.5/reach_kl/tree_efficiency"] < 1
    assert found.values["eval/heldout/T1/reach_kl/predraw/block_length_pooled"] > 1
    trees = found.pages["report/trees"]
    assert trees.count("<svg") == 3 and "https:" not in trees and "the chance that the target passes" in trees


@pytest.mark.usefixtures("real_wandb")
def test_wandb_has_tables_trees_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exittrain.runtime.wandb_run.SLACK_SECONDS", 120.0)  # a busy machine is not what is tested
    context = context_of(make_run(tmp_path / "run"), "tracking.wandb=offline")
    run_report(context)
    context.close()
    (segment,) = segments(context.run.path, read_identity(context.run.path).id)
    found = read_segment(segment)
    rows: dict[str, Any] = {key: value for row in found.history for key, value in row.items()}
    assert rows["eval/verifiers/heldout/T1/token/_type"] == rows["eval/contexts/heldout/T1/_type"] == "table-file"
    assert rows["report/trees/_type"] == rows["report/page/_type"] == "html-file"
    media = {path.suffix for path in (segment / "files/media").rglob("*") if path.is_file()}
    assert media == {".json", ".html"}
    assert found.summary["eval/heldout/T1/token/coverage"] > 0
    assert found.config["recipe"]["name"] == "tiny" and "git" in found.config


def test_tensorboard_has_values_and_tables(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    context = context_of(make_run(tmp_path / "run"), "tracking.tensorboard=true")
    run_report(context)
    context.run.finish("report", "key")
    events = context.run.path / "report/tensorboard"
    found = accumulator.EventAccumulator(str(events))
    found.Reload()
    assert "eval/heldout/T1/token/coverage" in found.Tags()["scalars"]
    assert "eval/contexts/heldout/T1/text_summary" in found.Tags()["tensors"]
    (file,) = events.iterdir()
    file.write_bytes(b"")  # TensorBoard's files are no result of the stage
    assert context.run.damage("report") is None and not (context.run.path / "wandb").exists()


def test_a_missing_tensorboard_stops_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    check_sources(context_of(tmp_path), ["target"])
    with pytest.raises(InputError, match=r"pip install 'exittrain\[tensorboard\]'"):
        check_sources(context_of(tmp_path, "tracking.tensorboard=true"), ["target"])


def test_one_process_writes_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 109: neither other ranks nor the parts of a stage do, nor anybody where it is disabled."""
    context = context_of(tmp_path, "tracking.wandb=offline")
    context.part = Part(0, 2)
    assert context.wandb() is None
    monkeypatch.setattr(context_module, "is_main", lambda: False)
    assert context_of(tmp_path, "tracking.wandb=offline").wandb() is None
    monkeypatch.undo()
    disabled = context_of(tmp_path)
    track_results(disabled)  # nothing is read: the folder has no evaluation
    disabled.close()
    assert list(tmp_path.iterdir()) == []
