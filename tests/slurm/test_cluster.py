"""Real sbatch, srun, scontrol and scancel; the chains run stubs (slurm_chain.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from node_lists import NODE_LISTS
from slurm_chain import WAIT_FOR_SIGNAL, Chain, context_of
from slurm_cluster import Cluster, wait_until

from exittrain.errors import InputError
from exittrain.runtime.slurm import expand_nodes
from exittrain.stages.submit.chain import stage_jobs
from exittrain.stages.submit.profile import load_profile
from exittrain.stages.submit.record import read_record
from exittrain.stages.submit.status import read_status, render

pytestmark = pytest.mark.slurm


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


def test_stages_run_in_order_and_those_with_shared_work_on_all_nodes(chain: Chain) -> None:
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
    assert stages == ["data", *(stage for stage in ("warmup", "collect", "train", "eval") for _ in range(4)), "report"]
    assert sorted(chain.calls("train")) == [f"train task {i} of 4 life 0" for i in range(4)]
    assert chain.events("train") == ["started on n[1-2]", "ended with 0"]
    assert render(read_status(chain.folder)).count("completed") == 7  # the job of data makes the target too


@pytest.mark.parametrize("to", [["--batch"], []], ids=["to the shell", "to the tasks"])
def test_a_signal_requeues_the_stage_and_the_chain_goes_on(chain: Chain, to: list[str]) -> None:
    chain.finish("target", "data", "collect", "train", "eval")
    chain.stage("warmup", WAIT_FOR_SIGNAL)
    ids = chain.submit("nodes=2")
    wait_until(lambda: all((chain.folder / f"ready.{task}").exists() for task in range(2)))
    assert chain.cluster.run("scancel", "--signal=USR1", *to, ids["warmup"]).returncode == 0
    chain.state("report", "COMPLETED")
    assert chain.state("warmup", "COMPLETED")["Restarts"] == "1"
    lives = [f"warmup task {task} of 2 life {life}" for task in range(2) for life in range(2)]
    assert sorted(chain.calls("warmup")) == lives
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
    chain.finish("target", "data", "train", "eval")
    chain.stage("warmup", "exit 3")
    chain.submit()
    assert chain.state("warmup", "FAILED")["ExitCode"] == "3:0"
    for later in ("collect", "report"):
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
    states = {one.state for one in read_status(chain.folder).stages if one.state}
    assert states == {"not started"}  # a run all the same, which can be submitted again


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
