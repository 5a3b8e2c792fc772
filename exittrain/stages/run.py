"""All stages in order. What is done under the same key is not done again; what is not, goes on where it stopped."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.records.files import TEMPORARY, clean_temporary
from exittrain.runtime import ranks
from exittrain.runtime.crew import Crew
from exittrain.runtime.lock import PARTS, hold
from exittrain.runtime.parts import WHOLE
from exittrain.runtime.provenance import collect_provenance
from exittrain.stages.context import STAGES, StageContext, say
from exittrain.stages.disk import check_disk
from exittrain.stages.sources import check_sources

FUNCTIONS = {
    "target": ("scratch", "run_target"),
    "data": ("data", "run_data"),
    "warmup": ("warmup", "run_warmup"),
    "train": ("train", "run_train"),
    "report": ("report", "run_report"),
}
CHANGED = "the recipe, its data or what it stands on has changed"  # since a stage was done or begun
ALONE = ("report",)  # the main rank's work; every rank enters the other stages
SPLIT = {"collect": ("collect", "collect"), "eval": ("evaluate", "eval")}  # jobs share work_..., one does finish_...
CHECKS = {"eval": ("evaluate", "check_eval")}  # what can still refuse, asked before an earlier result is given up


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

    With `context.part`, this job's share of one stage: other jobs do the others at the same time, earlier or later, and
    the one that finds all of it there finishes the stage.

    Raises:
        InputError: as `run_all`; also a stage the recipe has not, one whose upstream stages are not done, a part of
            several stages or of one that falls into no parts, or ranks that were given different work.
        Interrupted: a signal came and the state is saved.
    """
    ranks.setup(context.device, context.run.path, context.stop)
    part = f"{context.part.index}/{context.part.count}"
    task = {"the run folder": str(context.run.path), "the stages": ", ".join(names), "--part": part}
    ranks.check_alike({**task, **_settings(context.recipe.model_dump(mode="json"))})
    if context.part != WHOLE:
        _run_part(context, names)
        return
    with ExitStack() as held:
        ranks.from_main(lambda: _take_run(context, names, held))
        held.callback(context.close)
        _each(context, names)


