"""Folders appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from exittrain.models.folders import atomic_folder
from exittrain.models.sums import FILES


def test_atomic_folder_replaces_or_leaves(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("1")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("2")
        raise RuntimeError
    assert (tmp_path / "model" / "x").read_text() == "1"
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "y").write_text("3")
    assert sorted(os.listdir(tmp_path / "model")) == [FILES, "y"]
    assert os.listdir(tmp_path) == ["model"]


def test_the_old_folder_stays_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("1")
    rename = os.rename

    def full(source: Path, destination: Path) -> None:
        if Path(source).name.endswith(".partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"), atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("2")
    assert os.listdir(tmp_path) == ["model"] and (tmp_path / "model" / "x").read_text() == "1"
