"""`exittrain sync` against a server: segments of several lives become one history, once; failures lose nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from wandb_files import life, read_segment
from wandb_server import KEY, Server, serving

from exittrain.cli.main import app
from exittrain.errors import InputError
from exittrain.records.files import write_text
from exittrain.runtime.lock import hold
from exittrain.runtime.wandb_run import AXIS, SEGMENT, WandbRun, identity_of, is_sent, keep_identity, segments
from exittrain.stages import sync as module

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"


def sync(*arguments: str) -> str:
    """What it prints; its InputError is raised."""
    result = CliRunner().invoke(app, ["sync", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, real_wandb: None) -> Any:
    with serving() as found:
        reach(monkeypatch, found.url)
        yield found


def reach(monkeypatch: pytest.MonkeyPatch, url: str, key: str = KEY) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", key)


def id_of(folder: Path) -> str:
    return identity_of(folder, "unit", None, "tests").id


def here(folder: Path, first: int, last: int) -> None:
    """A life in this process."""
    run = WandbRun(folder, identity_of(folder, "unit", None, "tests"), "offline", {})
    for step in range(first, last):
        run.log({"warmup/loss": 1 / step}, step)
    run.close()
    assert run.error is None


def made_up(folder: Path, *times: str) -> list[Path]:
    """Segments that nobody has written."""
    for moment in times:
        write_text(folder / "wandb" / f"{SEGMENT}{moment}-{id_of(folder)}" / f"run-{id_of(folder)}.wandb", "")
    return segments(folder, id_of(folder))


def test_what_is_pending(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no wandb run"):
        sync(str(tmp_path))
    first, second, third = made_up(tmp_path, "20260102_000000", "20251231_000000", "20260101_000000")
    assert [path.name.split("-")[2][:8] for path in (first, second, third)] == ["20251231", "20260101", "20260102"]
    write_text(first / "run-x.wandb.synced", "")
    found = module.pending(tmp_path)
    assert (found.sent, found.left, found.live) == ([first], [second, third], None)
    assert found.command == ["wandb", "sync", str(second), str(third)]
    with hold(tmp_path):
        found = module.pending(tmp_path)
    assert (found.sent, found.left, found.live) == ([first], [second], third)


def test_nothing_to_upload(tmp_path: Path) -> None:
    (segment,) = made_up(tmp_path, "20260101_000000")
    write_text(segment / "run.wandb.synced", "")
    assert "nothing to upload: 1 segments are in wandb" in sync(str(tmp_path))


def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, "http://127.0.0.1:9")
    made_up(tmp_path, "20260101_000000")
    with pytest.raises(InputError, match=r"http://127.0.0.1:9 does not answer .*nothing is lost"):
        sync(str(tmp_path))


def test_segments_become_one_history_once(tmp_path: Path, server: Server) -> None:
    """Two lives; the steps that were done again are there twice, in order, none is dropped (cases.md 108)."""
    for first, last in ((1, 4), (3, 6)):
        here(tmp_path, first, last)
    assert f"uploaded 2 segments as run {id_of(tmp_path)}" in sync(str(tmp_path))
    assert [row[AXIS] for row in server.history(id_of(tmp_path))] == [1, 2, 3, 3, 4, 5]
    assert "nothing to upload: 2 segments" in sync(str(tmp_path))
    here(tmp_path, 6, 8)
    assert "uploaded 1 segments" in sync(str(tmp_path))
    assert [row[AXIS] for row in server.history(id_of(tmp_path))] == [1, 2, 3, 3, 4, 5, 6, 7]
    assert [row["_step"] for row in server.history(id_of(tmp_path))] == list(range(8))
    assert list(server.files) == [id_of(tmp_path)]


@pytest.mark.slow
def test_lives_become_one_history(tmp_path: Path, server: Server) -> None:
    """In processes of their own, one of them ended by kill -9."""
    for first, last in ((1, 4), (3, 6)):
        life(tmp_path, first, last).communicate(timeout=120)
    process = life(tmp_path, 5, 9, "wait")
    process.stdout.readline()
    deadline = time.monotonic() + 60
    while not (len(segments(tmp_path, id_of(tmp_path))) == 3 and len(rows_of(tmp_path, 2)) == 4):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.kill()
    process.communicate()
    life(tmp_path, 8, 10).communicate(timeout=120)
    assert f"uploaded 4 segments as run {id_of(tmp_path)}" in sync(str(tmp_path))
    history = server.history(id_of(tmp_path))
    assert [row[AXIS] for row in history] == [1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 8, 9]
    assert [row["warmup/loss"] for row in history] == [pytest.approx(1 / row[AXIS]) for row in history]
    assert [row["_step"] for row in history] == list(range(12))
    assert list(server.files) == [id_of(tmp_path)]
    assert "nothing to upload: 4 segments" in sync(str(tmp_path))


def rows_of(folder: Path, index: int) -> list[dict[str, Any]]:
    found = segments(folder, id_of(folder))
    return read_segment(found[index]).history if len(found) > index else []


@pytest.mark.slow
@pytest.mark.usefixtures("real_wandb")
def test_a_refused_key_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(tmp_path, 1, 4)
    with serving(accept=False) as server:
        reach(monkeypatch, server.url)
        with pytest.raises(InputError, match="1 of 1 segments are not in wandb"):
            sync(str(tmp_path))
        reach(monkeypatch, server.url, "")
        monkeypatch.delenv("WANDB_API_KEY")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        with pytest.raises(InputError, match=r"No API key configured"):
            sync(str(tmp_path))
    assert not any(map(is_sent, segments(tmp_path, id_of(tmp_path))))
    with serving() as server:
        reach(monkeypatch, server.url)
        sync(str(tmp_path))
        assert len(server.history(id_of(tmp_path))) == 3


def test_rebuilt_from_the_local_truth(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are lost: a clean run under a new id, each step once, stages in order; the old one is not sent."""
    monkeypatch.setattr(module, "find_results", None)
    old = identity_of(tmp_path, "unit", "team", "tests")
    (lost,) = made_up(tmp_path, "20260101_000000")
    write_text(tmp_path / "recipe.yaml", TINY.read_text())
    write_text(tmp_path / "train/token/metrics.jsonl", '{"loss": 2.0, "step": 1}\n{"loss": null, "lr": 1, "step": 2}\n')
    write_text(tmp_path / "train/exit/metrics.jsonl", '{"eval/score": 1.5, "step": 2}\n')
    write_text(tmp_path / "warmup/metrics.jsonl", '{"loss": 3.0, "step": 1}\n')
    sync(str(tmp_path), "--rebuild")
    new = identity_of(tmp_path, "unit", None, "tests")
    assert new.id != old.id and (new.project, new.entity) == ("unit", "team")
    kept = [{k: v for k, v in row.items() if not k.startswith("_")} for row in server.history(new.id)]
    assert kept == [
        {"warmup/loss": 3, AXIS: 1},
        {"train/exit/eval/score": 1.5, AXIS: 2},
        {"train/token/loss": 2, AXIS: 1},
        {"train/token/lr": 1, AXIS: 2},
    ]
    assert kept == module.all_rows(tmp_path)
    assert server.configs[new.id]["recipe"]["value"]["name"] == "tiny"
    assert old.id not in server.files and not is_sent(lost)


def test_a_failed_rebuild_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = identity_of(tmp_path, "unit", None, "tests")
    with pytest.raises(InputError, match="there is nothing to send"):
        module.rebuild(tmp_path, {})
    write_text(tmp_path / "warmup/metrics.jsonl", '{"loss": 3.0, "step": 1}\n')
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="keeps its old id"):
        module.rebuild(tmp_path, {})
    keep_identity(tmp_path, old)
    with hold(tmp_path), pytest.raises(InputError, match="in use"):
        module.rebuild(tmp_path, {})
    assert identity_of(tmp_path, "unit", None, "tests") == old
