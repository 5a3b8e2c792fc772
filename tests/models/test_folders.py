"""Folders appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from exittrain.errors import InputError
from exittrain.models.folders import atomic_folder, standing
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


def test_two_writers_of_one_folder_never_mix(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "x").write_text("first")
        with pytest.raises(InputError, match="is being written by another process"), atomic_folder(tmp_path / "model"):
            pass
        (folder / "y").write_text("first")
    assert sorted(os.listdir(tmp_path / "model")) == [FILES, "x", "y"] and os.listdir(tmp_path) == ["model"]
    with atomic_folder(tmp_path / "model") as folder:  # nobody keeps it once it is done
        (folder / "x").write_text("second")
    assert sorted(os.listdir(tmp_path / "model")) == [FILES, "x"]


def test_what_a_killed_writer_left_is_put_right(tmp_path: Path) -> None:
    (tmp_path / ".model.partial" / "deep").mkdir(parents=True)
    (tmp_path / ".model.partial" / "half").write_text("half")
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "x").write_text("whole")
    assert standing(tmp_path / "model") == tmp_path / ".model.old"
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as folder:
        assert os.listdir(folder) == []
        raise RuntimeError
    assert os.listdir(tmp_path) == ["model"] and (tmp_path / "model" / "x").read_text() == "whole"
    assert standing(tmp_path / "model") == tmp_path / "model"
