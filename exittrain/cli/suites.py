"""`exittrain eval ... --suite NAME`: a study of a run's drafters, or of drafter folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from exittrain.errors import InputError

if TYPE_CHECKING:
    from exittrain.stages.studies.settings import Study


def run_suite(
    name: str, subjects: Sequence[str], overrides: Sequence[str], target: str | None, tasks: str | None,
    max_new_tokens: int | None, others: Mapping[str, object], output: str, plan: bool,
) -> bool:  # fmt: skip
    """Run the study of that name; False when the suite is only a list of tasks.

    Raises:
        InputError: an unknown suite or key, an option that studies do not take, subjects that do not go together.
    """
    from exittrain.stages.studies.settings import Study, load_suite

    own = [override for override in overrides if override.startswith("suite.")]
    if tasks is not None:
        own.append(f"suite.tasks=[{tasks}]")
    if max_new_tokens is not None:
        own.append(f"suite.max_new_tokens={max_new_tokens}")
    if not isinstance(load_suite(name), Study):
        if any(override.startswith("suite.") for override in overrides):
            raise InputError(f"suite {name!r} is a list of tasks and has no settings: use eval.KEY=VALUE")
        return False
    settings = load_suite(name, own)
    assert isinstance(settings, Study)
    unused = [option for option, value in others.items() if value is not None]
    if unused:
        raise InputError(f"{unused[0]} is not for studies: set suite.KEY=VALUE (suite.temperatures=[0,1])")
    rest = [override for override in overrides if not override.startswith("suite.")]
    if plan:
        _check_subjects(subjects, rest, target)
        typer.echo(f"{settings.name}: {settings.description}")
        for key, value in settings.model_dump(exclude={"name", "description"}).items():
            typer.echo(f"  {key}: {value}")
        return True
    if target is None:
        _of_run(subjects, rest, settings)
    else:
        _of_drafters(subjects, rest, target, settings, output)
    return True


def _check_subjects(subjects: Sequence[str], overrides: Sequence[str], target: str | None) -> None:
    """Raises InputError where the study could not begin: no such recipe, run or drafter folder."""
    from exittrain.config.load import load_recipe

    if target is None:
        load_recipe(_the_run(subjects), overrides)
    missing = next((folder for folder in subjects if target is not None and not Path(folder).is_dir()), None)
    if missing is not None:
        raise InputError(f"no drafter folder {missing!r}")


def _the_run(subjects: Sequence[str]) -> str:
    if len(subjects) != 1:
        raise InputError("a study takes one recipe or run folder, or drafter folders with --target MODEL")
    return subjects[0]


def _of_run(subjects: Sequence[str], overrides: Sequence[str], settings: Study) -> None:
    from exittrain.cli.stages import make_context
    from exittrain.config.load import load_recipe
    from exittrain.stages.studies.run import study_run

    run = _the_run(subjects)
    study_run(make_context(load_recipe(run, overrides), run), settings)


def _of_drafters(folders: Sequence[str], overrides: Sequence[str], target: str, settings: Study, output: str) -> None:
    import torch

    from exittrain.cli.tools import distinct_names
    from exittrain.drafters.load import load_drafter
    from exittrain.models.target import TargetModel
    from exittrain.runtime.signals import current
    from exittrain.stages.conversations.chat import ChatRenderer
    from exittrain.stages.evaluation.setup import Entrant
    from exittrain.stages.studies.run import study

    if overrides:
        raise InputError(f"{overrides[0]!r}: a study of drafter folders takes only suite.KEY=VALUE")
    if settings.name == "verifiers" and len(folders) > 1:
        raise InputError(f"suite 'verifiers' calibrates one drafter, {len(folders)} are named: give them one by one")
    stop = current().heed()
    if settings.tasks == ["heldout"]:
        settings = settings.model_copy(update={"tasks": ["everyday"]})
    model = TargetModel.from_pretrained(target, device="cuda" if torch.cuda.is_available() else "cpu")
    entrants = [
        Entrant(name, partial(load_drafter, folder, model), folder=Path(folder) if Path(folder).is_dir() else None)
        for name, folder in zip(distinct_names(list(folders)), folders, strict=True)
    ]
    renderer = ChatRenderer(model.tokenizer, model.eos_token_ids)
    study(model, entrants, settings, Path(output) / settings.name, lambda: renderer.prompt, stop=stop)
