"""Tiny models and sequences to train on, and a loop that records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_training import SHAPE, VOCAB, make_drafter, make_rows

from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXITTRAIN_PROGRESS", "0")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> TargetModel:
    made = make_causal_lm(VOCAB, 32, 2, 2, 64, seed=1)
    with torch.no_grad():  # far from uniform, so that trees and losses say something
        made.module.lm_head.weight.mul_(20)
    return TargetModel(made.module.requires_grad_(False), None, "target", verify=False)


@pytest.fixture
def sequences() -> SequenceSet:
    return SequenceSet.from_rows(make_rows())


@pytest.fixture
def make_task(target: TargetModel, sequences: SequenceSet) -> Callable[..., SimpleNamespace]:
    """A fresh drafter, its task and settings: `make_task(loop={...}, loss={...})`."""

    def make(loop: dict | None = None, loss: dict | None = None, data: SequenceSet | None = None) -> SimpleNamespace:
        drafter = make_drafter()
        settings = LoopSettings(**{"steps": 6, "batch_size": 4, "lr": 1e-2, "warmup_ratio": 0.3, **(loop or {})})
        losses = LossSettings(**{"shape": SHAPE, "anchors_per_sequence": 3, **(loss or {})})
        task = DrafterTask(drafter, target, data or sequences, settings, losses)
        return SimpleNamespace(drafter=drafter, task=task, settings=settings, loss=losses)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arm"
