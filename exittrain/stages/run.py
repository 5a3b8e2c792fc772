"""All stages in order. What is done under the same key is not done again; what is not, goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from exittrain.errors import InputError
from exittrain.records.files import clean_temporary
from exittrain.runtime import ranks
from exittrain.runtime.lock import hold
from exittrain.runtime.provenance import collect_provenance
from exittrain.stages.context import STAGES, StageContext, say
from exittrain.stages.plan import check_disk
from exittrain.stages.sources import check_sources

FUNCTIONS = {
    "target": ("scratch", "run_target"),
    "data": ("data", "run_data"),
    "warmup": ("warmup", "run_warmup"),
    "collect": ("collect", "run_collect"),
    "train": ("train", "run_train"),
    "eval": ("evaluate", "run_eval"),
    "report": ("report", "run_report"),
}
ALONE = ("collect", "eval", "report")  # the main rank's work; every rank enters the other stages


def wanted(context: StageContext) -> list[str]:
    """The stages this recipe has, in order."""
    recipe = context.recipe
    absent = {
        "target": recipe.target.scratch is None,
        "warmup": not any((recipe.warmup, recipe.collect, recipe.train, recipe.eval)),
        "collect": recipe.collect is None,
        "train": recipe.train is None,
        "eval": recipe.eval is None,
        "report": recipe.eval is None,
    }
    return [name for name in STAGES if not absent.get(name, False)]


def run_all(context: StageContext) -> None:
    """Every stage of the recipe, resuming.

    Raises:
        InputError: bad input, a run folder in use, too little disk.
        Interrupted: a signal came and the state is saved.
    """
    run_stages(context, wanted(context))


def run_stages(context: StageContext, names: Sequence[str]) -> None:
    """The named stages, in order, under the run folder's lock. Bad input is found before anything is written.

    Raises:
        InputError: as `run_all`; also a stage the recipe has not, or one whose upstream stages are not done.
        Interrupted: a signal came and the state is saved.
    """
    ranks.setup(context.device, context.run.path)
    _check(context, names)
    check_sources(context, names)
    if not ranks.is_main():
        _each(context, names)
        return
    check_disk(context.recipe, context.run.path)
    with hold(context.run.path):
        clean_temporary(context.run.path)
        context.run.write_recipe(context.recipe)
        context.run.write_provenance(collect_provenance())
        _each(context, names)


def _check(context: StageContext, names: Sequence[str]) -> None:
    available, run = wanted(context), context.run
    for name in names:
        if name not in available:
            section = {"target": "target.scratch", "report": "eval"}.get(name, name)  # what the stage needs
            raise InputError(f"the recipe has no {section!r} section")
        for before in available[: available.index(name)]:
            if before in names or (before == "collect" and not _uses_shards(context)):
                continue
            stored = run.stored_key(before)
            if stored != context.stage_key(before):
                state = "has not been run" if stored is None else "was made by another recipe"
                verb = "data" if before == "target" else before  # `data` makes the target too
                remedy = f"run `exittrain {verb}` or `exittrain run` first"
                raise InputError(f"stage {before!r} {state} in {run.path}: {remedy}")


def _each(context: StageContext, names: Sequence[str]) -> None:
    for name in names:
        if ranks.any_rank(context.stop.is_set):  # one rank's signal is everyone's
            context.stop.set(context.stop.name or "a signal to another rank")
        context.stop.raise_if_set()
        run_stage(context, name)


def run_stage(context: StageContext, name: str) -> None:
    """One stage, unless it is done under this recipe's key. Says why a stored result is not used."""
    key = context.stage_key(name)
    status = ranks.from_main(lambda: _prepare(context, name, key))
    if status == "done":
        return
    module, function = FUNCTIONS[name]
    stage: Callable[[StageContext], None] = getattr(import_module(f"exittrain.stages.{module}"), function)
    if name not in ALONE:
        stage(context)
    elif ranks.is_main():
        with ranks.alone():
            stage(context)
    if ranks.is_main() and context.run.stored_key(name) != key:
        context.run.finish(name, key)
    ranks.barrier()


def _prepare(context: StageContext, name: str, key: str) -> str:
    run = context.run
    stored = run.stored_key(name)
    if stored == key:
        damage = run.damage(name)
        if damage is None:
            say(f"{name}: done")
            return "done"
        say(f"{name}: again, because {damage}")
    elif stored is not None or run.started_key(name) not in (None, key):
        say(f"{name}: again, because the recipe, its data or what it stands on has changed")
    elif run.started_key(name) == key:
        say(f"{name}: going on")
    else:
        say(f"{name}: starting")
    if name not in ("data", "train"):  # data replaces itself when all is read; train's arms have keys of their own
        run.begin(name, key)
    return "todo"


def _uses_shards(context: StageContext) -> bool:
    train = context.recipe.train
    return train is not None and any(arm.source == "shards" for arm in train.arms.values())
