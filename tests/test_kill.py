"""kill -9 at any moment of `exittrain run`, then running again: the metrics of an undisturbed run, byte for byte."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = Path(__file__).resolve().parent / "fixtures/tiny.yaml"
LIMIT_SECONDS = 600


def start(folder: Path, corpus: Path, *overrides: str) -> subprocess.Popen[bytes]:
    local = [f"run_dir={folder}", f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", "eval.speed=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EXITTRAIN_PROGRESS": "0"}
    command = [sys.executable, "-m", "exittrain", "run", str(TINY), *local, *overrides]
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def finish(folder: Path, corpus: Path, *overrides: str) -> bytes:
    code = start(folder, corpus, *overrides).wait(timeout=LIMIT_SECONDS)
    assert code == 0, folder.with_suffix(".log").read_text()[-3000:]
    return (folder / "eval/metrics.json").read_bytes()


def kill_when(process: subprocess.Popen[bytes], moment: Path) -> None:
    """kill -9 as soon as `moment` exists (or at once when the process has ended)."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not moment.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_in_the_middle_of_an_arm(tmp_path: Path, tiny_corpus: Path) -> None:
    """One kill, in training, and the numbers of a run that was left alone."""
    small = ["target.scratch.steps=2", "warmup.steps=2", "train.steps=3", "train.save_every=1", "eval.contexts=8"]
    expected = finish(tmp_path / "whole", tiny_corpus, *small)
    process = start(tmp_path / "killed", tiny_corpus, *small)
    kill_when(process, tmp_path / "killed/train/token/step-000001")
    assert finish(tmp_path / "killed", tiny_corpus, *small) == expected


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path: Path, tiny_corpus: Path) -> None:
    began = time.monotonic()
    expected = finish(tmp_path / "whole", tiny_corpus)
    whole_seconds = time.monotonic() - began
    moments = random.Random(0)
    kills = 0
    for _ in range(10):
        process = start(tmp_path / "killed", tiny_corpus)
        time.sleep(moments.uniform(0.25, 0.9) * whole_seconds)
        kills += process.poll() is None
        kill(process)
    assert kills > 0
    assert finish(tmp_path / "killed", tiny_corpus) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "target/tokenizer", "target/step-000012", "data/train.parquet", "data/DONE.json", "warmup/step-000008",
        "collect/shard-00000-of-00003.parquet", "collect/shard-00001-of-00003.json", "train/token/best",
        "train/reach_kl/step-000004", "train/exit/last", "eval/cells", "eval/rounds.jsonl", "eval/metrics.json",
    ],
)  # fmt: skip
def test_killed_right_after(tmp_path: Path, tiny_corpus: Path, moment: str) -> None:
    """The moments that random times rarely hit: between two files of one stage."""
    expected = finish(tmp_path / "whole", tiny_corpus)
    process = start(tmp_path / "killed", tiny_corpus)
    kill_when(process, tmp_path / "killed" / moment)
    assert finish(tmp_path / "killed", tiny_corpus) == expected


@pytest.mark.slow
def test_signal_exits_75_and_goes_on(tmp_path: Path, tiny_corpus: Path) -> None:
    expected = finish(tmp_path / "whole", tiny_corpus)
    process = start(tmp_path / "killed", tiny_corpus)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (tmp_path / "killed/warmup").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=120) == 75
    assert finish(tmp_path / "killed", tiny_corpus) == expected


@pytest.mark.slow
def test_two_ranks_run_all_stages(tmp_path: Path, tiny_corpus: Path) -> None:
    """Under a launcher every rank enters, the main one writes; the arms end with the same numbers on both."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = []
    for rank in range(2):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "EXITTRAIN_PROGRESS": "0",
        }  # fmt: skip
        texts = [f"target.scratch.corpus={tiny_corpus}", f"data.train.path={tiny_corpus}"]
        local = [f"run_dir={tmp_path / 'run'}", *texts]
        command = [sys.executable, "-m", "exittrain", "--local_rank=0", "run", str(TINY), *local, "eval.speed=false"]
        with open(tmp_path / f"rank{rank}.log", "wb") as log:
            both.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment}))
    codes = [process.wait(timeout=LIMIT_SECONDS) for process in both]
    assert codes == [0, 0], (tmp_path / "rank0.log").read_text()[-2000:] + (tmp_path / "rank1.log").read_text()[-2000:]
    assert (tmp_path / "run/report/index.html").exists()
    assert (tmp_path / "rank1.log").read_text().strip() == ""
