"""Stages as real arrays: parts side by side on two nodes, each requeued, failing and cancelled by itself."""

from __future__ import annotations

import pytest
from slurm_chain import WAIT_FOR_SIGNAL, Chain
from slurm_cluster import wait_until

from exittrain.errors import InputError
from exittrain.stages.submit.commands import job_states
from exittrain.stages.submit.status import read_status, render

pytestmark = pytest.mark.slurm
EXCLUSIVE = "stages={collect: {array: 3, sbatch: [--exclusive]}, eval: {array: 2}}"
TWO = "stages={collect: {array: 2}}"


def test_parts_run_side_by_side_and_the_next_stage_waits_for_all(chain: Chain) -> None:
    """Three on two nodes that each take one: the third when the first has ended."""
    chain.finish("target", "data", "warmup")
    chain.stage("collect", 'touch "$run/ready.${part%/*}"; while [ ! -f "$run/go" ]; do sleep 0.1; done')
    ids = chain.submit(EXCLUSIVE)
    wait_until(lambda: len(list(chain.folder.glob("ready.*"))) == 2)
    assert chain.state("train", "PENDING")["Dependency"].startswith(f"afterok:{ids['collect']}_*")
    shown = render(read_status(chain.folder))
    assert "0 of 3 parts done, 2 running on n1 n2, 1 pending (" in shown, shown
    with pytest.raises(InputError, match=rf"is in the queue \(collect, .*`scancel {ids['collect']} "):
        chain.submit(EXCLUSIVE)
    chain.ids = ids
    (chain.folder / "go").touch()
    chain.state("report", "COMPLETED")
    stages = [line.partition(" task")[0] for line in chain.calls()]
    assert sorted(stages[:3]) == ["collect 0/3", "collect 1/3", "collect 2/3"] and stages[3] == "train"
    assert sorted(stages[4:6]) == ["eval 0/2", "eval 1/2"] and stages[6:] == ["report"]
    nodes = [words for words in chain.events("collect") if words.startswith("started on ")]
    assert len(nodes) == 3 and set(nodes) == {"started on n1", "started on n2"}
    assert len(list((chain.folder / "slurm/logs").glob(f"collect-{ids['collect']}_[012].log"))) == 3
    shown = render(read_status(chain.folder))
    assert "3 of 3 parts done" in shown and "2 of 2 parts done" in shown


@pytest.mark.parametrize("which", [0, 1])
def test_a_part_that_is_told_to_stop_requeues_itself_and_no_other(chain: Chain, which: int) -> None:
    """SLURM knows the last part by the number of the whole array."""
    chain.finish("target", "data", "warmup", "train", "eval")
    chain.stage("collect", WAIT_FOR_SIGNAL.replace("sleep 0.2", 'sleep 0.2; [ ! -f "$run/go" ] || exit 0'))
    ids = chain.submit(TWO)
    wait_until(lambda: all((chain.folder / f"ready.{part}0").exists() for part in range(2)))
    numbers = {task: state for state in job_states(ids["collect"]) for task in state.tasks}
    assert sorted(numbers) == [0, 1]
    assert chain.cluster.run("scancel", "--signal=USR1", "--batch", f"{ids['collect']}_{which}").returncode == 0
    wait_until(lambda: f"collect {which}/2 task 0 of 1 life 1" in chain.calls())
    wait_until(lambda: "1 of 2 parts done, 1 running on n1, requeued once" in render(read_status(chain.folder)))
    assert chain.state("report", "PENDING")["Dependency"].startswith("afterok:")  # the other part works on
    (chain.folder / "go").touch()
    chain.state("report", "COMPLETED")
    lives = [f"collect {part}/2 task 0 of 1 life 0" for part in range(2)]
    assert sorted(chain.calls("collect")) == sorted([*lives, f"collect {which}/2 task 0 of 1 life 1"])
    assert chain.events("collect").count("interrupted, requeued") == 1


def test_a_failing_part_ends_the_chain_and_submitting_again_goes_on(chain: Chain) -> None:
    chain.finish("target", "data", "warmup", "train", "eval")
    chain.stage("collect", '[ "$part" = 0/2 ] || exit 3')
    ids = chain.submit(TWO)
    chain.state("report", "CANCELLED")
    assert chain.state("collect", "FAILED", part=1)["ExitCode"] == "3:0"
    shown = render(read_status(chain.folder))
    assert "1 of 2 parts done, 1 failed with 3" in shown
    assert f"collect wrote {chain.folder}/slurm/logs/collect-{ids['collect']}_1.log" in shown
    (chain.folder / "collect.sh").unlink()
    chain.submit(TWO)
    chain.state("report", "COMPLETED")


def test_a_cancelled_array_stays_cancelled_and_submitting_again_goes_on(chain: Chain) -> None:
    """Even where its parts save when they are told to end."""
    chain.finish("target", "data", "warmup", "train", "eval")
    chain.stage("collect", WAIT_FOR_SIGNAL.replace("USR1", "TERM"))
    ids = chain.submit(TWO)
    wait_until(lambda: all((chain.folder / f"ready.{part}0").exists() for part in range(2)))
    chain.cluster.run("scancel", ids["collect"])
    chain.state("report", "CANCELLED")
    wait_until(lambda: not chain.cluster.run("squeue", "-h").stdout.strip())
    assert len(chain.calls()) == 2 and "0 of 2 parts done, 2 cancelled" in render(read_status(chain.folder))
    (chain.folder / "collect.sh").unlink()
    chain.submit(TWO)
    chain.state("report", "COMPLETED")
