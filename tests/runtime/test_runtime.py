"""Lock, ranks alone, progress off and on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exittrain.errors import InputError
from exittrain.runtime import progress, ranks
from exittrain.runtime.lock import hold
from exittrain.runtime.provenance import collect_provenance

HOLDER = (
    "import sys, time; from exittrain.runtime.lock import hold\n"
    "with hold(sys.argv[1]):\n    print('held', flush=True); time.sleep(60)"
)


def test_lock_refuses_a_second_process_and_goes_with_a_killed_one(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"in use by process {process.pid}"), hold(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with hold(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_alone_there_is_one_rank() -> None:
    assert (ranks.rank(), ranks.world_size(), ranks.is_main()) == (0, 1, True)
    assert ranks.all_reduce_sums({"loss": 2.0}) == {"loss": 2.0}
    assert ranks.any_rank(True) and not ranks.any_rank(False)
    assert ranks.from_main(lambda: 7) == 7 and ranks.on_all(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        ranks.on_all(lambda: 1 / 0)
    ranks.barrier()


def test_only_a_launchers_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)  # an earlier test may have trained
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (ranks.rank(), ranks.world_size(), ranks.is_main()) == (2, 4, False)


def test_half_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)  # an earlier test may have trained
    for name in ranks.LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    ranks.setup(torch.device("cpu"), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE: set without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        ranks.setup(torch.device("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "abc"), ("MASTER_PORT", "99999"), ("MASTER_PORT", "0")],
)
def test_a_place_that_cannot_be_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)  # an earlier test may have trained
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for variable, number in (place | {name: value}).items():
        monkeypatch.setenv(variable, number)
    with pytest.raises(InputError, match=f"{name}={value}.*: ranks count from 0 to WORLD_SIZE - 1"):
        ranks.setup(torch.device("cpu"), tmp_path)


def test_two_ranks_agree_and_differing_keys_are_an_error(tmp_path: Path) -> None:
    code = (
        "import sys, torch.distributed as dist; from exittrain.runtime import ranks\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[2]}', rank=int(sys.argv[1]), world_size=2)\n"
        "r = ranks.rank()\n"
        "assert ranks.all_reduce_sums({'a': r + 1.0, 'b': 1.0}) == {'a': 3.0, 'b': 2.0}\n"
        "assert ranks.any_rank(r == 1)\n"
        "assert ranks.from_main(lambda: r) == 0\n"
        "try:\n    ranks.all_reduce_sums({'a': 1.0} if r else {'b': 1.0})\n    sys.exit(5)\n"
        "except ValueError:\n    pass\n"
        "dist.destroy_process_group()"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(r), str(tmp_path / "store")]) for r in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]


def test_progress_prints_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setenv("EXITTRAIN_PROGRESS", "1")
    assert list(progress.track(range(3), "collect", "trees")) == [0, 1, 2]
    assert "collect: 3/3 trees" in capsys.readouterr().err
    monkeypatch.setenv("EXITTRAIN_PROGRESS", "0")
    assert list(progress.track(iter("ab"), "x")) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_rich_bar_counts() -> None:
    bar = progress.RichBar(4, "train", "steps")
    bar.start()
    bar.advance(2, note="loss 1.0")
    bar.stop()
    assert bar.done == 2


def test_provenance_is_plain() -> None:
    import json

    facts = collect_provenance(["exittrain", "run"])
    assert json.loads(json.dumps(facts)) == facts
    assert facts["argv"] == ["exittrain", "run"] and facts["versions"]["torch"]
