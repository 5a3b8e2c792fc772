"""Two processes draw the sampled trees of one, and stop together (gradients of all stages: test_zero_ranks.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import launch_ranks

from exittrain.runtime.tracker import read_metrics
from exittrain.stages.training.checkpoints import COMPLETE

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("rank_worker.py")


def launch(folder: Path, world: int, config: str = "zero0", objective: str = "reach_kl", **asked: object) -> list[int]:
    """Exit codes of `world` ranks on a free port."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"loop": {}, **asked, "folder": str(folder), "config": config, "objective": objective})
    return launch_ranks(WORKER, text, world)


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = (torch.load(folder / "parameters.pt", weights_only=True) for folder in (found, expected))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5, msg=name)
    for one, other in zip(read_metrics(found / "metrics.jsonl"), read_metrics(expected / "metrics.jsonl"), strict=True):
        for name in ("step", "loss", "num_tokens", "num_trees", "coverage", "node_gradient_share", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_two_ranks_draw_the_trees_of_one(tmp_path: Path) -> None:
    asked = {"objective": "accept_lk", "builder": "sampled_iid"}
    assert launch(tmp_path / "one", 1, **asked) == [0]
    assert launch(tmp_path / "two", 2, **asked) == [0, 0]
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("config", ["zero0", "zero3"])
def test_a_signal_to_one_rank_stops_both(tmp_path: Path, config: str) -> None:
    """Both leave after the same step, with one checkpoint; going on gives the uninterrupted end (cases.md 81, 104)."""
    assert launch(tmp_path / "whole", 2, config) == [0, 0]
    assert launch(tmp_path / "parts", 2, config, stop_at=1) == [75, 75]
    (kept,) = (tmp_path / "parts").glob("step-*")
    assert kept.name == "step-000002" and (kept / COMPLETE).exists()
    assert launch(tmp_path / "parts", 2, config) == [0, 0]
    ours, theirs = (torch.load(tmp_path / f"{n}/parameters.pt", weights_only=True) for n in ("parts", "whole"))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
