"""`exittrain export`: a trained drafter in a form that servers load, kept only when it was read back and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exittrain.cli.tools import is_drafter
from exittrain.errors import InputError

if TYPE_CHECKING:
    from exittrain.stages.export.source import ExportSource


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command()(export)


def export(
    subject: Annotated[str, typer.Argument(metavar="RUN_OR_DRAFTER", help="A run folder, or a drafter's folder.")],
    arm: Annotated[
        str | None, typer.Option(help="Of a run: an arm, or warmup; default: the only arm that is no token arm.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Of a drafter's folder: the model it drafts for.")] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Of a draft LM hf: transformers, vLLM, SGLang. Of a head: speculators (vLLM), sglang (EAGLE heads) or "
            "dflash (block drafters of the whole vocabulary: SGLang, vLLM, z-lab).",
        ),
    ] = "hf",
    output: Annotated[
        Path | None, typer.Option(help="Default: RUN/export/ARM-TO, or the drafter's name and -TO here.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16: rounds the weights; default: as stored.")
    ] = None,
) -> None:
    """Write a drafter as servers load it; prints the folder.

    Every tensor is compared bit for bit, the folder is loaded by transformers alone (a head: by a reader that knows
    config.json only) and its logits compared on real text, its vocabulary with the target's. When something differs
    nothing is written and the exit code is 2.
    """
    from exittrain.runtime.ranks import refuse_several
    from exittrain.stages.export.run import check_form, export_drafter

    refuse_several("export")
    check_form(to)
    source, place = _of_drafter(subject, arm, target) if is_drafter(subject) else _of_run(subject, arm, target)
    done = export_drafter(source, output or Path(f"{place}-{to}"), to, dtype)
    typer.echo(str(done), err=True)
    typer.echo(done.folder)


def _of_run(subject: str, arm: str | None, target: str | None) -> tuple[ExportSource, Path]:
    from exittrain.cli.stages import make_context
    from exittrain.config.load import load_recipe
    from exittrain.stages.export.source import of_run

    if target is not None:
        raise InputError("--target is for a drafter's folder: a run knows its target")
    context = make_context(load_recipe(subject), subject)
    source = of_run(context, arm)
    return source, context.run.path / "export" / source.name


def _of_drafter(folder: str, arm: str | None, target: str | None) -> tuple[ExportSource, Path]:
    from exittrain.stages.export.source import of_folder

    if arm is not None:
        raise InputError("--arm is for a run: a drafter's folder is one drafter")
    if target is None:
        raise InputError("a drafter's folder needs the target it drafts for: --target MODEL")
    source = of_folder(folder, target)
    return source, Path(source.name)
