"""The chain of jobs and its status, with stand-ins for SLURM's commands; tests/slurm has the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_stand_ins import profile_of, stand_ins

from exittrain.cli.main import main
from exittrain.config.load import load_recipe
from exittrain.errors import InputError
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.lock import hold, is_held
from exittrain.stages.context import StageContext
from exittrain.stages.submit import chain, commands
from exittrain.stages.submit.chain import chosen_profile, plan_text, stage_jobs, submit
from exittrain.stages.submit.profile import VERBS, load_profile
from exittrain.stages.submit.record import read_record
from exittrain.stages.submit.status import read_status
from exittrain.stages.submit.status import render as render_status

TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return stand_ins(tmp_path, monkeypatch)


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
