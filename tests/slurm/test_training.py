"""The tiny recipe for real, through sbatch and srun: training on two nodes, collect and eval in parts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import TINY, Cluster, wait_until

from exittrain.config.load import load_recipe
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.stages.context import StageContext
from exittrain.stages.run import run_all
from exittrain.stages.submit.chain import submit
from exittrain.stages.submit.profile import build_profile, load_profile
from exittrain.stages.submit.record import read_record
from exittrain.stages.submit.status import read_status

pytestmark = pytest.mark.slurm


PROFILE = """
time: 20
nodes: 2
cpus_per_task: 1
stages:
  collect: {array: 3, nodes: 1, sbatch: [--exclusive]}
  eval: {array: 2, nodes: 1}
"""


@pytest.fixture(scope="module")
def whole(started: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe through sbatch and srun from the command line of an allocation's shell: training on two nodes,
    three parts of collect on them, each alone on its node, and two of eval."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "profile.yaml").write_text(PROFILE)
    command = [sys.executable, "-m", "exittrain", "submit", str(TINY), f"run_dir={folder / 'run'}", *local(corpus)]
    done = subprocess.run(
        ["salloc", "--ntasks=4", *command, "--profile", "profile.yaml"],
        env={**started.environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = read_record(folder / "run")
    assert record is not None and [job.parts for job in record.jobs] == [1, 1, 3, 1, 2, 1]
    started.wait_for(record.jobs[-1].job_id, ("COMPLETED", "CANCELLED"), 900)
    return folder / "run"


def local(corpus: Path) -> list[str]:
    return [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", "eval.speed=false"]


def logs(run: Path) -> str:
    return "".join(log.read_text() for log in sorted((run / "slurm/logs").iterdir()))


def results(run: Path) -> dict[str, bytes]:
    """What must not depend on where, by how many jobs and in how many lives it was made."""
    names = ("eval/metrics.json", "eval/rounds.jsonl", "train/reach_kl/last/model.safetensors", "collect/manifest.json")
    return {name: (run / name).read_bytes() for name in (*names, *shards(run))}


def shards(run: Path) -> list[str]:
    return [file.relative_to(run).as_posix() for file in sorted((run / "collect").glob("shard-*.parquet"))]


def test_the_whole_chain(cluster: Cluster, whole: Path) -> None:
    assert (whole / "report/index.html").stat().st_size > 1000, logs(whole)
    for complete in whole.glob("train/*/step-*/COMPLETE.json"):
        assert read_json(complete)["world_size"] == 2
    assert [stage.state for stage in read_status(whole).stages] == ["done"] * 7
    recipe = StageContext(load_recipe(whole), RunFolder(whole))
    assert submit(recipe, load_profile("cpu")) == []
    assert len(list((whole / "slurm/logs").glob("collect-*_[012].log"))) == len(shards(whole)) == 3


def test_one_process_alone_makes_the_same_of_the_same_drafters(whole: Path, tmp_path: Path) -> None:
    """Shards and metrics of the arrays, byte for byte. (What two ranks train differs from one in the last bits.)"""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for folder in ("collect", "eval", "report"):
        shutil.rmtree(run / folder)
    run_all(StageContext(load_recipe(run), RunFolder(run)))
    assert len(shards(run)) == 3 and results(run) == results(whole)


def test_time_limits_in_the_middle_of_a_part_and_of_an_arm_change_nothing(
    cluster: Cluster, whole: Path, tmp_path: Path
) -> None:
    """SLURM's own signal before the time is up, once for a part of collect, once for the ranks of a step: saved,
    requeued, and the same numbers.

    The limit is set once the work has begun, however fast the machine is, and the processes are stopped until the
    signal has come: a tiny stage is over sooner than SLURM looks at its clock.
    """
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for folder in ("collect", "train", "eval", "report", "slurm"):
        shutil.rmtree(run / folder)
    tree = {"time": "60", "nodes": 2, "cpus_per_task": 1, "signal_seconds": 60}
    arrays = {"collect": {"array": 2, "nodes": 1}, "eval": {"array": 2, "nodes": 1}}
    jobs = submit(
        StageContext(load_recipe(run), RunFolder(run)), build_profile({**tree, "stages": arrays}, [], "profile")
    )
    assert [job.stage for job in jobs] == ["collect", "train", "eval", "report"]
    part, train = jobs[0].ids()[0], jobs[1].job_id
    began = run / f"slurm/logs/collect-{part}.log"
    wait_until(lambda: began.exists() and "collect: " in began.read_text(), 600)
    run_out_of_time(cluster, part, processes(f"collect {run} --part 0/2"), 1)
    wait_until((run / "train/token/step-000002").exists, 600)
    run_out_of_time(cluster, train, processes(f"train {run}"), 2)
    cluster.wait_for(jobs[-1].job_id, ("COMPLETED", "CANCELLED"), 900)
    assert cluster.job(train)["Restarts"] == cluster.job(part)["Restarts"] == "1", logs(run)
    assert cluster.job(jobs[0].ids()[1])["Restarts"] == "0"
    assert "stopped by SIGUSR1" in began.read_text() and "stopped by SIGUSR1 after step" in logs(run), logs(run)
    assert results(run) == results(whole)


def run_out_of_time(cluster: Cluster, job: str, tasks: list[int], count: int) -> None:
    """Hold a job's processes until SLURM has told them that its time is nearly up; it is requeued with time enough."""
    assert len(tasks) == count
    for task in tasks:
        os.kill(task, signal.SIGSTOP)
    hours, minutes, _ = (int(part) for part in cluster.job(job)["RunTime"].split(":"))
    limit(cluster, job, hours * 60 + minutes + 2)
    wait_until(lambda: all(is_told(task) for task in tasks), 180)
    for task in tasks:
        os.kill(task, signal.SIGCONT)
    wait_until(lambda: cluster.job(job)["Restarts"] == "1")
    limit(cluster, job, 60)


def limit(cluster: Cluster, job: str, minutes: int) -> None:
    done = cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    assert done.returncode == 0, done.stderr


def processes(words: str) -> list[int]:
    """The python processes whose command line ends with these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
        if line.endswith(words) and line.startswith(sys.executable):
            found.append(int(folder.name))
    return found


def is_told(process: int) -> bool:
    """SIGUSR1 waits to be delivered to a stopped process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal.SIGUSR1 - 1) & 1 for mask in pending)
