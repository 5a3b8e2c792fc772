"""Profiles and batch scripts. The scripts are run, with a stand-in for srun; tests/slurm has the real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_stand_ins import profile_of

from exittrain.errors import InputError
from exittrain.records.share import share_names, share_path
from exittrain.stages.submit.profile import VERBS, Profile, Verb, load_profile, resources, seconds_of
from exittrain.stages.submit.record import read_events
from exittrain.stages.submit.script import command, render, variables_for

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted(name.removesuffix(".yaml") for name in share_names("slurm/profiles"))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"partitoin": "x"}, "unknown key 'partitoin', did you mean 'partition'?"),
        ({"stages": {"train": {"node": 2}}}, "unknown key 'stages.train.node', did you mean 'nodes'?"),
        ({"stages": {"training": {}}}, "'stages.training' cannot be 'training': input should be 'data', 'warmup'"),
        ({"nodes": 0}, "'nodes' cannot be 0"),
        ({"array": 2}, "unknown key 'array'"),
        ({"stages": {"eval": {"array": 0}}}, "'stages.eval.array' cannot be 0"),
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
        ({"stages": {"report": {"nodes": 2}}}, "stages.report.nodes must be 1: one process does this stage"),
        ({"stages": {"train": {"array": 2}}}, "stages.train.array must be 1: only collect and eval can be an array"),
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


def test_nodes_and_arrays_go_where_processes_share_the_work() -> None:
    own = {"report": {"gpus_per_node": 0, "time": "30"}, "collect": {"array": 8, "nodes": 1}}
    profile = profile_of(nodes=2, gpus_per_node=4, stages=own)
    asked = {stage: resources(profile, stage) for stage in VERBS}
    shapes = {stage: (one.nodes, one.tasks_per_node, one.gpus_per_node, one.array) for stage, one in asked.items()}
    assert shapes == {
        "data": (1, 1, 1, 1), "warmup": (2, 4, 4, 1), "collect": (1, 4, 4, 8), "train": (2, 4, 4, 1),
        "eval": (2, 4, 4, 1), "report": (1, 1, 0, 1),
    }  # fmt: skip
    assert asked["report"].time == "30" and asked["eval"].time == profile.time
    without = profile_of(nodes=2, tasks_per_node=3)
    assert resources(without, "train").tasks_per_node == 3 and resources(profile_of(), "train").tasks_per_node == 1
    writing = profile_of(
        tasks_per_node=3, stages={"data": {"nodes": 2, "gpus_per_node": 4}, "report": {"gpus_per_node": 2}}
    )
    assert (resources(writing, "data").nodes, resources(writing, "data").tasks_per_node) == (2, 4)
    assert resources(writing, "report").tasks_per_node == 1


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("stage", VERBS)
def test_scripts_are_bash(name: str, stage: str, tmp_path: Path) -> None:
    text = render(load_profile(name), stage, "a run", tmp_path / "it's 100% mine", tmp_path)  # type: ignore[arg-type]
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "{" not in re.sub(r"\$\{SLURM_[A-Z_]+(:-0)?\}|note\(\) \{", "", text)
    number = "%A_%a" if "#SBATCH --array=0-" in text else "%j"
    assert f'#SBATCH --output="{tmp_path}/it\'s 100%% mine/slurm/logs/{stage}-{number}.log"' in text


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
    array = render(load_profile("example-container"), "collect", "tiny", Path("/runs/tiny"), Path("/home/me"))
    assert "#SBATCH --array=0-7\n" in array and "--output=/runs/tiny/slurm/logs/collect-%A_%a.log\n" in array
    assert '-m exittrain collect /runs/tiny --part "$SLURM_ARRAY_TASK_ID/8" &' in array and "array" not in text
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
    assert run_script(slurm, tmp_path, step, state, profile_of(requeues=7, setup=["true"]), "train", life) == code
    run = tmp_path / "run"
    rows = read_events(run).rows
    assert [(job, stage) for _, job, stage, _ in rows] == [("9", "train")] * len(rows)
    assert rows[0][3] == "started on n[1-2]" and rows[-1][3] == last
    assert requeued(slurm) == ("requeue 9\n" if "requeued" in last else "")
    assert (slurm / "srun.txt").read_text().endswith(f"-m exittrain train {run}\n")


def run_script(
    slurm: Path, folder: Path, step: str, state: str, profile: Profile, stage: Verb, life: int = 0, **array: str
) -> int:
    """The exit code of job 9's script, whose srun does `step`."""
    job = "_".join([array.get("SLURM_ARRAY_JOB_ID", "9"), *([array["SLURM_ARRAY_TASK_ID"]] if array else [])])
    (slurm / "step").write_text(step)
    (slurm / job).write_text(f"JobId=9 JobState={state}")
    (folder / "run/slurm/events").mkdir(parents=True)
    text = render(profile, stage, "tiny", folder / "run", folder)
    environment = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": str(life), **array}
    path = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    return subprocess.run(["bash", "-c", text], env={**path, **environment}, timeout=30).returncode


def requeued(slurm: Path) -> str:
    return (slurm / "scontrol.txt").read_text() if (slurm / "scontrol.txt").exists() else ""


def test_a_task_of_an_array_does_its_part_and_requeues_itself_only(slurm: Path, tmp_path: Path) -> None:
    """The last task's SLURM_JOB_ID is the array's: `scontrol requeue` of it would end all of them."""
    array = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "1"}
    profile = profile_of(stages={"eval": {"array": 3}})
    assert run_script(slurm, tmp_path, "exit 75", "RUNNING", profile, "eval", **array) == 0
    assert requeued(slurm) == "requeue 9_2\n"
    assert (slurm / "srun.txt").read_text().endswith(f"-m exittrain eval {tmp_path / 'run'} --part 2/3\n")
    events = read_events(tmp_path / "run")
    assert [words for *_, words in events.rows] == ["started on n[1-2]", "interrupted, requeued"]
    assert events.last("9_2") == "interrupted, requeued" and events.last("9") == events.last("9_1") == ""
    assert (tmp_path / "run/slurm/events/eval-9_2.txt").exists()


def test_jobs_do_not_inherit_an_allocation_or_a_launcher() -> None:
    shell = {"SLURM_NTASKS": "4", "SLURM_CONF": "/c", "RANK": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}
    assert variables_for(shell) == {"SLURM_CONF": "/c", "HOME": "/h"}


def test_a_script_says_more_than_sbatchs_variables() -> None:
    """sbatch itself would heed its variables first."""
    shell = {f"SBATCH_{name}": "x" for name in ("ACCOUNT", "PARTITION", "MEM_PER_NODE", "SIGNAL", "ARRAY_INX", "QOS")}
    assert set(variables_for(shell)) == {f"SBATCH_{name}" for name in ("ACCOUNT", "PARTITION", "MEM_PER_NODE", "QOS")}
    text = render(profile_of(account="mine", memory="4G"), "train", "tiny", Path("/r"), Path("/h"))
    assert set(variables_for(shell, text)) == {"SBATCH_PARTITION", "SBATCH_QOS"}
