"""The tiny recipe for real, through sbatch and srun, training on two nodes."""

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
from exittrain.stages.submit.chain import submit
from exittrain.stages.submit.profile import build_profile, load_profile
from exittrain.stages.submit.record import read_record
from exittrain.stages.submit.status import read_status

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def whole(started: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe through sbatch and srun, training on two nodes, from the command line."""
    folder = tmp_path_factory.mktemp("whole")
    profile = folder / "profile.yaml"
    profile.write_text("time: 20\nnodes: 2\ncpus_per_task: 1\n")
    command = [sys.executable, "-m", "exittrain", "submit", str(TINY), f"run_dir={folder / 'run'}"]
    local = [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", "eval.speed=false"]
    environment = {**started.environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *local, "--profile", str(profile)], env=environment, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    record = read_record(folder / "run")
    assert record is not None
    started.wait_for(record.jobs[-1].job_id, ("COMPLETED", "CANCELLED"), 900)
    return folder / "run"


def test_the_whole_chain(cluster: Cluster, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = "".join(log.read_text() for log in (whole / "slurm/logs").iterdir())
    assert (whole / "report/index.html").stat().st_size > 1000, logs
    for complete in whole.glob("train/*/step-*/COMPLETE.json"):
        assert read_json(complete)["world_size"] == 2
    assert [stage.state for stage in read_status(whole).stages] == ["done"] * 7
    recipe = StageContext(load_recipe(whole), RunFolder(whole))
    assert submit(recipe, load_profile("cpu")) == []


def test_a_time_limit_in_the_middle_of_an_arm_changes_nothing(cluster: Cluster, whole: Path, tmp_path: Path) -> None:
    """SLURM's own signal before the time is up, while the ranks are in a step: saved, requeued, and the same numbers.

    The limit is set once an arm has begun, however fast the machine is, and the ranks are stopped until the signal has
    come: a tiny arm is over sooner than SLURM looks at its clock.
    """
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for folder in ("train", "eval", "report", "slurm"):
        shutil.rmtree(run / folder)
    profile = build_profile({"time": "60", "nodes": 2, "cpus_per_task": 1, "signal_seconds": 60}, [], "profile")
    jobs = submit(StageContext(load_recipe(run), RunFolder(run)), profile)
    assert [job.stage for job in jobs] == ["train", "eval", "report"]
    train = jobs[0].job_id
    wait_until((run / "train/token/step-000002").exists, 600)
    tasks = processes(f"train {run}")
    assert len(tasks) == 2
    for task in tasks:
        os.kill(task, signal.SIGSTOP)
    hours, minutes, _ = (int(part) for part in cluster.job(train)["RunTime"].split(":"))
    limit(cluster, train, hours * 60 + minutes + 2)
    wait_until(lambda: all(is_told(task) for task in tasks), 180)
    for task in tasks:
        os.kill(task, signal.SIGCONT)
    wait_until(lambda: cluster.job(train)["Restarts"] == "1")
    limit(cluster, train, 60)
    cluster.wait_for(jobs[-1].job_id, ("COMPLETED", "CANCELLED"), 900)
    logs = "".join(log.read_text() for log in sorted((run / "slurm/logs").iterdir()))
    assert cluster.job(train)["Restarts"] == "1" and "stopped by SIGUSR1 after step" in logs, logs
    for name in ("eval/metrics.json", "train/reach_kl/last/model.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


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
