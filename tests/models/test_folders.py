"""Folders appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exittrain.models.folders import atomic_folder


def test_atomic_folder_replaces_or_leaves(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("1")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("2")
        raise RuntimeError
    assert (tmp_path / "model" / "x").read_text() == "1"
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "y").write_text("3")
    assert os.listdir(tmp_path / "model") == ["y"]
    assert os.listdir(tmp_path) == ["model"]
