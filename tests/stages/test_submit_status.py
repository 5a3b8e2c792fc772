"""What `exittrain status` says, with stand-ins for SLURM's commands; tests/slurm has the real ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from slurm_stand_ins import finish, profile_of, states

from exittrain.cli.main import main
from exittrain.errors import InputError
from exittrain.runtime.lock import hold
from exittrain.stages.context import StageContext
from exittrain.stages.submit import commands
from exittrain.stages.submit.chain import submit
from exittrain.stages.submit.progress import pieces_done
from exittrain.stages.submit.status import read_status
from exittrain.stages.submit.status import render as render_status


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


ARRAY_RECORD = (  # as scontrol 22.05 prints it, between what is left out here
    "JobId={id} ArrayJobId=43 ArrayTaskId={tasks} JobName=tiny-collect UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} ExitCode={code}:0 "
    "NodeList={nodes} BatchHost=n1 StdOut=/run/collect-43_4294967294.log Power= \n"
)


def array_record(
    tasks: str, state: str, reason: str = "None", nodes: str = "", restarts: int = 0, code: int = 0
) -> str:
    number = "43" if tasks == "4" else f"5{tasks[0]}"
    return ARRAY_RECORD.format(
        id=number, tasks=tasks, state=state, reason=reason, nodes=nodes, restarts=restarts, code=code
    )


def test_status_of_an_array(slurm: Path, context: StageContext) -> None:
    """Tasks that wait share a record, those that ended a while ago may have none left, only their own words."""
    recipe = context.recipe.model_copy(update={"collect": context.recipe.collect.model_copy(update={"shards": 64})})
    finish(context := StageContext(recipe, context.run), "target", "data", "warmup")
    (slurm / "number").write_text("42")
    submit(context, profile_of(stages={"collect": {"array": 8}}))
    run = context.run.path
    assert states(run)["collect"] == "0 of 8 parts done, 8 pending (Dependency)"
    (slurm / "43").write_text(
        array_record("4", "RUNNING", nodes="n1", restarts=1) + array_record("3", "RUNNING", nodes="n2", restarts=2)
        + array_record("2", "COMPLETED") + array_record("1", "PENDING", "BeginTime", restarts=1)
        + array_record("5-6%2", "PENDING", "Resources") + array_record("7", "FAILED", "NonZeroExitCode", code=3)
    )  # fmt: skip
    (run / "slurm/events/collect-43_0.txt").write_text("T 43_0 collect started on n1\nT 43_0 collect ended with 0\n")
    (run / "collect").mkdir()
    for i in range(5):
        file = run / f"collect/shard-0000{i}-of-00064.parquet"
        file.touch()
        os.utime(file, (1000.0 + 3 * i, 1000.0 + 3 * i))
    (run / "slurm/logs/collect-43_7.log").write_text("why")
    shown = render_status(read_status(run))
    assert (
        "43   2 of 8 parts done, 1 pending (BeginTime), 2 running on n1 n2, 2 pending (Resources), 1 failed with 3, "
        "requeued 4 times  5 of 64 shards, 20.0 a minute, 177 s left\n"
    ) in shown
    assert f"collect wrote {run / 'slurm/logs/collect-43_7.log'}" in shown
    (slurm / "43").unlink()
    assert states(run)["collect"] == "1 of 8 parts done, 7 gone"
    finish(context, "collect")
    assert states(run)["collect"] == "done"


def test_a_job_that_slurm_has_forgotten(slurm: Path, context: StageContext) -> None:
    submit(context, profile_of())
    run = context.run.path
    for number in (41, 42, 43):
        (slurm / str(number)).unlink()
    (run / "slurm/events/data-41.txt").write_text("T 41 data started on n1\n")
    (run / "slurm/events/warmup-42.txt").write_text("T 42 warmup started on n1\nT 42 warmup ended with 1\n")
    found = states(run)
    assert (found["data"], found["warmup"], found["collect"]) == ("gone", "ended with 1", "gone")


@pytest.mark.parametrize(("text", "numbers"), [("0-2,5%4", (0, 1, 2, 5)), ("7", (7,)), ("1-7:3", (1, 4, 7)), ("", ())])
def test_array_tasks_as_scontrol_writes_them(slurm: Path, text: str, numbers: tuple[int, ...]) -> None:
    (slurm / "43").write_text(ARRAY_RECORD.format(id=43, tasks=text, state="", reason="", nodes="", restarts=0, code=0))
    assert commands.job_states("43")[0].tasks == numbers
    assert commands.job_states("44") == []


def test_progress_of_pieces(tmp_path: Path) -> None:
    files = [tmp_path / str(i) for i in range(30)]
    assert pieces_done(files, 40, "shards") == ""  # gone, or not there yet
    for i, file in enumerate(files):
        file.touch()
        os.utime(file, (0.0, 0.0) if i < 10 else (1000.0 + i, 1000.0 + i))
    assert pieces_done(files[:1], 40, "shards") == "1 of 40 shards"
    assert pieces_done(files, 40, "shards") == "30 of 40 shards, 60.0 a minute, 10 s left"  # the newest twenty count
    assert pieces_done(files, 0, "pieces") == "30 pieces, 60.0 a minute"


def test_status_without_slurm_takes_the_jobs_own_words(
    slurm: Path, context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(context, profile_of())
    run = context.run.path
    (run / "slurm/events/data-41.txt").write_text("T 41 data started on n1\nT 41 data ended with 1\n")
    (run / "slurm/events/warmup-42.txt").write_text("T 42 warm")
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
