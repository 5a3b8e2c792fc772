"""`exittrain submit` and `exittrain status`: a run as a chain of SLURM jobs, and how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exittrain.cli.stages import Overrides, RecipeArgument, make_context

ProfileOption = Annotated[
    str | None,
    typer.Option(help="A YAML file, or a name of slurm/profiles; default: the last one of this run, else cpu."),
]
PrintOption = Annotated[bool, typer.Option("--plan", help="Print the batch scripts; write and submit nothing.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command()(submit)
    app.command()(status)


def submit(
    recipe: RecipeArgument, overrides: Overrides = None, profile: ProfileOption = None, plan: PrintOption = False
) -> None:
    """Submit a run to SLURM, one job a stage, each after the one before it.

    A profile says what the jobs ask for; profile.time=02:00:00 overrides it. collect and eval may each be an array of
    jobs: profile.stages.collect.array=8. Stages that are done are left out, so the
    same command goes on with a run that was stopped. A job told to stop saves and requeues itself.
    """
    from exittrain.config.load import load_recipe
    from exittrain.runtime.ranks import refuse_several
    from exittrain.stages.submit.chain import chosen_profile, plan_text, stage_jobs
    from exittrain.stages.submit.chain import submit as submit_chain

    refuse_several("submit")
    given = overrides or []
    own = [override for override in given if override.startswith("profile.")]
    context = make_context(load_recipe(recipe, [one for one in given if one not in own]), recipe)
    settings = chosen_profile(profile, own, context.run.path)
    if plan:
        jobs = stage_jobs(context, settings)
        typer.echo(plan_text(jobs, context.run.path) if jobs else "every stage is done: nothing to submit")
        return
    submitted = submit_chain(context, settings)
    for i, job in enumerate(submitted):
        parts = f" ({job.parts} jobs)" if job.parts > 1 else ""
        typer.echo(f"{job.stage:<8}{job.job_id}{parts}" + (f" after {submitted[i - 1].job_id}" if i else ""))
    if submitted:
        typer.echo(f"exittrain status {context.run.path}")
    else:
        typer.echo("every stage is done: nothing to submit")


def status(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]) -> None:
    """Show a run's stages with progress and rates, and its SLURM jobs if it has some."""
    from exittrain.stages.submit.status import read_status, render

    typer.echo(render(read_status(run)))
