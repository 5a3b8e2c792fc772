"""One wandb run a folder, in a thread of its own: whatever it does, whoever logs goes on, and for how long is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from wandb_files import life, read_segment

from exittrain.errors import InputError, Interrupted
from exittrain.runtime import wandb_run as module
from exittrain.runtime.provenance import public_facts
from exittrain.runtime.wandb_run import AXIS, Identity, WandbRun, identity_of, is_sent, segments

OFF = "wandb is off from here on"


class FakeWandb:
    """fail: name of what raises or hangs -> the exception, or an event that is waited for."""

    def __init__(self, fail: dict[str, Any] | None = None) -> None:
        self.fail = fail or {}
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.ends: list[int] = []
        self.config = types.SimpleNamespace(update=lambda given, allow_val_change: self.facts.update(given))
        self.facts: dict[str, Any] = {}

    def _may_fail(self, name: str) -> None:
        problem = self.fail.get(name)
        if isinstance(problem, BaseException):
            raise problem
        if problem is not None:
            problem.wait()

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def init(self, **given: Any) -> FakeWandb:
        self._may_fail(f"init {given['mode']}")
        self.inits.append(given)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self._may_fail("log")
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self._may_fail("finish")
        self.ends.append(exit_code)

    def teardown(self) -> None: ...


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INIT_SECONDS", "FINISH_SECONDS", "SLACK_SECONDS", "LEAVING_SECONDS"):
        monkeypatch.setattr(module, name, 0.1)


def use(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake)


def start(folder: Path, mode: Any = "offline", config: dict[str, Any] | None = None) -> WandbRun:
    return WandbRun(folder, identity_of(folder, "unit", None, "tests"), mode, config or {})


def test_every_process_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 110: the id is the folder's, not a job's."""
    fake = FakeWandb()
    use(monkeypatch, fake)
    for step in (1, 2):
        run = start(tmp_path, config={"seed": step})
        run.log({"warmup/loss": 1.0, "warmup/lr": None}, step)
        run.close()
    first, second = fake.inits
    assert first["id"] == second["id"] == json.loads((tmp_path / "tracking.json").read_text())["id"]
    assert len(first["id"]) == 8 and first["resume"] == "allow" and first["dir"] == str(tmp_path)
    assert fake.rows == [{"warmup/loss": 1.0, AXIS: step} for step in (1, 2)] and fake.ends == [0, 0]
    assert fake.facts == {"seed": 2}
    other = identity_of(tmp_path / "other", "unit", None, "tests")
    assert other.id != first["id"] and (other.name, other.group) == ("other", "tests")


