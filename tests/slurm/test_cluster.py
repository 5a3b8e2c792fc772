"""Real sbatch, srun, scontrol and scancel. Most chains run a stub in place of python, so that each takes seconds; the
last tests train for real.

A stub's stage does what RUN/STAGE.sh says and else ends well; RUN/calls.txt has a line a task.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from node_lists import NODE_LISTS
from slurm_cluster import Cluster

from exittrain.config.load import load_recipe
from exittrain.errors import InputError
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.slurm import expand_nodes
from exittrain.stages.context import StageContext
from exittrain.stages.submit.chain import stage_jobs, submit
from exittrain.stages.submit.profile import build_profile, load_profile
from exittrain.stages.submit.record import read_events, read_record
from exittrain.stages.submit.status import read_status, render

pytestmark = pytest.mark.slurm
TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"
SECONDS = 120.0
STUB = """
stage=$3 run=$4
echo "$stage task $SLURM_PROCID of $SLURM_STEP_NUM_TASKS life ${SLURM_RESTART_COUNT:-0}" >> "$run/calls.txt"
[ ! -f "$run/$stage.sh" ] || source "$run/$stage.sh"
"""
WAIT_FOR_SIGNAL = """
if [ -z "$SLURM_RESTART_COUNT" ]; then
  trap 'exit 75' USR1
  touch "$run/ready.$SLURM_PROCID"
  for i in $(seq 300); do sleep 0.2; done
