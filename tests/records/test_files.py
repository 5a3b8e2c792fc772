"""Atomic files and folders: whole or absent, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exittrain.errors import InputError
from exittrain.records import files


def test_json_is_sorted_strict_and_readable(tmp_path: Path) -> None:
    files.write_json(tmp_path / "deep" / "a.json", {"b": 1, "a": [1.5, None, "é"]})
    assert (
        tmp_path / "deep" / "a.json"
    ).read_text() == '{\n  "a": [\n    1.5,\n    null,\n    "é"\n  ],\n  "b": 1\n}\n'
    assert files.read_json(tmp_path / "deep" / "a.json") == {"b": 1, "a": [1.5, None, "é"]}
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "nan.json", {"x": float("nan")})
    assert not (tmp_path / "nan.json").exists()


def test_missing_and_truncated_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        files.read_json(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"a": 1')
    with pytest.raises(InputError, match=r"cut\.json is damaged or truncated"):
        files.read_json(tmp_path / "cut.json")


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_text(tmp_path / "a", "old")

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        files.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_kill_9_while_writing_leaves_whole_files(tmp_path: Path) -> None:
    code = (
        "import sys; from exittrain.records.files import write_bytes\n"
        "i = 0\n"
        "while True:\n"
        "    write_bytes(sys.argv[1], bytes([i % 251]) * 300_000); i += 1"
    )
    for wait in (0.05, 0.11, 0.17):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")])
        deadline = time.monotonic() + 20
        while not (tmp_path / "a").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        data = (tmp_path / "a").read_bytes()
        assert len(data) == 300_000 and len(set(data)) == 1
    files.clean_temporary(tmp_path)
    assert os.listdir(tmp_path) == ["a"]
