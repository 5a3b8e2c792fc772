"""What SLURM's variables mean for a process; tasks of one srun that find each other; node lists."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from node_lists import NODE_LISTS

from exittrain.errors import InputError
from exittrain.runtime import ranks, slurm
from exittrain.runtime.slurm import Place, expand_nodes, meet, srun_place

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
BATCH_SHELL = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TASK = {
    **ALLOCATION, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip
WORKER = (
    "import sys, torch; from pathlib import Path; from exittrain.runtime import ranks\n"
    "ranks.setup(torch.device('cpu'), Path(sys.argv[1]))\n"
    "print(ranks.rank(), ranks.local_rank(), ranks.world_size(), ranks.all_reduce_sums({'a': 1.0})['a'])"
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)  # an earlier test may have trained
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in ranks.LAUNCHER]:
        monkeypatch.delenv(name)
    return monkeypatch


def start(folder: Path, job: int, task: int, count: int) -> subprocess.Popen[str]:
    own = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
    step = {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "no-such-node[1-2]"}
    command = [sys.executable, "-c", WORKER, str(folder)]
    kept = {name: value for name, value in os.environ.items() if name not in ranks.LAUNCHER}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**kept, **own, **step})


def test_only_a_task_among_others_has_a_place() -> None:
    assert srun_place(TASK) == Place(rank=3, local_rank=1, world_size=4)
    assert srun_place(ALLOCATION) is None and srun_place(BATCH_SHELL) is None
    assert srun_place({**TASK, "SLURM_STEP_NUM_TASKS": "1"}) is None  # a shell that is itself a step
    assert srun_place({**TASK, "SLURM_PTY_PORT": "4242"}) is None  # a person types there
    assert srun_place({**TASK, "SLURM_PROCID": ""}) is None and srun_place({}) is None


@pytest.mark.parametrize("shell", [ALLOCATION, BATCH_SHELL])
def test_a_plain_shell_of_an_allocation_is_alone(
    environment: pytest.MonkeyPatch, shell: dict[str, str], tmp_path: Path
) -> None:
    for name, value in shell.items():
        environment.setenv(name, value)
    ranks.setup(torch.device("cpu"), tmp_path)
    assert (ranks.rank(), ranks.local_rank(), ranks.world_size(), ranks.is_main()) == (0, 0, 1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_inside_one_task_a_node_counts_itself(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        environment.setenv(name, value)
    assert (ranks.rank(), ranks.local_rank(), ranks.world_size()) == (5, 1, 8)


@pytest.mark.parametrize(("variable", "launcher"), [("TORCHELASTIC_RUN_ID", "torchrun"), ("CROSS_SIZE", "deepspeed")])
def test_a_double_launch_is_refused(
    environment: pytest.MonkeyPatch, tmp_path: Path, variable: str, launcher: str
) -> None:
    inside = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", variable: "1"}
    for name, value in {**TASK, **inside}.items():
        environment.setenv(name, value)
    with pytest.raises(InputError, match=rf"started twice: by srun as 4 tasks on 2 node.*by {launcher}"):
        ranks.setup(torch.device("cpu"), tmp_path)
    slurm.refuse_double_launch({**TASK, "SLURM_STEP_NUM_TASKS": "2", variable: "1"})  # one a node is how it is done


def attend(folder: Path, job: int, task: int) -> int:
    """One task of a job of two: says its job's number in the store they meet in, returns what the other one says."""
    mine = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "no-such-node[1-2]"}
    store = meet(folder, Place(task, task, 2), mine, seconds=60)
    store.set(f"task {task}", str(job))
    said = int(store.get(f"task {1 - task}"))
    if task == 0:
        store.wait(["bye"])  # the store goes with task 0
    else:
        store.set("bye", "")
    return said


def test_two_jobs_whose_numbers_are_equal_modulo_10000_start_side_by_side(tmp_path: Path) -> None:
    """No port follows from the number: the kernel gives one that is free."""
    with ThreadPoolExecutor() as pool:
        said = [pool.submit(attend, tmp_path / "run", job, task) for job in (1, 10001) for task in (1, 0)]
        assert [one.result(timeout=60) for one in said] == [1, 1, 10001, 10001]
    assert not list(tmp_path.rglob("*.*"))


def test_an_old_file_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left behind by a killed job of the same number: nobody listens there any more, or somebody else does."""
    monkeypatch.setattr(slurm, "CONNECT_SECONDS", 1.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    (tmp_path / f"{slurm.MEETING}5.0.0").write_text(f'{{"host": "127.0.0.1", "port": {port}}}')
    with ThreadPoolExecutor() as pool:
        second = pool.submit(attend, tmp_path, 5, 1)
        time.sleep(0.3)
        first = pool.submit(attend, tmp_path, 5, 0)
        assert (first.result(timeout=60), second.result(timeout=60)) == (5, 5)
    assert list(tmp_path.iterdir()) == []


def test_tasks_of_srun_become_ranks(tmp_path: Path) -> None:
    both = [start(tmp_path / "run", 3, task, 2) for task in range(2)]
    printed = [process.communicate(timeout=300)[0].split() for process in both]
    assert printed == [["0", "0", "2", "2.0"], ["1", "1", "2", "2.0"]]
    assert not (tmp_path / "run").exists()  # it was made for the meeting alone


def test_who_does_not_come_is_missed_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=r"1 of 2 tasks came to .*given up"):
        meet(tmp_path, Place(0, 0, 2), TASK, seconds=0.5)
    with pytest.raises(InputError, match=r"task 1 of 2 did not find task 0 .*does not appear"):
        meet(tmp_path, Place(1, 1, 2), TASK, seconds=0.5)
    assert time.monotonic() - began < 20 and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set another run_dir"):
        meet(tmp_path / "file/run", Place(0, 0, 2), TASK, seconds=0.5)


@pytest.mark.parametrize("text", NODE_LISTS)
def test_node_lists(text: str) -> None:
    assert expand_nodes(text) == NODE_LISTS[text]


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[2-1]", "n[a-b]", "n[1,,2]", "n[0-3:2]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(InputError, match="node list"):
        expand_nodes(text)


def test_the_address_is_the_first_node_where_it_can_be_looked_up() -> None:
    assert slurm.address({"SLURM_STEP_NODELIST": "localhost,n2"}) == "localhost"
    assert slurm.address({"SLURM_STEP_NODELIST": "no-such-node[1-2]"}) in (socket.gethostname(), "localhost")