fi
"""


def context_of(folder: Path, corpus: Path, *overrides: str) -> StageContext:
    local = [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", "eval.speed=false"]
    return StageContext(load_recipe(TINY, [*local, *overrides]), RunFolder(folder))


class Chain:
    """A submitted chain of stubs."""

    def __init__(self, cluster: Cluster, folder: Path, corpus: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self._context = context_of(folder, corpus)
        self._stub = folder.parent / "stub.sh"
        self._stub.write_text(STUB)
        folder.mkdir(exist_ok=True)

    def stage(self, name: str, script: str) -> None:
        (self.folder / f"{name}.sh").write_text(script)

    def submit(self, *overrides: str) -> dict[str, str]:
        """Job ids by stage."""
        python = {"python": f"bash '{self._stub}'", "time": "10", "cpus_per_task": 1, "signal_seconds": 30}
        jobs = submit(self._context, build_profile(python, overrides, "profile"))
        self.ids = {job.stage: job.job_id for job in jobs}
        return self.ids

    def state(self, stage: str, *states: str) -> dict[str, str]:
        return self.cluster.wait_for(self.ids[stage], states, SECONDS)

    def calls(self) -> list[str]:
        file = self.folder / "calls.txt"
        return file.read_text().splitlines() if file.exists() else []

    def events(self, stage: str) -> list[str]:
        return [words for _, _, where, words in read_events(self.folder).rows if where == stage]


@pytest.fixture
def chain(cluster: Cluster, tmp_path: Path, corpus: Path) -> Chain:
    return Chain(cluster, tmp_path / "a run", corpus)


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("text", [text for text in NODE_LISTS if text])
def test_node_lists_resolve_as_scontrol_does(cluster: Cluster, text: str) -> None:
    assert cluster.run("scontrol", "show", "hostnames", text).stdout.split() == expand_nodes(text)


@pytest.mark.parametrize("name", ["cpu", "gpu", "example-container"])
def test_scripts_of_every_profile_are_accepted(cluster: Cluster, tmp_path: Path, corpus: Path, name: str) -> None:
    """GPUs, nodes, memory and times are understood; the partition, the constraint and the account are of no cluster."""
    profile = load_profile(name, ["profile.partition=debug", "profile.account=null", "profile.sbatch=[]"])
    for job in stage_jobs(context_of(tmp_path / "run", corpus), profile):
        (tmp_path / job.stage).write_text(job.text)
        done = cluster.run("sbatch", "--test-only", str(tmp_path / job.stage))
        assert done.returncode == 0, done.stderr


def test_stages_run_in_order_and_training_on_all_nodes(chain: Chain) -> None:
    chain.stage("data", 'while [ ! -f "$run/go" ]; do sleep 0.1; done')
    ids = chain.submit("nodes=2", "tasks_per_node=2")
    assert list(ids) == ["data", "warmup", "collect", "train", "eval", "report"]
    chain.state("data", "RUNNING")
    assert chain.state("warmup", "PENDING")["Dependency"].startswith(f"afterok:{ids['data']}")
    with pytest.raises(InputError, match=r"is in the queue \(data, warmup, .*`scancel \d+ \d+"):
        chain.submit()
    chain.ids = ids
    shown = render(read_status(chain.folder))
    assert "running on n" in shown and "pending (Dependency)" in shown
    (chain.folder / "go").touch()
    chain.state("report", "COMPLETED")
    stages = [line.split()[0] for line in chain.calls()]
    assert stages == ["data", *4 * ["warmup"], "collect", *4 * ["train"], "eval", "report"]
    tasks = sorted(line for line in chain.calls() if line.startswith("train"))
    assert tasks == [f"train task {i} of 4 life 0" for i in range(4)]
    assert chain.events("train") == ["started on n[1-2]", "ended with 0"]
    assert render(read_status(chain.folder)).count("completed") == 7  # the job of data makes the target too


@pytest.mark.parametrize("to", [["--batch"], []], ids=["to the shell", "to the tasks"])
def test_a_signal_requeues_the_stage_and_the_chain_goes_on(chain: Chain, to: list[str]) -> None:
    chain.stage("warmup", WAIT_FOR_SIGNAL)
    ids = chain.submit("nodes=2")
    wait_until(lambda: all((chain.folder / f"ready.{task}").exists() for task in range(2)))
    assert chain.cluster.run("scancel", "--signal=USR1", *to, ids["warmup"]).returncode == 0
    chain.state("report", "COMPLETED")
    assert chain.state("warmup", "COMPLETED")["Restarts"] == "1"
    lives = [line for line in chain.calls() if line.startswith("warmup")]
    assert sorted(lives) == [f"warmup task {task} of 2 life {life}" for task in range(2) for life in range(2)]
    assert chain.events("warmup")[1] == "interrupted, requeued"
    assert "requeued once" in render(read_status(chain.folder))


def test_a_signal_before_the_stage_starts_requeues_too(chain: Chain) -> None:
    ready = chain.folder / "ready"
    wait = f'[ -n "$SLURM_RESTART_COUNT" ] || {{ touch "{ready}"; sleep 8; }}'
    ids = chain.submit(f"setup=['{wait}']")
    wait_until(ready.exists)
    chain.cluster.run("scancel", "--signal=USR1", "--batch", ids["data"])
    chain.state("warmup", "COMPLETED", "RUNNING")
    assert [line for line in chain.calls() if line.startswith("data")] == ["data task 0 of 1 life 1"]


def test_a_stage_that_never_gets_on_is_not_requeued_for_ever(chain: Chain) -> None:
    chain.stage("data", "exit 75")
    chain.submit("requeues=1")
    assert chain.state("data", "FAILED")["ExitCode"] == "75:0"
    assert chain.calls() == ["data task 0 of 1 life 0", "data task 0 of 1 life 1"]
    assert "interrupted, and not requeued again (requeues: 1)" in chain.events("data")


def test_a_failing_stage_ends_the_chain_and_submitting_again_goes_on(chain: Chain) -> None:
    chain.stage("warmup", "exit 3")
    chain.submit()
    assert chain.state("warmup", "FAILED")["ExitCode"] == "3:0"
    for later in ("collect", "train", "eval", "report"):
        chain.state(later, "CANCELLED")
    shown = render(read_status(chain.folder))
    assert "failed with 3" in shown and f"warmup wrote {chain.folder / 'slurm/logs/warmup-'}" in shown
    (chain.folder / "warmup.sh").unlink()
    chain.submit()
    chain.state("report", "COMPLETED")


def test_a_task_that_dies_does_not_leave_the_others_waiting(chain: Chain) -> None:
    chain.stage("warmup", '[ "$SLURM_PROCID" = 0 ] || exit 3; sleep 600')
    chain.submit("nodes=2", "srun=[--wait=3]")  # the script's own is minutes
    chain.state("warmup", "FAILED")
    assert chain.events("warmup")[-1].startswith("ended with ") and len(chain.events("warmup")) == 2
    chain.state("report", "CANCELLED")


def test_a_cancelled_stage_stays_cancelled(chain: Chain) -> None:
    """Even one that saves when it is told to end."""
    chain.stage("data", WAIT_FOR_SIGNAL.replace("USR1", "TERM"))
    ids = chain.submit()
    wait_until((chain.folder / "ready.0").exists)
    chain.cluster.run("scancel", ids["data"])
    for stage in ("data", "warmup", "collect", "train", "eval", "report"):
        chain.state(stage, "CANCELLED")
    wait_until(lambda: not chain.cluster.run("squeue", "-h").stdout.strip())
    assert len(chain.calls()) == 1


def test_what_sbatch_refuses_leaves_nothing_in_the_queue(chain: Chain) -> None:
    with pytest.raises(InputError, match=r"sbatch refused .*train\.sbatch: .*invalid partition specified: nowhere; "):
        chain.submit("stages={train: {partition: nowhere}}")
    wait_until(lambda: not chain.cluster.run("squeue", "-h").stdout.strip())
    assert read_record(chain.folder) is None and chain.calls() == []
    assert not (chain.folder / "recipe.yaml").exists()


def test_only_srun_makes_ranks(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(
        "import sys, torch; from pathlib import Path; from exittrain.runtime import ranks\n"
        "ranks.setup(torch.device('cpu'), Path(sys.argv[1]))\n"
        "print(ranks.rank(), ranks.world_size(), ranks.all_reduce_sums({'a': 1.0})['a'])"
    )
    both = f"'{sys.executable}' '{script}' '{tmp_path}'; srun '{sys.executable}' '{script}' '{tmp_path}'"
    done = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks=2", "bash", "-c", both],
        env=cluster.environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    alone, *ranks = done.stdout.splitlines()
    assert alone == "0 1 1.0" and sorted(ranks) == ["0 2 2.0", "1 2 2.0"], done.stderr


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
