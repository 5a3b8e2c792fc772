"""A stage is done only under its own key and with every byte it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from exittrain.errors import InputError
from exittrain.records.run_folder import RunFolder


def finished(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.begin("data", "k1")
    (run.stage("data") / "sub").mkdir()
    (run.stage("data") / "sub" / "x.bin").write_bytes(b"12345")
    (run.stage("data") / ".tmp-half").write_bytes(b"?")
    run.finish("data", "k1", {"rows": 3})
    return run


def test_done_under_its_key_only(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert run.is_done("data", "k1") and not run.is_done("data", "k2") and not run.is_done("collect", "k1")
    assert list(run.done("data")["files"]) == ["sub/x.bin"] and run.done("data")["rows"] == 3
    with pytest.raises(InputError, match="no finished 'collect' stage"):
        run.done("collect")


def test_damage_is_named(tmp_path: Path) -> None:
    run = finished(tmp_path)
    (run.stage("data") / "sub" / "x.bin").write_bytes(b"12346")
    assert not run.is_done("data", "k1")
    assert "x.bin" in str(run.damage("data"))
    (run.stage("data") / "sub" / "x.bin").unlink()
    assert "missing" in str(run.damage("data"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"key": "k1"}',
        "[]",
        '{"key": "k1", "schema_version": 1}',
        '{"key": "k1", "schema_version": 0, "files": {}}',
    ],
)
def test_unreadable_or_foreign_mark_is_not_done(tmp_path: Path, text: str) -> None:
    run = finished(tmp_path)
    (run.stage("data") / "DONE.json").write_text(text)
    assert not run.is_done("data", "k1")


def test_begin_keeps_own_work_and_drops_foreign(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.begin("collect", "k1")
    (run.stage("collect") / "shard").write_text("1")
    run.begin("collect", "k1")
    assert (run.stage("collect") / "shard").exists()
    run.begin("collect", "k2")
    assert not (run.stage("collect") / "shard").exists()


def test_stage_without_a_start_mark_is_foreign(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (run.stage("collect") / "stray").write_text("1")
    run.begin("collect", "k1")
    assert not (run.stage("collect") / "stray").exists()
