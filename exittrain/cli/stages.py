"""The verbs that run a recipe's stages. torch and the rest are imported when a verb runs, so `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from exittrain.config.schema import Recipe
    from exittrain.stages.context import StageContext

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, a run folder, or a name of recipes/ such as quickstart.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings to override: train.lr=1e-4 train.arms.token.steps=5 name=other"
    ),
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Print steps, tokens, memory, disk; start nothing.")]
PartOption = Annotated[
    str | None,
    typer.Option("--part", metavar="I/N", help="Do only part I (from 0) of N; other jobs do the others."),
]
ShowOption = Annotated[int, typer.Option("--show", min=0, help="Print this many samples, trained tokens coloured.")]


def register(app: typer.Typer) -> None:
    """Add the stage verbs to `app`."""
    for verb in (data, warmup, collect, train, run, plan):
        app.command()(verb)


def data(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False, show: ShowOption = 0) -> None:
    """Read conversations, or let the target write them.

    Nothing else of the run is started (but a target that the recipe makes from nothing is trained first).
    """
    context = run_verb(["target", "data"], recipe, overrides, plan)
    if context is not None and show:
        from exittrain.stages.data import show_samples

        show_samples(context, show)


def warmup(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """Train the first drafter by token loss: where every arm starts.

    It starts from layers of the target, another model, or nothing, as the recipe's `drafter` says.
    """
    run_verb(["warmup"], recipe, overrides, plan)


def collect(
    recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False, part: PartOption = None
) -> None:
    """Draw the first drafter's trees, scored by the target.

    Written as Parquet shards with the probability of leaving the tree at every node. The report shows some; arms with
    `source: shards` train on them, all others draw trees of their own while they train. With --part several jobs share
    the shards, at the same time or not; the bytes are the same.
    """
    run_verb(["collect"], recipe, overrides, plan, part)


def train(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """Train every arm and its controls from the same start.

    An arm is one variant of `train.arms`: an objective and its settings. A control has the same data and steps (with
    `match_time`: the same time) and only the token loss.
    """
    run_verb(["train"], recipe, overrides, plan)


def run(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """All stages in order; the same command goes on after a kill.

    A stage that is done is skipped. A changed setting redoes the stages that depend on it and REPLACES their results:
    add `name=other` to keep both.
    """
    run_verb(None, recipe, overrides, plan)


def plan(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Print steps, tokens, memory and disk; start nothing."""
    run_verb(None, recipe, overrides, True)


def run_verb(
    names: Sequence[str] | None, recipe: str, overrides: Sequence[str] | None, plan: bool, part: str | None = None
) -> StageContext | None:
    """Load the recipe, then print the plan (and return None) or run the named stages (None: all).

    part: `3/8` for the fourth of eight jobs that do one stage together.
    """
    from exittrain.config.load import load_recipe
    from exittrain.runtime.parts import WHOLE, Part

    own = WHOLE if part is None else Part.parse(part)
    loaded = load_recipe(recipe, overrides or ())
    if plan:
        from exittrain.runtime.ranks import is_main
        from exittrain.stages.plan import make_plan, render

        text = render(make_plan(loaded), loaded, names)
        if is_main():  # under a launcher the plan is for as many processes, and printed once
            typer.echo(text)
        return None
    from exittrain.stages.run import run_stages, wanted

    context = make_context(loaded, recipe)
    context.part = own
    available = wanted(context)
    chosen = available if names is None else [name for name in names if name in available or name != "target"]
    run_stages(context, chosen)
    return context


def make_context(recipe: Recipe, given: str) -> StageContext:
    """The run folder of a recipe: `run_dir`, the run folder itself when that was given, else runs/<name>."""
    from exittrain.records.run_folder import RunFolder
    from exittrain.runtime.signals import current
    from exittrain.stages.context import StageContext

    folder = recipe.run_dir or (given if Path(given).is_dir() else f"runs/{recipe.name}")
    return StageContext(recipe, RunFolder(folder), current())
