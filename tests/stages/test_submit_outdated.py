"""What `exittrain status` says of stages whose marks are of another recipe, of an interrupted run, or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_stand_ins import TINY, finish, profile_of, states

from exittrain.config.load import load_recipe
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.lock import hold
from exittrain.stages.context import StageContext
from exittrain.stages.submit.chain import submit
from exittrain.stages.submit.status import read_status
from exittrain.stages.submit.status import render as render_status


def with_steps(context: StageContext, steps: int) -> StageContext:
    """The same run under a recipe whose arms have as many steps, as `exittrain train RUN train.steps=...` leaves it."""
    train = context.recipe.train.model_copy(update={"steps": steps})
    changed = StageContext(context.recipe.model_copy(update={"train": train}), context.run)
    context.run.write_recipe(changed.recipe)
    return changed


STAGES = ("target", "data", "warmup", "collect", "train", "eval", "report")


def test_what_another_recipe_made_is_outdated(context: StageContext) -> None:
    context.run.write_recipe(context.recipe)
    finish(context, *STAGES, "train/token")
    run = context.run.path
    assert list(states(run).values()) == ["done"] * 7 and "outdated" not in render_status(read_status(run))
    changed = with_steps(context, 50)
    found = states(run)
    assert [found[stage] for stage in STAGES] == ["done"] * 4 + ["outdated"] * 3 and found["  token"] == "outdated"
    assert render_status(read_status(run)).endswith(
        f"outdated: the recipe, its data or what it stands on has changed; `exittrain run {run}` makes it anew"
    )
    with hold(run):
        assert states(run)["train"] == "running" and states(run)["eval"] == "outdated"
    finish(changed, "train", "train/token")
    assert [states(run)[stage] for stage in STAGES] == ["done"] * 5 + ["outdated"] * 2


def test_where_a_source_is_missing_a_mark_is_taken_at_its_word(context: StageContext) -> None:
    context.run.write_recipe(context.recipe)
    finish(context, *STAGES)
    corpus = context.run.path.parent / "corpus"
    corpus.rename(corpus.with_name("elsewhere"))
    assert list(states(context.run.path).values()) == ["done"] * 7
    corpus.with_name("elsewhere").rename(corpus)
    assert list(states(context.run.path).values()) == ["done"] * 7
    (corpus / "0.py").write_text("other = 1\n" * 400)
    assert states(context.run.path)["data"] == "outdated"


@pytest.mark.parametrize("section", ["data", "drafter"])
def test_a_missing_set_or_model_leaves_marks_as_they_are(tmp_path: Path, section: str) -> None:
    """Keys are of what a path holds, and of the path alone once it is gone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n')
    target = ["target.scratch=null", "target.model=someone/target"]
    data = [*target, "data.train.kind=prompts", f"data.train.path={tmp_path / 'rows.jsonl'}"]
    drafter = ["drafter.shape=null", f"drafter.init={tmp_path / 'model'}"]
    recipe = load_recipe(TINY, [f"run_dir={tmp_path / 'run'}", *(data if section == "data" else drafter)])
    context = StageContext(recipe, RunFolder(tmp_path / "run"))
    context.run.write_recipe(recipe)
    finish(context, *STAGES)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    (tmp_path / "rows.jsonl").unlink()
    assert set(states(tmp_path / "run").values()) == {"done"}


def test_jobs_of_another_recipe_say_nothing_of_this_one(slurm: Path, context: StageContext) -> None:
    submit(context, profile_of())
    finish(context, *STAGES)
    for number in range(41, 47):
        (slurm / str(number)).write_text((slurm / str(number)).read_text().replace("PENDING", "COMPLETED"))
    run = context.run.path
    changed = with_steps(context, 50)
    assert [states(run)[stage] for stage in ("collect", "train", "report")] == ["done", "outdated", "outdated"]
    context.run.forget("train")
    changed.run.begin("train/token", changed.stage_key("train/token"))
    assert states(run)["train"] == "stopped"
    with hold(run):
        assert states(run)["train"] == "running"
    (slurm / "44").write_text((slurm / "44").read_text().replace("COMPLETED", "PENDING"))
    assert states(run)["train"] == "pending (Dependency)"


def test_a_stage_that_was_interrupted_is_stopped_and_has_no_rate(slurm: Path, context: StageContext) -> None:
    """`train` has no mark until its arms are done: theirs say that it has begun."""
    finish(context, "target", "data", "warmup", "collect")
    submit(context, profile_of())
    run, first, *others = context.run.path, *context.recipe.train.arms
    steps = context.recipe.train.arms[first].steps or context.recipe.train.steps
    assert states(run)["train"] == "pending (Dependency)"
    for number in (41, 42, 43):
        (slurm / str(number)).unlink()
    (run / "slurm/jobs.json").unlink()  # from here on a run that was never submitted
    for arm in (first, *others):
        context.run.begin(f"train/{arm}", context.stage_key(f"train/{arm}"))
    rows = [{"step": step, "time/step_seconds": 0.5} for step in (1, 2)]
    (run / "train" / first / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rows_of(*stages: str) -> list[tuple[str, str]]:
        return [(one.state, one.progress) for one in read_status(run).stages if one.stage in stages]

    assert rows_of("train", f"  {first}") == [("stopped", ""), ("stopped", f"step 2 of {steps}")]
    with hold(run):
        (state, progress) = rows_of(f"  {first}")[0]
        assert state == "running" and progress.startswith(f"step 2 of {steps}, 2.00 steps/s, ")
    with_steps(context, 50)
    assert rows_of("train", f"  {first}") == [("outdated", "")] * 2  # it would begin anew


def test_what_waits_has_no_rate(slurm: Path, context: StageContext) -> None:
    finish(context, "target", "data")
    submit(context, profile_of())
    (context.run.path / "warmup").mkdir()
    row = {"step": 2, "time/step_seconds": 0.5}
    (context.run.path / "warmup/metrics.jsonl").write_text(json.dumps(row) + "\n")
    warmup = next(one for one in read_status(context.run.path).stages if one.stage == "warmup")
    assert (warmup.state, warmup.progress) == ("pending (Dependency)", "step 2 of 8")


@pytest.mark.parametrize("stage", ["warmup", "train", "train/token"])
def test_a_mark_cut_short_is_damaged(context: StageContext, stage: str) -> None:
    context.run.write_recipe(context.recipe)
    finish(context, "target", "data", "warmup", "collect", "train", "train/token")
    if stage == "train/token":
        context.run.forget("train")
    mark = context.run.path / stage / "DONE.json"
    mark.write_bytes(mark.read_bytes()[:40])
    row = next(one for one in read_status(context.run.path).stages if one.stage.strip() == stage.split("/")[-1])
    assert (row.state, row.progress) == ("damaged", "")
    assert "DONE.json" not in render_status(read_status(context.run.path))
    if stage == "warmup":
        with hold(context.run.path):
            assert states(context.run.path)[stage] == "running"
