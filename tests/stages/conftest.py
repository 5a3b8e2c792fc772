"""What the tests of `exittrain submit` and `status` share; other tests have a `context` of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_stand_ins import stand_ins, tiny_context

from exittrain.stages.context import StageContext


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return stand_ins(tmp_path, monkeypatch)


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return tiny_context(tmp_path)
