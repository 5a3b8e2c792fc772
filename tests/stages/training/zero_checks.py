"""What the tests of ZeRO stages share: running scenarios in several ranks, and comparing what came out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch_ranks
from zero_scenarios import Scenario

WORKER = Path(__file__).with_name("zero_worker.py")


def in_ranks(folder: Path, world: int, *asked: tuple[str, Scenario]) -> dict[str, Any]:
    """What `world` ranks found of these scenarios ("first_step" or "trained")."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"folder": str(folder), "scenarios": [(what, asdict(scenario)) for what, scenario in asked]})
    assert launch_ranks(WORKER, text, world) == [0] * world
    found: dict[str, Any] = torch.load(folder / f"found-{world}.pt", weights_only=True)
    return found


def with_share(numbers: dict[str, float]) -> dict[str, float]:
    """The two parts of the gradient by their share: what they are scaled by cancels there, and is nobody's concern."""
    parts = {name: numbers.get(name, 0.0) ** 0.5 for name in ("token_gradient", "node_gradient")}
    rest = {name: value for name, value in numbers.items() if name not in parts}
    return {**rest, "share": parts["node_gradient"] / sum(parts.values())}


def assert_equal_steps(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, counts and every gradient within 1e-6 of the largest (float32)."""
    ours, theirs = (with_share(step["numbers"]) for step in (found, expected))
    assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-9)
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    assert largest > 0 and found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert float((found["gradients"][name] - gradient).abs().max()) <= 1e-6 * largest, name


def assert_bit_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Adam divides by small numbers: what another order of sums does to a gradient is magnified."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=name)
