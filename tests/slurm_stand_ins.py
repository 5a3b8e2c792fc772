"""Stand-ins for SLURM's commands: small shell scripts that keep what they were told in a folder. And a run for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from exittrain.config.load import load_recipe
from exittrain.records.run_folder import RunFolder
from exittrain.stages.context import StageContext
from exittrain.stages.submit.profile import Profile, build_profile
from exittrain.stages.submit.status import read_status

TINY = Path(__file__).resolve().parent / "fixtures/tiny.yaml"

STAND_INS = {
    "sbatch": """
number=$(($(cat "$state/number") + 1)) script=${@: -1}
echo $number > "$state/number"
echo "$number: $*" >> "$state/sbatch.txt"
env > "$state/environment.txt"
if [ -f "$state/refuse" ] && [[ $script == *$(cat "$state/refuse")* ]]; then
  echo "sbatch: error: invalid partition specified: nowhere" >&2
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
name=$(sed -n 's/^#SBATCH --job-name=//p' "$script") waits="JobState=PENDING Reason=Dependency"
tasks=$(sed -n 's/^#SBATCH --array=//p' "$script")
who="JobId=$number ${tasks:+ArrayJobId=$number ArrayTaskId=$tasks }JobName=$name UserId=u(1)"
echo "$who $waits Restarts=0 NodeList=(null) ExitCode=0:0" > "$state/$number"
echo "$number;cluster"
""",
    "scontrol": """
if [ "$1" = show ]; then
  cat "$state/${@: -1}" 2> /dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
else
  echo "$*" >> "$state/scontrol.txt"
fi
""",
    "scancel": 'echo "$*" >> "$state/scancel.txt"; for id in "$@"; do rm "$state/$id"; done',
    "srun": 'echo "$*" >> "$state/srun.txt"; source "$state/step"',
}


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put them on PATH, below `folder`; returns where they keep what they were told. Job 41 is the first."""
    state, programs = folder / "slurm state", folder / "bin"
    state.mkdir()
    programs.mkdir()
    (state / "number").write_text("40")
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\nstate='{state}'\n{text}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return state


def profile_of(**tree: object) -> Profile:
    return build_profile(tree, [], "profile")


def tiny_context(folder: Path) -> StageContext:
    """The tiny recipe with its run and its data in `folder`."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.py").write_text(f"value = {i}\n" * 400)
    return StageContext(load_recipe(TINY, local(folder)), RunFolder(folder / "run"))


def local(folder: Path) -> list[str]:
    """Overrides that put the tiny recipe into `folder`."""
    corpus = folder / "corpus"
    return [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", f"run_dir={folder / 'run'}"]


def finish(context: StageContext, *stages: str) -> None:
    for stage in stages:
        context.run.begin(stage, context.stage_key(stage))
        context.run.finish(stage, context.stage_key(stage))


def states(folder: Path) -> dict[str, str]:
    """What `status` says of each stage and arm of a run."""
    return {one.stage: one.state for one in read_status(folder).stages}
