"""Data that the target writes, and collection, by processes that really run at once (cases.md 88, 92, 93)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from collected_run import SHARDS, files_of, recipe_in

from exittrain.config.load import build_recipe
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import shard_name
from exittrain.stages.context import StageContext
from exittrain.stages.run import run_stages

pytestmark = pytest.mark.slow


class Launch:
    """`world` processes of one command, as a launcher starts them."""

    def __init__(self, world: int, log: Path, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        self.log, self.processes = log, []
        for rank in range(world):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **address}
            environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "EXITTRAIN_PROGRESS": "0"}
            with open(log, "ab") as out:
                command = [sys.executable, "-m", "exittrain", *arguments]
                self.processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))

    def end(self) -> None:
        codes = [process.wait(timeout=300) for process in self.processes]
        assert set(codes) == {0}, self.log.read_text()[-3000:]

    def kill_when(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not happened() and any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            time.sleep(0.005)
        for process in self.processes:
            process.kill()
            process.wait()


def test_two_ranks_and_an_array_of_them_end_with_the_bytes_of_one_process(tmp_path: Path) -> None:
    """Data that the target writes, and collection; then two jobs of two ranks at once, one of them killed."""
    recipe = recipe_in(tmp_path)
    whole = StageContext(build_recipe(recipe), RunFolder(tmp_path / "whole"))
    run_stages(whole, ["data", "warmup", "collect"])
    file, run = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(json.dumps({**recipe, "run_dir": str(run)}))
    Launch(2, tmp_path / "all.log", "run", str(file)).end()
    for stage in ("data", "collect"):
        ours, theirs = (RunFolder(folder).stage(stage) for folder in (run, whole.run.path))
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        for path in theirs.iterdir():
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    RunFolder(run).reset("collect")
    first, second = (
        Launch(2, tmp_path / f"{part}.log", "collect", str(run), "--part", f"{part}/2") for part in range(2)
    )
    second.kill_when(lambda: any((run / "collect" / shard_name(i, SHARDS)).exists() for i in (1, 3)))
    first.end()
    Launch(2, second.log, "collect", str(run), "--part", "1/2").end()
    assert files_of(StageContext(whole.recipe, RunFolder(run))) == files_of(whole)
