"""Two ranks, two interruptions, one wandb run: every number of metrics.jsonl is in it, on one axis of steps."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import SMALL, TINY, make_corpus
from wandb_files import Segment, read_segment
from wandb_server import KEY, serving

from exittrain.runtime.wandb_run import AXIS, read_identity, segments
from exittrain.stages.sync import all_rows, pending, upload

pytestmark = pytest.mark.slow
STAGES = ("target", "warmup", "train/token", "train/reach_kl", "train/exit")
LONGER = ["train.steps=12", "train.save_every=3", "train.log_every=1", "tracking.wandb=offline"]


def launch(run: Path, corpus: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [f"run_dir={run}", f"target.scratch.corpus={corpus}", f"data.train.path={corpus}"]
    command = [sys.executable, "-m", "exittrain", "run", str(TINY), *own, *SMALL, *LONGER]
    shared = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    shared |= {"OMP_NUM_THREADS": "1", "EXITTRAIN_PROGRESS": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(run.with_suffix(".log"), "ab") as log:
        return [
            subprocess.Popen(
                command, stdout=log, stderr=log,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            )
            for rank in range(2)
        ]  # fmt: skip


def codes(run: Path, processes: list[subprocess.Popen[bytes]], stop_at: Path | None = None) -> list[int]:
    """Exit codes; with stop_at rank 1 gets SIGTERM once that file has two lines."""
    try:
        deadline = time.monotonic() + 400
        while stop_at is not None and not (stop_at.exists() and stop_at.read_bytes().count(b"\n") >= 2):
            assert time.monotonic() < deadline and processes[0].poll() is None, run.with_suffix(".log").read_text()
            time.sleep(0.01)
        if stop_at is not None:
            processes[1].send_signal(signal.SIGTERM)
        return [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_values(found: list[Segment]) -> dict[tuple[str, int], Any]:
    """(metric, step) -> what the last life that logged it said."""
    rows = [row for segment in found for row in segment.history]
    return {(name, row[AXIS]): value for row in rows for name, value in row.items() if name.startswith(STAGES)}


def test_a_chain_of_jobs_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 108, 109, 110: stopped in two arms by a signal to the other rank, then finished and uploaded."""
    run, corpus = tmp_path / "run", tmp_path / "corpus"
    corpus.mkdir()
    make_corpus(corpus)
    for arm in ("token", "reach_kl"):
        assert codes(run, launch(run, corpus), run / "train" / arm / "metrics.jsonl") == [75, 75]
    assert codes(run, launch(run, corpus)) == [0, 0]
    log = run.with_suffix(".log").read_text()
    assert "wandb is off" not in log

    identity = read_identity(run)
    places = segments(run, identity.id)
    found = [read_segment(place) for place in places]
    assert len(places) == len(list(run.rglob("*.wandb"))) == 3  # one a life, by one rank
    assert {segment.run.run_id for segment in found} == {identity.id}
    assert [segment.exit_code for segment in found] == [75, 75, 0]
    assert all(segment.config["world_size"] == 2 for segment in found)
    assert all(("*", AXIS) in segment.metrics for segment in found)

    shown, truth = last_values(found), all_rows(run)
    for row in truth:
        step = row.pop(AXIS)
        for name, value in row.items():
            assert shown[name, step] == value, (name, step)
    assert sum(len(row) for row in truth) == len(shown)  # nothing beyond it: undone steps were done again
    steps = {name: [step for (metric, step) in sorted(shown) if metric == f"{name}/loss"] for name in STAGES}
    assert all(steps[f"train/{arm}"] == list(range(1, 13)) for arm in ("token", "reach_kl", "exit"))
    for name in (
        "coverage",
        "expected_block_length",
        "exit_mass/depth_0",
        "node_gradient_share",
        "eval/score",
        "grad_norm",
    ):
        assert ("train/reach_kl/" + name, 12) in shown
    assert ("train/token/time/tokens_per_second", 12) in shown and ("warmup/memory/peak_gib", 2) in shown

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        first = pending(run)
        upload(run, type(first)(first.identity, first.sent, first.left[:2], None), print)
        history = server.history(identity.id)
        assert len(history) == sum(len(segment.history) for segment in found[:2])
        assert [row["_step"] for row in history] == list(range(len(history)))
        assert pending(run).left == places[2:]
    assert json.loads((run / "eval/metrics.json").read_text())["drafters"]
