"""The chain of jobs, with stand-ins for SLURM's commands; tests/slurm has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_stand_ins import TINY, finish, local, profile_of

from exittrain.cli.main import main
from exittrain.cli.stages import make_context
from exittrain.config.load import load_recipe
from exittrain.errors import InputError
from exittrain.runtime.lock import hold, is_held
from exittrain.stages.context import StageContext
from exittrain.stages.submit import chain, commands
from exittrain.stages.submit.chain import chosen_profile, plan_text, stage_jobs, submit
from exittrain.stages.submit.profile import VERBS, load_profile
from exittrain.stages.submit.record import read_record
from exittrain.stages.submit.status import read_status


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


def test_a_chain_that_runs_is_told_by_its_jobs_not_by_its_lock(slurm: Path, context: StageContext) -> None:
    submit(context, profile_of())
    with hold(context.run.path), pytest.raises(InputError, match="is in the queue"):  # a job holds it
        submit(context, profile_of())


def test_arrays_are_links_of_the_chain_like_other_jobs(
    slurm: Path, context: StageContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = profile_of(stages={"collect": {"array": 8}, "eval": {"array": 2}})
    jobs = submit(context, profile)
    assert [job.parts for job in jobs] == [1, 1, 3, 1, 2, 1]
    assert jobs[2].ids() == ["43_0", "43_1", "43_2"] and jobs[3].ids() == ["44"]
    assert "collect: 3 job(s), not 8: the recipe has 3 shard(s) (collect.shards)\n" in capsys.readouterr().err
    run = context.run.path
    assert "#SBATCH --array=0-2\n" in (run / "slurm/collect.sbatch").read_text()
    assert "--dependency=afterok:43 " in (slurm / "sbatch.txt").read_text().splitlines()[3]
    record = read_record(run)
    assert record is not None and record.jobs == tuple(jobs)
    assert chosen_profile(None, [], run) == profile  # as it was given: a recipe of more shards may need them all
    for number in (41, 42, 44, 45, 46):
        (slurm / str(number)).unlink()
    with pytest.raises(InputError, match=r"is in the queue \(collect\).*`scancel 43`"):
        submit(context, profile)
    (slurm / "43").unlink()
    (slurm / "refuse").write_text("report.sbatch")
    with pytest.raises(InputError, match="sbatch refused"):
        submit(context, profile)
    assert (slurm / "scancel.txt").read_text() == "47 48 49 50 51\n"
    with pytest.raises(SystemExit) as caught:
        main(["submit", str(TINY), *local(tmp_path), "--plan", "profile.stages.eval.array=4"])
    assert not caught.value.code and "#SBATCH --array=0-3\n" in capsys.readouterr().out


def test_jobs_start_from_what_the_profile_says_not_from_the_shell(
    slurm: Path, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As inside salloc, under a launcher, and with variables that sbatch would heed before the script."""
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "RANK", "SBATCH_ACCOUNT", "SBATCH_ARRAY_INX", "SBATCH_QOS"):
        monkeypatch.setenv(name, "7")
    submit(context, profile_of(account="mine"))
    given = {line.partition("=")[0] for line in (slurm / "environment.txt").read_text().splitlines()}
    assert "SBATCH_QOS" in given
    assert not given & {"SLURM_JOB_ID", "SLURM_NTASKS", "RANK", "SBATCH_ACCOUNT", "SBATCH_ARRAY_INX"}


def test_what_is_refused_is_taken_back(slurm: Path, context: StageContext) -> None:
    (slurm / "refuse").write_text("train.sbatch")
    with pytest.raises(InputError) as caught:
        submit(context, profile_of())
    assert str(caught.value).startswith("nothing was submitted: sbatch refused ")
    assert str(caught.value).endswith(
        "train.sbatch: invalid partition specified: nowhere; "
        "Batch job submission failed: Invalid partition name specified"
    )
    assert (slurm / "scancel.txt").read_text() == "41 42 43\n"
    assert read_record(context.run.path) is None and not (slurm / "scontrol.txt").exists()
    assert [one.state for one in read_status(context.run.path).stages if one.state] == ["not started"] * 7
    (slurm / "refuse").unlink()
    again = make_context(load_recipe(context.run.path), context.run.path)  # as `exittrain submit RUN`
    assert len(submit(again, profile_of())) == 6


def test_a_refusal_leaves_the_recipe_of_what_is_done(slurm: Path, context: StageContext) -> None:
    context.run.write_recipe(context.recipe)
    finish(context, "target")
    (slurm / "refuse").write_text("data.sbatch")
    with pytest.raises(InputError, match="nothing was submitted"):
        submit(StageContext(context.recipe.model_copy(update={"seed": 99}), context.run), profile_of())
    assert load_recipe(context.run.path).seed == context.recipe.seed
    assert read_status(context.run.path).stages[0].state == "done"


def test_jobs_that_cannot_be_taken_back_are_not_called_nothing(
    slurm: Path, context: StageContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "refuse").write_text("collect.sbatch")
    monkeypatch.setattr(chain.commands, "cancel", lambda ids: "no controller")
    with pytest.raises(InputError) as caught:
        submit(context, profile_of())
    assert str(caught.value).startswith("sbatch refused")
    assert "jobs 41 42 could not be cancelled (no controller)" in capsys.readouterr().err
    assert {one.stage: one.job_id for one in read_status(context.run.path).stages}["warmup"] == "42"


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
