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
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: train.lr=1e-4 train.arms.token.steps=5"),
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Print steps, tokens, memory, disk; start nothing.")]
ShowOption = Annotated[int, typer.Option("--show", min=0, help="Print so many samples, trained tokens coloured.")]


def register(app: typer.Typer) -> None:
    """Add the stage verbs to `app`."""
    for verb in (data, warmup, collect, train, run, plan):
        app.command()(verb)


def data(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False, show: ShowOption = 0) -> None:
    """Prompts to conversations: given responses, or responses written by the target."""
    context = run_verb(["target", "data"], recipe, overrides, plan)
    if context is not None and show:
        from exittrain.stages.data import show_samples

        show_samples(context, show)


def warmup(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """A drafter from nothing, by token loss: the warm start of every arm."""
    run_verb(["warmup"], recipe, overrides, plan)


def collect(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """The drafter's own trees at many anchors, scored by the target: exit-law targets in shards."""
    run_verb(["collect"], recipe, overrides, plan)


def train(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """Every arm from the same warm start: node objectives and their equal-compute control."""
    run_verb(["train"], recipe, overrides, plan)


def run(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanOption = False) -> None:
    """All stages, resuming what is done; the same command goes on after a kill."""
    run_verb(None, recipe, overrides, plan)


def plan(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """What `run` would do: steps, tokens, memory, disk and processes. Starts nothing."""
    run_verb(None, recipe, overrides, True)


def run_verb(
    names: Sequence[str] | None, recipe: str, overrides: Sequence[str] | None, plan: bool
) -> StageContext | None:
    """Load the recipe, then print the plan (and return None) or run the named stages (None: all)."""
    from exittrain.config.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    if plan:
        from exittrain.stages.plan import make_plan, render

        typer.echo(render(make_plan(loaded), loaded, names))
        return None
    from exittrain.stages.run import run_stages, wanted

    context = make_context(loaded, recipe)
    available = wanted(context)
    chosen = available if names is None else [name for name in names if name in available or name != "target"]
    run_stages(context, chosen)
    return context


def make_context(recipe: Recipe, given: str) -> StageContext:
    """The run folder of a recipe: `run_dir`, the run folder itself when that was given, else runs/<name>."""
    from exittrain.records.run_folder import RunFolder
    from exittrain.runtime.signals import StopFlag
    from exittrain.stages.context import StageContext

    folder = recipe.run_dir or (given if Path(given).is_dir() else f"runs/{recipe.name}")
    return StageContext(recipe, RunFolder(folder), StopFlag().install())
