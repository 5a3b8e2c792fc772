"""kill -9 at moments of a save: the checkpoint before is whole, and going on ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import launch_ranks
from zero_checks import assert_bit_equal
from zero_scenarios import Scenario, trained

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("kill_worker.py")


def kill(folder: Path, config: str, moments: list[int]) -> None:
    asked = json.dumps({"folder": str(folder), "config": config, "moments": moments})
    assert launch_ranks(WORKER, asked, 1, timeout=500) == [0]
    expected = trained(Scenario(config, steps=6, save_every=2), folder / "whole")["parameters"]
    for moment, found in zip(moments, json.loads((folder / "found.json").read_text()), strict=True):
        assert found["signal"] == 9 and found["again"] == 0, moment
        assert found["left"] and found["left"][0] == "step-000002", moment
        assert_bit_equal(torch.load(folder / str(moment) / "end.pt", weights_only=True), expected)


@pytest.mark.parametrize("config", ["zero0", "zero3"])
def test_killed_at_every_moment_of_a_save(tmp_path: Path, config: str) -> None:
    """cases.md 78: one after the other, all that touches a file or lets the ranks meet."""
    kill(tmp_path, config, list(range(14)))
