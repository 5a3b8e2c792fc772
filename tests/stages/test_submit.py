"""Submitting: profiles, batch scripts, the chain and its status, with stand-ins for SLURM's commands.

The scripts themselves are run, with a stand-in for srun. tests/slurm has the real commands.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exittrain.cli.main import main
from exittrain.config.load import load_recipe
from exittrain.errors import InputError
from exittrain.records.run_folder import RunFolder
from exittrain.records.share import share_names, share_path
from exittrain.runtime.lock import hold, is_held
from exittrain.stages.context import StageContext
from exittrain.stages.submit import chain, commands
from exittrain.stages.submit.chain import chosen_profile, plan_text, stage_jobs, submit
from exittrain.stages.submit.profile import VERBS, Profile, build_profile, load_profile, resources, seconds_of
from exittrain.stages.submit.record import read_events, read_record
from exittrain.stages.submit.script import command, render, variables_for
from exittrain.stages.submit.status import read_status
from exittrain.stages.submit.status import render as render_status

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/fixtures/tiny.yaml"
PROFILES = sorted(name.removesuffix(".yaml") for name in share_names("slurm/profiles"))
STAND_INS = {
    "sbatch": """
number=$(($(cat "$state/number") + 1)) script=${@: -1}
echo $number > "$state/number"
echo "$number: $*" >> "$state/sbatch.txt"
if [ -f "$state/refuse" ] && [[ $script == *$(cat "$state/refuse")* ]]; then
  echo "sbatch: error: invalid partition specified: nowhere" >&2
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
name=$(sed -n 's/^#SBATCH --job-name=//p' "$script") waits="JobState=PENDING Reason=Dependency"
echo "JobId=$number JobName=$name UserId=u(1) $waits Restarts=0 NodeList=(null) ExitCode=0:0" > "$state/$number"
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


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the stand-ins keep what they were told; job 41 is the first."""
    folder, programs = tmp_path / "slurm state", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (folder / "number").write_text("40")
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\nstate='{folder}'\n{text}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return folder


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.py").write_text(f"value = {i}\n" * 400)
    return StageContext(load_recipe(TINY, local(tmp_path)), RunFolder(tmp_path / "run"))


def local(folder: Path) -> list[str]:
    """Overrides that put the tiny recipe into `folder`."""
    corpus = folder / "corpus"
    return [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}", f"run_dir={folder / 'run'}"]


def finish(context: StageContext, *stages: str) -> None:
    for stage in stages:
        context.run.begin(stage, context.stage_key(stage))
        context.run.finish(stage, context.stage_key(stage))


def profile_of(**tree: object) -> Profile:
    return build_profile(tree, [], "profile")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"partitoin": "x"}, "unknown key 'partitoin', did you mean 'partition'?"),
        ({"stages": {"train": {"node": 2}}}, "unknown key 'stages.train.node', did you mean 'nodes'?"),
        ({"stages": {"training": {}}}, "'stages.training' cannot be 'training': input should be 'data', 'warmup'"),
        ({"nodes": 0}, "'nodes' cannot be 0"),
        ({"time": "two hours"}, "a time is minutes, hours:minutes:seconds"),
        ({"account": "a b"}, "'account' cannot be 'a b'"),
        ({"container": "x\ny"}, "'container' cannot be"),
        ({"sbatch": ["constraint=a100"]}, "a flag is one line and begins with"),
        ({"sbatch": ["--dependency=afterok:3"]}, "--dependency is set by `exittrain submit` itself"),
        ({"stages": {"train": {"sbatch": ["-a 0-3"]}}}, "-a is set by `exittrain submit` itself"),
    ],
)
def test_a_profile_is_strict(tree: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        profile_of(**tree)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"stages": {"collect": {"nodes": 2}}}, "stages.collect.nodes must be 1: one process does this stage"),
        ({"stages": {"report": {"tasks_per_node": 4}}}, "stages.report.tasks_per_node must be 1"),
        ({"time": "5", "signal_seconds": 300}, "must be longer than signal_seconds (300)"),
    ],
)
def test_resources_that_fit_no_stage(tree: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        for stage in VERBS:
            resources(profile_of(**tree), stage)
    assert message in str(caught.value)


def test_profiles_are_found_by_name_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_profile("gpu") == load_profile("slurm/profiles/gpu.yaml") == load_profile("gpu.yaml")
    with pytest.raises(
        InputError, match=r"no profile 'gup', did you mean 'gpu'\? \(known: cpu, example-container, gpu"
    ):
        load_profile("gup")
    (tmp_path / "mine.yaml").write_text("time: 2:00:00\n")
    assert load_profile("mine.yaml").time == "2:00:00"
    assert load_profile("mine.yaml", ["profile.time=12:30:00", "profile.stages.eval.time=30"]).time == "12:30:00"
    (tmp_path / "mine.yaml").write_text("- time\n")
    with pytest.raises(InputError, match=r"mine\.yaml is no profile"):
        load_profile("mine.yaml")


def test_the_example_has_every_key_that_there_is() -> None:
    text = share_path("slurm/profiles/example-container.yaml").read_text()
    absent = [key for key in Profile.model_fields if f"\n{key}:" not in text]
    assert absent == ["venv"]  # it has a container


def test_slurms_times() -> None:
    times = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-0": 86400, "1-02:30": 95400, "1-02:30:05": 95405}
    assert {time: seconds_of(time) for time in times} == times


def test_training_gets_the_nodes_and_other_stages_one_process() -> None:
    profile = profile_of(nodes=2, gpus_per_node=4, stages={"report": {"gpus_per_node": 0, "time": "30"}})
    asked = {stage: resources(profile, stage) for stage in VERBS}
    shapes = {stage: (one.nodes, one.tasks_per_node, one.gpus_per_node) for stage, one in asked.items()}
    assert shapes["warmup"] == shapes["train"] == (2, 4, 4)
    assert shapes["data"] == shapes["collect"] == shapes["eval"] == (1, 1, 1)
    assert shapes["report"] == (1, 1, 0) and asked["report"].time == "30" and asked["eval"].time == profile.time
    without = profile_of(nodes=2, tasks_per_node=3)
    assert resources(without, "train").tasks_per_node == 3 and resources(profile_of(), "train").tasks_per_node == 1


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("stage", VERBS)
def test_scripts_are_bash(name: str, stage: str, tmp_path: Path) -> None:
    text = render(load_profile(name), stage, "a run", tmp_path / "it's 100% mine", tmp_path)  # type: ignore[arg-type]
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "{" not in text.replace("${SLURM_RESTART_COUNT:-0}", "").replace("note() {", "")
    assert f'#SBATCH --output="{tmp_path}/it\'s 100%% mine/slurm/logs/{stage}-%j.log"' in text


def test_a_script_holds_what_the_profile_says() -> None:
    text = render(load_profile("example-container"), "train", "tiny", Path("/runs/tiny"), Path("/home/me"))
    for line in (
        "--job-name=tiny-train", "--chdir=/home/me", "--account=my-account", "--partition=my-partition", "--nodes=2",
        "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8", "--mem=200G", "--time=48:00:00",
        "--signal=B:USR1@300", "--requeue", "--constraint=a100", "--exclusive",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "module load apptainer\nexport NCCL_SOCKET_IFNAME=ib0\n" in text
    assert "--mpi=none " in text and "exittrain.sif python3 -m exittrain train /runs/tiny &" in text
    assert "#SBATCH --account" not in render(profile_of(), "train", "tiny", Path("/r"), Path("/h"))
    assert "source '/my env/bin/activate'" in render(profile_of(venv="/my env"), "eval", "t", Path("/r"), Path("/h"))


def test_which_python() -> None:
    assert command(profile_of(modules=["cuda/12"])) == f"{sys.executable} -m exittrain"
    assert command(profile_of(venv="/env")) == "python -m exittrain"
    assert command(profile_of(container="run x.sif", python="python3.12")) == "run x.sif python3.12 -m exittrain"


@pytest.mark.parametrize("path", ['/a"b', "/a\\b", "/a\nb"])
def test_a_path_that_no_script_can_hold(path: str) -> None:
    with pytest.raises(InputError, match="#SBATCH lines cannot hold that"):
        render(profile_of(), "train", "tiny", Path(path), Path("/h"))


def test_no_setting_of_a_recipe_in_slurm() -> None:
    texts = [file.read_text() for file in (ROOT / "slurm").rglob("*") if file.is_file()]
    assert len(texts) == 1 + len(PROFILES)
    for word in ("lr", "batch_size", "steps", "seed", "temperature", "deepspeed", "objective"):
        assert not any(f"{word}:" in text or f"{word}=" in text for text in texts), word


@pytest.mark.parametrize(
    ("step", "life", "state", "code", "last"),
    [
        ("exit 0", 0, "RUNNING", 0, "ended with 0"),
        ("exit 3", 0, "RUNNING", 3, "ended with 3"),
        ("exit 75", 0, "RUNNING", 0, "interrupted, requeued"),
        ("kill -USR1 $$", 0, "RUNNING", 0, "interrupted, requeued"),
        ("trap 'exit 75' USR1; kill -USR1 $PPID; sleep 5 & wait", 0, "RUNNING", 0, "interrupted, requeued"),
        ("trap 'exit 4' USR1; kill -USR1 $PPID; sleep 5 & wait", 0, "RUNNING", 4, "ended with 4"),
        ("exit 75", 0, "CANCELLED", 75, "ended with 75"),
        ("exit 75", 7, "RUNNING", 75, "ended with 75"),
    ],
    ids=["well", "failed", "saved", "before python", "by the shell", "failed when told", "cancelled", "too often"],
)
def test_what_a_script_makes_of_a_stages_end(
    slurm: Path, tmp_path: Path, step: str, life: int, state: str, code: int, last: str
) -> None:
    (slurm / "step").write_text(step)
    (slurm / "9").write_text(f"JobId=9 JobState={state}")
    run = tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    text = render(profile_of(requeues=7, setup=["true"]), "train", "tiny", run, tmp_path)
    environment = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": str(life)}
    done = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **environment}, timeout=30
    )
    assert done.returncode == code
    rows = read_events(run).rows
    assert [(job, stage) for _, job, stage, _ in rows] == [("9", "train")] * len(rows)
    assert rows[0][3] == "started on n[1-2]" and rows[-1][3] == last
    requeued = (slurm / "scontrol.txt").read_text() if (slurm / "scontrol.txt").exists() else ""
    assert requeued == ("requeue 9\n" if "requeued" in last else "")
    assert (slurm / "srun.txt").read_text().endswith(f"-m exittrain train {run}\n")


def test_a_chain_is_submitted_held_and_let_go_when_it_is_whole(slurm: Path, context: StageContext) -> None:
    finish(context, "target")
    jobs = submit(context, profile_of(nodes=2))
    assert [(job.stage, job.job_id) for job in jobs] == list(zip(VERBS, map(str, range(41, 47)), strict=True))
    lines = (slurm / "sbatch.txt").read_text().splitlines()
    folder = context.run.path
    assert lines[0] == f"41: --parsable --hold {folder}/slurm/data.sbatch"
    assert lines[1] == f"42: --parsable --dependency=afterok:41 --kill-on-invalid-dep=yes {folder}/slurm/warmup.sbatch"
    assert (slurm / "scontrol.txt").read_text() == "release 41\n"
    record = read_record(folder)
    assert record is not None and record.jobs == tuple(jobs) and record.profile["nodes"] == 2
    assert record.keys["train"] == context.stage_key("train")
    assert load_recipe(folder).name == "tiny" and (folder / "slurm/logs").is_dir()


def test_finished_stages_are_left_out(slurm: Path, context: StageContext) -> None:
    finish(context, "target", "data", "warmup", "train")
    assert [job.stage for job in submit(context, profile_of())] == ["collect", "eval", "report"]
    assert "afterok:41" in (slurm / "sbatch.txt").read_text().splitlines()[1]
    for job in ("41", "42", "43"):
        (slurm / job).unlink()
    (context.run.path / "train/DONE.json").unlink()
    finish(context, "collect", "eval", "report")
    assert [job.stage for job in submit(context, profile_of())] == ["train"]
    finish(context, "train")
    assert submit(context, profile_of()) == []


def test_a_profile_is_kept_for_the_next_time(slurm: Path, context: StageContext) -> None:
    run = context.run.path
    assert chosen_profile(None, [], run) == load_profile("cpu")
    submit(context, profile_of(partition="long"))
    assert chosen_profile(None, ["profile.time=30"], run) == profile_of(partition="long", time="30")
    assert chosen_profile("gpu", [], run) == load_profile("gpu")


def test_a_chain_in_the_queue_is_not_doubled(slurm: Path, context: StageContext) -> None:
    submit(context, profile_of())
    (slurm / "41").unlink()
    (slurm / "42").write_text((slurm / "42").read_text().replace("PENDING", "FAILED"))
    (slurm / "43").write_text((slurm / "43").read_text().replace("tiny-collect", "somebody-else"))
    before = (context.run.path / "slurm/jobs.json").read_bytes()
    with pytest.raises(InputError, match=r"is in the queue \(train, eval, report\).*`scancel 44 45 46`"):
        submit(context, profile_of())
    assert (context.run.path / "slurm/jobs.json").read_bytes() == before
    assert len((slurm / "sbatch.txt").read_text().splitlines()) == 6


def test_what_is_refused_is_taken_back(slurm: Path, context: StageContext) -> None:
    (slurm / "refuse").write_text("train.sbatch")
    with pytest.raises(InputError) as caught:
        submit(context, profile_of())
    assert str(caught.value).endswith(
        "train.sbatch: invalid partition specified: nowhere; "
        "Batch job submission failed: Invalid partition name specified"
    )
    assert (slurm / "scancel.txt").read_text() == "41 42 43\n"
    assert read_record(context.run.path) is None and not (context.run.path / "recipe.yaml").exists()
    assert not (slurm / "scontrol.txt").exists()
    (slurm / "refuse").unlink()
    submit(context, profile_of())


def test_an_interrupt_while_submitting_takes_everything_back(
    slurm: Path, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []

    def interrupted(script: Path, after: str | None, held: bool) -> str:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(script)
        return real(script, after, held)

    real: Callable[[Path, str | None, bool], str] = commands.sbatch
    monkeypatch.setattr(chain.commands, "sbatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(context, profile_of())
    assert (slurm / "scancel.txt").read_text() == "41 42\n" and read_record(context.run.path) is None


def test_a_run_folder_in_use(slurm: Path, context: StageContext) -> None:
    assert not is_held(context.run.path)
    with hold(context.run.path):
        assert is_held(context.run.path)
        with pytest.raises(InputError, match="in use by process"):
            submit(context, profile_of())
    assert not (slurm / "sbatch.txt").exists() and not is_held(context.run.path)


def test_without_slurm_only_the_plan(
    context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"sbatch is not on PATH.*--plan prints the scripts"):
        submit(context, profile_of())
    assert not context.run.path.exists()
    text = plan_text(stage_jobs(context, profile_of(nodes=2)), context.run.path)
    assert text.count("#!/bin/bash") == 6 and not context.run.path.exists()
    assert "# ---- sbatch --dependency=afterok:ID_OF_WARMUP --kill-on-invalid-dep=yes" in text
    with pytest.raises(SystemExit) as caught:
        main(["submit", str(TINY), *local(tmp_path), "--plan", "profile.account=mine"])
    assert not caught.value.code and capsys.readouterr().out.count("#SBATCH --account=mine\n") == 6


def test_bad_input_of_a_recipe_is_found_before_anything_is_submitted(slurm: Path, context: StageContext) -> None:
    recipe = context.recipe.model_copy(update={"target": context.recipe.target.model_copy(update={"model": "/none"})})
    with pytest.raises(InputError, match="/none does not exist"):
        submit(StageContext(recipe, context.run), profile_of())
    assert not (slurm / "sbatch.txt").exists() and not context.run.path.exists()


def test_jobs_do_not_inherit_an_allocation_or_a_launcher() -> None:
    shell = {"SLURM_NTASKS": "4", "SLURM_CONF": "/c", "RANK": "1", "HOME": "/h", "SBATCH_ACCOUNT": "a"}
    assert variables_for(shell) == {"SLURM_CONF": "/c", "HOME": "/h", "SBATCH_ACCOUNT": "a"}


def states(folder: Path) -> dict[str, str]:
    return {one.stage: one.state for one in read_status(folder).stages}


def test_status_follows_jobs_marks_and_metrics(slurm: Path, context: StageContext) -> None:
    finish(context, "target", "data")
    submit(context, profile_of())
    run = context.run.path
    warmup, collect = (slurm / "41").read_text(), (slurm / "42").read_text()
    running = warmup.replace("PENDING", "RUNNING").replace("(null)", "n[1-2]").replace("Restarts=0", "Restarts=2")
    (slurm / "41").write_text(running)
    (run / "warmup").mkdir()
    rows = [{"step": step, "time/step_seconds": 0.5} for step in (1, 2)]
    (run / "warmup/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "tim')
    shown = render_status(read_status(run))
    assert "warmup      41   running on n[1-2], requeued 2 times  step 2 of 8, 2.00 steps/s, 3 s left" in shown
    assert states(run)["target"] == states(run)["data"] == "done"
    assert states(run)["eval"] == "pending (Dependency)"

    finish(context, "warmup")
    (slurm / "41").unlink()
    (slurm / "42").write_text(collect.replace("PENDING", "FAILED").replace("ExitCode=0:0", "ExitCode=3:0"))
    (run / "slurm/logs/collect-42.log").write_text("why")
    assert states(run)["warmup"] == "done" and states(run)["collect"] == "failed with 3"
    assert f"collect wrote {run / 'slurm/logs/collect-42.log'}" in render_status(read_status(run))


def test_status_without_slurm_takes_the_jobs_own_words(
    slurm: Path, context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(context, profile_of())
    run = context.run.path
    (run / "slurm/events.txt").write_text("T 41 data started on n1\nT 41 data ended with 1\nT 42 warm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(run)["data"] == "ended with 1" and states(run)["warmup"] == "submitted"
    assert "SLURM is not on this machine" in render_status(read_status(run))


def test_status_of_a_run_that_was_never_submitted(context: StageContext, capsys: pytest.CaptureFixture[str]) -> None:
    finish(context, "target", "data", "warmup", "collect")
    run = context.run.path
    context.run.write_recipe(context.recipe)
    context.run.begin("train", context.stage_key("train"))
    finish(context, "train/token")
    with hold(run):
        assert states(run)["train"] == "running" and states(run)["eval"] == "not started"
    assert states(run)["train"] == "stopped" and states(run)["  token"] == "done"
    with pytest.raises(SystemExit) as caught:
        main(["status", str(run)])
    assert not caught.value.code and "tiny in " in capsys.readouterr().out


def test_status_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run folder"):
        read_status(tmp_path / "none")
    with pytest.raises(InputError, match=r"without recipe\.yaml"):
        read_status(tmp_path)


def test_a_damaged_record_is_named(slurm: Path, context: StageContext) -> None:
    submit(context, profile_of())
    file = context.run.path / "slurm/jobs.json"
    whole = file.read_text()
    for text in (
        whole[:40],
        whole.replace('"jobs"', '"job"'),
        whole.replace('"schema_version": 1', '"schema_version": 9'),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=r"jobs\.json"):
            read_status(context.run.path)
