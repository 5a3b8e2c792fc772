"""Chains of jobs that run a stub in place of python, so that each takes seconds.

A stub's stage does what RUN/STAGE.sh says and else ends well; RUN/calls.txt has a line a task.
"""

from __future__ import annotations

from pathlib import Path

from slurm_cluster import TINY, Cluster

from exittrain.config.load import load_recipe
from exittrain.records.run_folder import RunFolder
from exittrain.stages.context import StageContext
from exittrain.stages.submit.chain import submit
from exittrain.stages.submit.profile import build_profile
from exittrain.stages.submit.record import read_events

SECONDS = 120.0
STUB = """
stage=$3 run=$4 part=$6
task="$SLURM_PROCID of $SLURM_STEP_NUM_TASKS"
echo "$stage${part:+ $part} task $task life ${SLURM_RESTART_COUNT:-0}" >> "$run/calls.txt"
[ ! -f "$run/$stage.sh" ] || source "$run/$stage.sh"
"""
WAIT_FOR_SIGNAL = """
if [ -z "$SLURM_RESTART_COUNT" ]; then
  trap 'exit 75' USR1
  touch "$run/ready.${part%/*}$SLURM_PROCID"
  for i in $(seq 300); do sleep 0.2; done
fi
"""


def context_of(folder: Path, corpus: Path) -> StageContext:
    local = [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", "eval.speed=false"]
    return StageContext(load_recipe(TINY, local), RunFolder(folder))


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

    def finish(self, *stages: str) -> None:
        """Mark stages as done, so that no jobs are submitted for them."""
        for stage in stages:
            self._context.run.begin(stage, self._context.stage_key(stage))
            self._context.run.finish(stage, self._context.stage_key(stage))

    def state(self, stage: str, *states: str, part: int | None = None) -> dict[str, str]:
        job = self.ids[stage] + ("" if part is None else f"_{part}")
        return self.cluster.wait_for(job, states, SECONDS)

    def calls(self, stage: str = "") -> list[str]:
        file = self.folder / "calls.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(stage)]

    def events(self, stage: str) -> list[str]:
        return [words for _, _, where, words in read_events(self.folder).rows if where == stage]
