"""kill -9 of one of two ranks, or of both, at any moment: the other ends by itself, and running again ends alike.

EXITTRAIN_KILLS says how many (default 10); half of them fall into the writing of a file.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from exittrain.models.folders import TEMPORARY

pytestmark = pytest.mark.slow
TINY = Path(__file__).resolve().parent / "fixtures/tiny.yaml"
SMALL = [
    "target.scratch.steps=4", "warmup.steps=4", "train.steps=4", "eval.speed=false", "eval.bootstrap=50",
    "eval.contexts=40", "eval.verifiers=[tev]", "eval.prompts_per_task=2", "eval.max_new_tokens=6",
]  # fmt: skip
LIMIT_SECONDS = 600
ALONE_SECONDS = 45  # four times the watchdog's
KILLS_A_RUN = 5
RESULTS = (
    "data/train.parquet", "data/heldout.parquet", "collect/manifest.json", "collect/shard-00000-of-00003.parquet",
    "collect/shard-00001-of-00003.parquet", "collect/shard-00002-of-00003.parquet", "warmup/drafter/model.safetensors",
    "train/token/last/model.safetensors", "train/reach_kl/last/model.safetensors", "train/exit/last/model.safetensors",
    "eval/metrics.json", "eval/rounds.jsonl", "eval/contexts.parquet",
)  # fmt: skip


@dataclass
class Life:
    """Two ranks of one `exittrain run`."""

    folder: Path
    ranks: list[subprocess.Popen[bytes]]
    said: int  # bytes of rank 0's log before this life

    @classmethod
    def start(cls, folder: Path, corpus: Path) -> Life:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        local = [f"run_dir={folder}", f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", *SMALL]
        shared = {
            **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            "EXITTRAIN_PROGRESS": "0", "EXITTRAIN_WATCHDOG_SECONDS": "10",
        }  # fmt: skip
        ranks = []
        said = len(_log(folder, 0))
        for rank in range(2):
            command = [sys.executable, "-m", "exittrain", "run", str(TINY), *local]
            with open(folder.with_suffix(f".rank{rank}.log"), "ab") as log:
                environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return cls(folder, ranks, said)

    def finish(self) -> dict[str, str]:
        """Wait for a good end; returns the sha256 of every result."""
        codes = [rank.wait(timeout=LIMIT_SECONDS) for rank in self.ranks]
        assert codes == [0, 0], "\n".join(_log(self.folder, rank)[-2000:] for rank in range(2))
        return {name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in RESULTS}

    def wait(self, seconds: float, writing: bool) -> None:
        """Until `seconds` have passed; with `writing`, then until somebody is in the middle of writing a file."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._all_alive():
            time.sleep(0.01)
        while writing and self._all_alive() and not next(self.folder.rglob(f"{TEMPORARY}*"), None):
            time.sleep(0.001)

    def kill(self, victims: list[int]) -> bool:
        """kill -9; the others must end by themselves, but for one that has not met the killed one yet: its launcher
        would end it. False where all had ended before."""
        alive = [victim for victim in victims if self.ranks[victim].poll() is None]
        for victim in alive:
            self.ranks[victim].send_signal(signal.SIGKILL)
        for rank in self.ranks:
            try:
                rank.wait(timeout=ALONE_SECONDS)
            except subprocess.TimeoutExpired:
                assert len(_log(self.folder, 0)) == self.said, "the other rank does not end"
                rank.kill()
                rank.wait()
        return bool(alive)

    def _all_alive(self) -> bool:
        return all(rank.poll() is None for rank in self.ranks)


def _log(folder: Path, rank: int) -> str:
    file = folder.with_suffix(f".rank{rank}.log")
    return file.read_text() if file.exists() else ""


def test_kills_of_ranks_change_nothing(tmp_path: Path, tiny_corpus: Path) -> None:
    """Every few kills the run is let go to its end: all its files are those of a run that was left alone."""
    began = time.monotonic()
    expected = Life.start(tmp_path / "whole", tiny_corpus).finish()
    seconds = time.monotonic() - began
    moments, kills, wanted = random.Random(0), 0, int(os.environ.get("EXITTRAIN_KILLS", "10"))
    while kills < wanted:
        folder = tmp_path / f"killed-{kills}"
        for _ in range(min(KILLS_A_RUN, wanted - kills)):
            life = Life.start(folder, tiny_corpus)
            life.wait(moments.uniform(0.1, 0.8) * seconds, writing=moments.random() < 0.5)
            kills += life.kill(moments.choice([[0], [1], [0, 1]]))
        assert Life.start(folder, tiny_corpus).finish() == expected, f"after {kills} kills"
        assert not list(folder.rglob(f"{TEMPORARY}*")), "left over"
        print(f"{kills} kills, {time.monotonic() - began:.0f} s")
        shutil.rmtree(folder)
