"""Sums: of folders, of JSON documents, of YAML; a file is read once a process, but never when it may have changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from exittrain.errors import InputError
from exittrain.models import sums
from exittrain.models.folders import atomic_folder
from exittrain.records.files import check_lines, read_json, seal_lines, write_json


def made(tmp_path: Path) -> Path:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "deep").mkdir()
        (folder / "deep/weights").write_bytes(bytes(range(100)))
        (folder / "config.json").write_text("{}")
        (folder / "calibration.json").write_text("{}")
    return tmp_path / "model"


def damages(data: bytes) -> list[bytes]:
    """Cut short, and one bit flipped at a few places."""
    flipped = []
    for place in range(0, len(data), max(1, len(data) // 40)):
        for bit in (1, 16):
            other = bytearray(data)
            other[place] ^= bit
            flipped.append(bytes(other))
    return [b"", data[:1], data[: len(data) // 2], data[:-2], *flipped]


@pytest.mark.parametrize("name", ["deep/weights", "config.json"])
def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path)
    sums.check_folder(folder)
    whole = (folder / name).read_bytes()
    for data in damages(whole):
        (folder / name).write_bytes(data)
        with pytest.raises(InputError, match=f"{name} is not what exittrain wrote .*copy or make the folder again"):
            sums.check_folder(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing: copy or make"):
        sums.check_folder(folder)


def test_a_damaged_list_is_named_or_says_the_same(tmp_path: Path) -> None:
    folder = made(tmp_path)
    place, whole = folder / sums.FILES, (folder / sums.FILES).read_bytes()
    found = 0
    for data in damages(whole):
        place.write_bytes(data)
        try:
            sums.check_folder(folder)
        except InputError as error:
            assert str(place) in str(error) and "\n" not in str(error)
            found += 1
        else:  # a blank, or the name of the seal: the list itself is as it was
            assert json.loads(data)["files"] == json.loads(whole)["files"]
    assert found > 70


def test_what_comes_later_or_from_elsewhere_is_nobodys_damage(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "calibration.json").write_text("measured later")
    (folder / "notes.txt").write_text("added by hand")
    sums.check_folder(folder)
    sums.check_folder(shutil.copytree(folder, tmp_path / "copy"))
    (folder / "config.json").write_text("[]")
    (folder / sums.FILES).unlink()
    sums.check_folder(folder)


def test_sealed_documents_hold_or_are_named(tmp_path: Path) -> None:
    path, document = tmp_path / "a.json", {"steps": 1200, "ratio": 1 / 3, "name": "é", "rows": [[1, None], [2.5, True]]}
    write_json(path, document, seal=True)
    assert read_json(path) == document
    whole, found = path.read_bytes(), 0
    for data in damages(whole):
        path.write_bytes(data)
        try:
            read = read_json(path)
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            found += 1
        else:
            assert {name: read[name] for name in document} == document
    assert found > 70
    write_json(path, document)
    assert read_json(path) == document and sums.SEAL not in path.read_text()


def test_sealed_yaml_holds_or_is_named(tmp_path: Path) -> None:
    text, path = "name: tiny\nseed: 0\ntrain:\n  lr: 0.001\n", tmp_path / "recipe.yaml"
    whole = seal_lines(text)
    check_lines(whole, path)
    check_lines(text, path)
    for place in range(whole.index("\n") + 1, len(whole)):
        with pytest.raises(InputError, match=r"recipe\.yaml is not what exittrain wrote .*delete its first line"):
            check_lines(whole[:place] + "7" + whole[place + 1 :], path)
        with pytest.raises(InputError, match=r"recipe\.yaml is not what"):
            check_lines(whole[:place], path)


def test_a_settled_file_is_read_once_and_a_changed_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(sums, "sha256", lambda path: read.append(str(path)) or f"{len(read)}")
    path = tmp_path / "weights"
    path.write_bytes(b"1")
    assert [sums.known_sha256(path) for _ in range(2)] == ["1", "2"]  # just written: not to be trusted
    monkeypatch.setattr(sums, "SETTLED_SECONDS", -1.0)
    assert [sums.known_sha256(path) for _ in range(3)] == ["3", "3", "3"]
    os.utime(path, ns=(1, 1))
    assert sums.known_sha256(path) == "4"
    path.write_bytes(b"12")
    assert sums.known_sha256(path) == "5"
