"""`exittrain sync`: a run's numbers to wandb, from a machine that reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command()(sync)


def sync(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make a new wandb run of the local metrics.jsonl, and send that.")
    ] = False,
) -> None:
    """Upload a run that was tracked offline: all its segments become one history.

    What is uploaded is not sent again. The segment of a job that is running now is left for later. With --rebuild, for
    when segments are lost or a stage was made again: a clean run of what the folder holds, under a new id.
    """
    from exittrain.runtime.ranks import refuse_several
    from exittrain.stages import sync as work

    refuse_several("sync")
    if rebuild:
        from exittrain.config.load import load_recipe

        work.pending(run)  # is there a wandb run at all?
        work.check_server()  # a new run that cannot be sent would only leave a segment more
        work.rebuild(run, work.config_of(run, load_recipe(str(run)).model_dump(mode="json")))
    todo = work.pending(run)
    if todo.live is not None:
        typer.echo(f"{todo.live} is being written: run this again when the job has ended", err=True)
    if not todo.left:
        typer.echo(f"nothing to upload: {len(todo.sent)} segments are in wandb")
        return
    work.upload(run, todo, lambda line: typer.echo(line, err=True))
    typer.echo(f"uploaded {len(todo.left)} segments as run {todo.identity.id} of project {todo.identity.project}")
