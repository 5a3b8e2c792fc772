"""Stage `eval`: every drafter of a run (or any drafters of one target) measured on the same prompts and contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from exittrain.build.base import TreeShape
from exittrain.build.registry import check_shape
from exittrain.config.checks import verifier_problem
from exittrain.config.schema import EvalSection, TrainSection
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.runtime import ranks
from exittrain.runtime.signals import StopFlag
from exittrain.stages.context import StageContext, say
from exittrain.stages.conversations.chat import ChatRenderer
from exittrain.stages.conversations.store import TokenSequence, read_sequences
from exittrain.stages.evaluation.engine import Engine
from exittrain.stages.evaluation.output import print_tables, write_outputs
from exittrain.stages.evaluation.pieces import Incomplete
from exittrain.stages.evaluation.results import Comparison
from exittrain.stages.evaluation.schema import Metrics
from exittrain.stages.evaluation.setup import Entrant, Setup
from exittrain.stages.evaluation.tasks import HELDOUT, Render, Task, benchmark_task, heldout_task
from exittrain.stages.prompts import expand_tasks
from exittrain.stages.warmup import warm_drafter

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

STAGE = "eval"
WARM_START = "warm start"


def check_eval(context: StageContext) -> None:
    """What would be refused, found before an earlier evaluation is given up. One process alone may call it.

    Raises:
        InputError: as `work_eval`; a calibration that `auto` cannot go by; no room for trees or answers.
    """
    engine = _engine(context)
    engine.check()
    engine.check_weights()


def work_eval(context: StageContext) -> None:
    """Measure this rank's share of this part of the warm start and every arm's last drafter; pieces lie in eval/cells.
    Every rank enters.

    Raises:
        InputError: no `eval` section, an unknown task, or a stage it stands on is missing; on all ranks together.
        Interrupted: a signal came; what was measured is kept.
    """
    engine = ranks.on_all(lambda: _engine(context))
    engine.work()


def finish_eval(context: StageContext) -> bool:
    """Join the pieces, write metrics.json, timing.json, rounds.jsonl, contexts.parquet and table.md of the eval folder,
    and print the tables; False where pieces are missing. The main rank alone."""
    engine = _engine(context)
    try:
        _conclude(engine, lambda: context.run.finish(STAGE, context.stage_key(STAGE)))
    except Incomplete as missing:
        say(f"{STAGE}: {missing}")
        return False
    return True


def _engine(context: StageContext) -> Engine:
    recipe = context.recipe
    if recipe.eval is None:
        raise InputError("the recipe has no 'eval' section")
    target = context.target()
    heldout = read_sequences(context.run.path / "data" / "heldout.parquet")
    comparisons, pattern = (
        ((), WARM_START) if recipe.train is None else (run_comparisons(recipe.train), recipe.train.control)
    )
    builder, shape = eval_trees(recipe.eval, recipe.tree.builder, context.shape)
    setup = Setup(
        recipe.name, recipe.eval, builder, shape, context.sampling, recipe.seed, comparisons, pattern,
    )  # fmt: skip
    tasks = eval_tasks(recipe.eval, recipe.seed, heldout, lambda: renderer_of(context))
    folder = context.run.path / STAGE
    return Engine(target, run_entrants(context), setup, tasks, folder, context.stop, context.part)


def evaluate_drafters(
    target: TargetModel,
    drafters: Mapping[str, Drafter],
    settings: EvalSection,
    out_folder: str | Path,
    *,
    builder: str = "best_first",
    shape: TreeShape | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    control: str | None = None,
    heldout: Sequence[TokenSequence] = (),
    stop: StopFlag | None = None,
) -> Metrics:
    """Evaluate any drafters of one target, without a run. Gains are over `control`, by default the first drafter.

    settings: tasks, verifiers, temperatures and sizes as in a recipe's `eval` section, whose builder and branching go
    before those given here; heldout: sequences for the task `heldout` and for `contexts`.
    Writes the same files as a run's eval stage into `out_folder` and prints the tables. Under a launcher every rank
    calls this with the same arguments, and they share the work.

    Raises:
        InputError: no drafter, an unknown control or task, a verifier that is not exact for the builder's trees, a
            shape that does not fit its budget, `auto` without a calibration, nothing to measure.
    """
    if not drafters:
        raise InputError("no drafter to evaluate: name at least one")
    names = list(drafters)
    control = control or names[0]
    if control not in drafters:
        raise InputError(f"the control {control!r} is none of the drafters: {', '.join(names)}")
    pairs = tuple(Comparison(name, control, "as trained") for name in names if name != control)
    builder, shape = eval_trees(settings, builder, shape or TreeShape())
    setup = Setup(Path(out_folder).name, settings, builder, shape, sampling or Sampling(), seed, pairs, control)
    entrants = [
        Entrant(name, partial(drafters.__getitem__, name), "control" if name == control and pairs else "drafter")
        for name in names
    ]
    tasks = eval_tasks(settings, seed, heldout, lambda: ChatRenderer(target.tokenizer, target.eos_token_ids).prompt)
    stop = stop or StopFlag()
    ranks.setup(target.device, Path(out_folder), stop)
    return evaluate(target, entrants, setup, tasks, Path(out_folder), stop)


def eval_trees(settings: EvalSection, builder: str, shape: TreeShape) -> tuple[str, TreeShape]:
    """The trees eval measures on: its own builder and branching where it names them, else the serving tree's.

    Raises:
        InputError: a verifier that is not exact for them, or a shape that does not fit the budget.
    """
    builder = settings.builder or builder
    if settings.branching is not None:
        own = settings.branching
        shape = replace(shape, branching=own if isinstance(own, str) else tuple(tuple(path) for path in own))
    line = verifier_problem(settings, builder, shape.branching)
    if line is not None:
        raise InputError(line)
    check_shape(builder, shape)
    return builder, shape


def evaluate(
    target: TargetModel, entrants: Sequence[Entrant], setup: Setup, tasks: Sequence[Task], folder: Path, stop: StopFlag
) -> Metrics:
    """Measure, summarise, write, print; every rank enters and gets the same metrics."""
    engine = Engine(target, entrants, setup, tasks, folder, stop)
    engine.work()
    return ranks.from_main(lambda: _conclude(engine))


def _conclude(engine: Engine, then: Callable[[], None] = lambda: None) -> Metrics:
    """The files of an evaluation whose pieces are all there, `then()`, and the tables.

    Raises:
        Incomplete: a piece is missing.
    """
    results = engine.finish()
    metrics, timing = write_outputs(
        engine.folder, engine.target, engine.setup, engine.entrants, engine.tasks, results
    )  # fmt: skip
    then()
    print_tables(metrics, timing)
    return metrics


def make_tasks(
    names: Sequence[str], count: int | None, seed: int, heldout: Sequence[TokenSequence], renderer: Callable[[], Render]
) -> list[Task]:
    """Tasks by name, suites of tasks expanded, with at most `count` prompts each.

    Raises:
        InputError: an unknown task, or `heldout` without a run's held-out data.
    """
    expanded = expand_tasks(list(names))
    if HELDOUT in expanded and not heldout:
        raise InputError(f"task {HELDOUT!r} needs a run's held-out data: evaluate a run, or name benchmarks")
    tasks, render = [], None
    for name in expanded:
        if name == HELDOUT:
            tasks.append(heldout_task(heldout, count))
            continue
        render = render or renderer()
        tasks.append(benchmark_task(name, render, count, seed))
    return tasks


def eval_tasks(
    settings: EvalSection, seed: int, heldout: Sequence[TokenSequence], renderer: Callable[[], Render]
) -> list[Task]:
    """The tasks that settings name; held-out data also comes along (without prompts) where only contexts are wanted."""
    tasks = make_tasks(settings.tasks, settings.prompts_per_task, seed, heldout, renderer)
    if HELDOUT not in (task.name for task in tasks) and heldout and settings.contexts is not None:
        tasks.append(heldout_task(heldout, 0))
    return tasks


def run_entrants(context: StageContext) -> list[Entrant]:
    """The warm start and every arm's last drafter, in the recipe's order, with what their training saw and took."""
    folder, train = context.run.path, context.recipe.train
    warm = warm_drafter(context)
    entrants = [Entrant(WARM_START, partial(context.drafter, warm), WARM_START, folder=warm)]
    if train is None:
        return entrants
    for name, arm in train.arms.items():
        done = context.run.done(f"train/{name}")
        last, steps = folder / "train" / name / "last", int(done["num_steps"])
        seconds = steps * float(done["mean_step_seconds"])
        entrants.append(
            Entrant(
                name, partial(context.drafter, last), arm_role(train, name), arm.objective, steps,
                steps * train.batch_size, seconds, last,
            )
        )  # fmt: skip
    return entrants


def arm_role(train: TrainSection, name: str) -> str:
    if name == train.control:
        return "control"
    arm = train.arms[name]
    return "equal-time control" if arm.match_time is not None and arm.objective == "token" else "arm"


def run_comparisons(train: TrainSection) -> tuple[Comparison, ...]:
    """Every arm against the control at equal steps, and against the control that was given its time."""
    control_steps = train.arms[train.control].steps or train.steps
    pairs = []
    for name, arm in train.arms.items():
        if name == train.control:
            continue
        if arm.match_time is None:
            basis = "equal steps" if (arm.steps or train.steps) == control_steps else "as trained"
            pairs.append(Comparison(name, train.control, basis))
        elif arm.objective == "token":
            pairs.append(Comparison(arm.match_time, name, "equal time"))
        else:
            pairs.append(Comparison(name, arm.match_time, "equal time"))
    return tuple(pairs)


def renderer_of(context: StageContext) -> Render:
    """The target's chat template, as the run's data was rendered."""
    from exittrain.stages.data import chat_renderer

    renderer: ChatRenderer = chat_renderer(context)
    return renderer.prompt