def _settings(section: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A recipe's values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= _settings(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return flat


def _take_run(context: StageContext, names: Sequence[str], held: ExitStack) -> None:
    """The main rank's checks; then the folder is ours until `held` is closed."""
    run = context.run
    _check(context, names)
    check_sources(context, names)
    check_disk(context, names)
    held.enter_context(hold(run.path))
    clean_temporary(run.path)
    shutil.rmtree(run.path / PARTS, ignore_errors=True)
    _write_origin(context)


def _write_origin(context: StageContext) -> None:
    context.run.write_recipe(context.recipe)
    context.run.write_provenance(collect_provenance())


def _run_part(context: StageContext, names: Sequence[str]) -> None:
    """All ranks of one job of several. The main one is the job's place in the crew."""
    name = ranks.from_main(lambda: _the_part_of(names))
    with Crew(context.run.path, name, context.part, context.stop.raise_if_set) as crew:
        if ranks.from_main(lambda: _join(context, name, crew)) == "done":
            return
        _function(SPLIT[name], "work_")(context)
        ranks.from_main(lambda: _leave(context, name, crew))


def _the_part_of(names: Sequence[str]) -> str:
    if len(names) != 1 or names[0] not in SPLIT:
        raise InputError(f"--part is for one stage, {' or '.join(SPLIT)}, not for {', '.join(names)}")
    return names[0]


def _join(context: StageContext, name: str, crew: Crew) -> str:
    _check(context, [name])
    check_sources(context, [name])
    with crew.joining(context.stage_key(name)) as alone:
        if alone:  # what killed jobs left may be written no more, and the recipe is that of all who follow
            clean_temporary(context.run.path / name)
            _write_origin(context)
        _look_again(context.run.stage(name))
        return _prepare(context, name)


def _leave(context: StageContext, name: str, crew: Crew) -> None:
    with crew.leaving() as alone:
        _look_again(context.run.stage(name))
        if context.run.stored_key(name) == context.stage_key(name):
            say(f"{name}: done")  # another job was here first
        elif not _function(SPLIT[name], "finish_")(context):
            part = f"part {context.part.index}/{context.part.count}"
            say(f"{name}: {part} is done; the part that ends last finishes {name}")
        if alone:
            clean_temporary(context.run.path / name)


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
                if stored is None and (mark := run.mark_damage(before)) is not None:
                    state = f"cannot be used ({mark})"
                raise InputError(f"stage {before!r} {state} in {run.path}: {_remedy(before)} first")
            if (damage := run.damage(before)) is not None:
                raise InputError(f"{damage}: {_remedy(before)} first, which makes anew what is damaged")


def _remedy(stage: str) -> str:
    verb = "data" if stage == "target" else stage  # `data` makes the target too
    return f"run `exittrain {verb}` or `exittrain run`"


def _each(context: StageContext, names: Sequence[str]) -> None:
    for name in names:
        ranks.raise_if_stopped(context.stop)  # one rank's signal is everyone's
        run_stage(context, name)


def run_stage(context: StageContext, name: str) -> None:
    """One stage, unless it is done under this recipe's key. Says why a stored result is not used."""
    if ranks.from_main(lambda: _prepare(context, name)) == "done":
        return
    if name in SPLIT:
        _function(SPLIT[name], "work_")(context)
        ranks.from_main(lambda: _finish(context, name))
        return
    if name in ALONE:
        ranks.from_main(lambda: _alone(context, name))
    else:
        _function(FUNCTIONS[name])(context)
    ranks.from_main(lambda: _mark(context, name))


def _function(place: tuple[str, str], beginning: str = "") -> Callable[[StageContext], Any]:
    """A stage's function by (module of exittrain.stages, name), imported when its turn comes."""
    module, name = place
    found: Callable[[StageContext], Any] = getattr(import_module(f"exittrain.stages.{module}"), beginning + name)
    return found


def _look_again(folder: Path) -> None:
    """Show here what other nodes have done in a stage's folder: a client of a network file system may go by what it
    saw some seconds ago, but asks the server about a folder that it has just changed itself."""
    for place in (folder, *(sub for sub in folder.iterdir() if sub.is_dir())):
        file = place / f"{TEMPORARY}look-{secrets.token_hex(4)}"
        file.touch()
        file.unlink(missing_ok=True)


def _finish(context: StageContext, name: str) -> None:
    _look_again(context.run.stage(name))
    if not _function(SPLIT[name], "finish_")(context):
        raise InputError(f"{name}: what was just written is not there: run again")


def _alone(context: StageContext, name: str) -> None:
    with ranks.alone():
        _function(FUNCTIONS[name])(context)


def _mark(context: StageContext, name: str) -> None:
    key = context.stage_key(name)
    if context.run.stored_key(name) != key:
        context.run.finish(name, key)


def _prepare(context: StageContext, name: str) -> str:
    """Make the stage's folder ready: "done" where nothing is left to do, else "todo"."""
    run, key = context.run, context.stage_key(name)
    stored = run.stored_key(name)
    if stored == key:
        damage = run.damage(name)
        if damage is None:
            say(f"{name}: done")
            return "done"
        say(f"{name}: again, because {damage}")
    elif (mark := run.mark_damage(name)) is not None:
        say(f"{name}: again, because {mark}")
    elif stored is not None or run.started_key(name) not in (None, key):
        say(f"{name}: again, because {CHANGED}")
    elif run.started_key(name) == key:
        say(f"{name}: going on")
    else:
        say(f"{name}: starting")
    if name in CHECKS and run.started_key(name) != key:
        _function(CHECKS[name])(context)
    check_disk(context, [name])  # again: others write to this disk too
    if name == "train":  # its arms have keys of their own; their sums are taken anew when all are done
        run.forget(name)
    elif name != "data":  # which replaces itself when all is read
        run.begin(name, key)
    return "todo"


def _uses_shards(context: StageContext) -> bool:
    train = context.recipe.train
    return train is not None and any(arm.source == "shards" for arm in train.arms.values())