def test_steps_may_go_back_on_our_own_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 108: a resumed life logs steps again, and none is dropped."""
    fake = FakeWandb()
    use(monkeypatch, fake)
    run = start(tmp_path)
    for step in (5, 3):
        run.log({"train/exit/loss": 1.0 / step}, step)
    run.close()
    assert [row[AXIS] for row in fake.rows] == [5, 3]
    assert fake.axes == [(AXIS, None), ("*", AXIS)]


@pytest.mark.parametrize(
    "fail",
    [
        {"init offline": RuntimeError("no key")},
        {"init offline": OSError(28, "No space left on device")},
        {"log": ConnectionError("server is gone\nwith details")},
        {"finish": TimeoutError("too slow")},
        {"init offline": SystemExit(1)},
    ],
)
def test_a_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fail: dict[str, Any]
) -> None:
    use(monkeypatch, FakeWandb(fail))
    run = start(tmp_path)
    for step in range(3):
        run.log({"loss": 1.0}, step)
    run.close()
    run.close()
    run.log({"loss": 1.0}, 4)
    said = capsys.readouterr().err
    (problem,) = fail.values()
    assert said.count("\n") == 1 and OFF in said and str(tmp_path) in said
    assert str(problem).splitlines()[0] in said and run.error is not None


def test_no_wandb_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, None)
    run = start(tmp_path)
    run.log({"loss": 1.0}, 1)
    run.close()
    assert capsys.readouterr().err.count(OFF) == 1


@pytest.mark.parametrize("where", ["init offline", "log", "finish"])
def test_a_hang_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None, where: str
) -> None:
    released = threading.Event()
    use(monkeypatch, FakeWandb({where: released}))
    run = start(tmp_path)
    began = time.monotonic()
    run.log({"loss": 1.0}, 1)
    assert time.monotonic() - began < 0.1  # who logs does not wait
    run.close()
    assert time.monotonic() - began < 5
    assert f"{OFF} (it does not end)" in capsys.readouterr().err
    released.set()
    run._thread.join(5)
    assert capsys.readouterr().err == ""


def test_rows_do_not_pile_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()
    use(monkeypatch, FakeWandb({"init offline": released}))
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    run = start(tmp_path)
    for step in range(20):
        run.log({"loss": 1.0}, step)
    assert capsys.readouterr().err.count(f"{OFF} (it does not answer)") == 1
    released.set()
    run.close()


def test_what_cannot_go_online_is_kept_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb({"init online": RuntimeError("API key must be 40 characters long")})
    use(monkeypatch, fake)
    run = start(tmp_path, "online")
    run.log({"loss": 1.0}, 1)
    run.close()
    said = capsys.readouterr().err
    assert "wandb is offline from here on (RuntimeError: API key" in said and f"exittrain sync {tmp_path}" in said
    assert [given["mode"] for given in fake.inits] == ["offline"] and len(fake.rows) == 1 and run.error is None


def test_a_run_that_is_stopped_ends_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    use(monkeypatch, fake)
    run = start(tmp_path)
    with pytest.raises(Interrupted):
        try:
            raise Interrupted("stopped")
        finally:
            run.close()
    assert fake.ends == [75]


def test_a_damaged_identity_is_named(tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text('{"id": "a"}')
    with pytest.raises(InputError, match=r"tracking\.json is damaged"):
        identity_of(tmp_path, "unit", None, "tests")


def test_facts_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["exittrain", "run", "token=sesame"])
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    facts = public_facts()
    assert "sesame" not in json.dumps(facts)
    assert facts["slurm"]["job_id"] == "17" and facts["world_size"] == 1
    assert {"versions", "hardware", "python"} <= set(facts)
    assert facts["git"] is None or set(facts["git"]) == {"commit", "dirty"}


@pytest.mark.usefixtures("real_wandb")
def test_real_segments_carry_one_id(tmp_path: Path) -> None:
    for first, last in ((1, 4), (3, 6)):
        run = start(tmp_path, config={"recipe": {"seed": 1}})
        for step in range(first, last):
            run.log({"warmup/loss": 1 / step}, step)
        run.close()
        assert run.error is None
    identity = identity_of(tmp_path, "unit", None, "tests")
    found = [read_segment(path) for path in segments(tmp_path, identity.id)]
    assert [segment.run.run_id for segment in found] == [identity.id] * 2
    assert all(segment.run.resume and segment.run.project == "unit" for segment in found)
    assert [[row[AXIS] for row in segment.history] for segment in found] == [[1, 2, 3], [3, 4, 5]]
    assert [row["warmup/loss"] for row in found[0].history] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert all(("*", AXIS) in segment.metrics and segment.exit_code == 0 for segment in found)
    assert found[0].config["recipe"] == {"seed": 1}
    assert not any(map(is_sent, segments(tmp_path, identity.id)))


@pytest.mark.slow
def test_an_unreachable_server_costs_half_a_minute_at_the_end_and_nothing_else(tmp_path: Path) -> None:
    began = time.monotonic()
    process = life(tmp_path, 1, 4, "", "online", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="k" * 40)
    assert process.stdout.readline() == "logged\n"
    logged = time.monotonic() - began
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0 and time.monotonic() - began < 120 and logged < 30
    (line,) = [line for line in said.splitlines() if "from here on" in line]
    assert "wandb is offline from here on" in line
    (segment,) = segments(tmp_path, identity_of(tmp_path, "unit", None, "tests").id)
    assert [row[AXIS] for row in read_segment(segment).history] == [1, 2, 3]


@pytest.mark.slow
def test_a_frozen_service_does_not_keep_the_process(tmp_path: Path) -> None:
    """wandb's helper process stops answering: the end is told in one line and comes."""
    process = life(tmp_path, 1, 4, "wait")
    assert process.stdout.readline() == "logged\n"
    deadline, helpers = time.monotonic() + 60, []
    while not helpers and time.monotonic() < deadline:
        helpers = _children(process.pid, "wandb-core")
        time.sleep(0.2)
    time.sleep(3)
    for helper in helpers:
        os.kill(helper, signal.SIGSTOP)
    _, said = process.communicate("go\n", timeout=200)
    assert process.returncode == 0 and said.count(OFF) == 1
    assert not _children(process.pid, "wandb-core")


def _children(parent: int, name: str) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, ppid, command in rows if int(ppid) == parent and command.startswith(name)]


def test_an_identity_is_read_back(tmp_path: Path) -> None:
    made = identity_of(tmp_path, "unit", "team", "tests")
    assert identity_of(tmp_path, "another", None, "others") == made
    assert made == Identity(made.id, "unit", "team", tmp_path.name, "tests")
