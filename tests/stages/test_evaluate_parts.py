"""Eval of a run in parts, under a launcher, and beside an earlier evaluation that must not be lost."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from exittrain.config.load import load_recipe
from exittrain.drafters.calibration import Calibration, Choice
from exittrain.errors import InputError
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.parts import Part
from exittrain.stages.context import StageContext
from exittrain.stages.run import run_all, run_stages

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"
FILES = ("metrics.json", "rounds.jsonl", "contexts.parquet")


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


SMALL = [
    "target.scratch.steps=3", "warmup.steps=2", "collect=null", "train.steps=2", "train.save_every=1",
    "train.arms={token: {}, reach_kl: {objective: reach_kl}}", "eval.prompts_per_task=3", "eval.contexts=40",
    "eval.max_new_tokens=6", "eval.speed=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    corpus = tmp_path_factory.mktemp("corpus")
    for file in sorted((Path(sysconfig.get_paths()["stdlib"]) / "json").glob("*.py")):
        shutil.copy(file, corpus)
    local = [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}"]
    return lambda *more: load_recipe(TINY, [*local, *SMALL, *more])


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_all(StageContext(recipe(), RunFolder(folder)))
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run without its evaluation."""
    folder = Path(shutil.copytree(run, tmp_path / "tiny"))
    shutil.rmtree(folder / "eval")
    return folder


def test_a_run_in_parts_has_the_files_of_the_whole(run, copy, recipe, capsys) -> None:
    second, first = (StageContext(recipe(), RunFolder(copy), part=Part(index, 2)) for index in (1, 0))
    run_stages(second, ["eval"])
    assert not (copy / "eval/metrics.json").exists() and "is not measured yet" in capsys.readouterr().err
    run_stages(first, ["eval"])
    assert files(copy / "eval") == files(run / "eval")
    assert RunFolder(copy).is_done("eval", first.stage_key("eval"))


def test_what_auto_refuses_costs_no_earlier_evaluation(run, recipe, tmp_path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "tiny"))
    context = StageContext(recipe("eval.verifiers=[auto]"), RunFolder(folder))
    choices = tuple(Choice(t, 4, "best_first", 2, 2, "chain", "tev", 2.0, None, None, None) for t in (0.0, 1.0))
    Calibration(context.target().fingerprint(), "of before", 0, 1.0, "here", choices).save(folder / "train/token/last")
    before = files(folder / "eval")
    with pytest.raises(InputError, match="is of other weights"):
        run_stages(context, ["eval"])
    assert files(folder / "eval") == before


@pytest.mark.slow
def test_two_processes_evaluate_a_run(run, copy, recipe) -> None:
    """A real launch: the files of one process, and speed too."""
    overrides = [f"run_dir={copy}", *_local(recipe()), *SMALL, "eval.speed=true"]
    for process in launch(["-m", "exittrain", "eval", str(TINY), *overrides]):
        assert process.wait(timeout=600) == 0
    assert files(copy / "eval") == files(run / "eval")
    timing = json.loads((copy / "eval/timing.json").read_text())
    assert [row["drafter"] for row in timing["speed"]] == ["warm start", "token", "reach_kl"]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_and_their_pieces_stay(run, copy, recipe) -> None:
    command = ["-m", "exittrain", "eval", str(TINY), f"run_dir={copy}", *_local(recipe()), *SMALL]
    first, second = launch(command)
    deadline = time.monotonic() + 600
    while len(list(copy.glob("eval/cells/*.json"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    second.terminate()
    assert (first.wait(timeout=120), second.wait(timeout=120)) == (75, 75)
    kept = {path: path.stat().st_mtime_ns for path in copy.glob("eval/cells/*.json")}
    assert kept and not (copy / "eval/metrics.json").exists()
    run_stages(StageContext(recipe(), RunFolder(copy)), ["eval"])  # by one rank now
    assert files(copy / "eval") == files(run / "eval")
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


LIBRARY = """
import sys
from test_evaluate_ranks import SETTINGS, tiny
from exittrain.drafters.causal import CausalDrafter
from exittrain.models.target import TargetModel
from exittrain.runtime import ranks
from exittrain.stages.evaluate import evaluate_drafters
from exittrain.stages.conversations.store import TokenSequence

rows = [TokenSequence(f"s{i}", [1 + (i + j) % 17 for j in range(30)], [0] * 6 + [1] * 24, 6, "t") for i in range(6)]
settings = SETTINGS.model_copy(update={"verifiers": ["tev"], "temperatures": [1.0]})
drafters = {"far": CausalDrafter(tiny(1)), "near": CausalDrafter(tiny(0, noise=0.1))}
metrics = evaluate_drafters(TargetModel(tiny(0).module, verify=False), drafters, settings, sys.argv[1], heldout=rows)
assert [row.drafter for row in metrics.decode[0].drafters] == ["far", "near"]  # on every rank
"""


@pytest.mark.slow
def test_two_processes_evaluate_drafters(tmp_path) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    for process in launch(["-c", LIBRARY, str(tmp_path / "both")], environment):
        assert process.wait(timeout=600) == 0
    kept = {**os.environ, **environment}
    subprocess.run([sys.executable, "-c", LIBRARY, str(tmp_path / "one")], env=kept, check=True, stdout=subprocess.PIPE)
    for name in FILES:
        text = (tmp_path / "both" / name).read_bytes()
        assert text.replace(b'"both"', b'"one"') == (tmp_path / "one" / name).read_bytes()


def _local(recipe) -> list[str]:
    return [f"target.scratch.corpus={recipe.target.scratch.corpus}", f"data.train.path={recipe.data.train.path}"]


def launch(arguments: list[str], more: dict[str, str] | None = None) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(more or {})}
    shared |= {"OMP_NUM_THREADS": "1", "EXITTRAIN_PROGRESS": "0"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
