"""A run as a chain of SLURM jobs, one a stage, each after the one before it has ended well.

Nothing is half submitted: the first job is held until all of the chain are in the queue and written down, and what
SLURM took is cancelled when it refuses the rest. A stage made of pieces may be an array, one job to SLURM's commands:
it is submitted, held, released, waited for and cancelled by one number.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exittrain.config.schema import Recipe
from exittrain.errors import InputError
from exittrain.records.files import write_text
from exittrain.runtime.lock import hold
from exittrain.stages.context import StageContext, say
from exittrain.stages.disk import check_disk
from exittrain.stages.run import wanted
from exittrain.stages.sources import check_sources
from exittrain.stages.submit import commands
from exittrain.stages.submit.profile import DEFAULT, VERBS, Profile, Verb, build_profile, load_profile, resources
from exittrain.stages.submit.record import FILE, Job, Record, read_record
from exittrain.stages.submit.script import event_folder, log_folder, render, script_folder


@dataclass(frozen=True)
class StageJob:
    """A job to be: its script's text, the file it goes to, relative to the run folder, and the tasks of its array."""

    stage: Verb
    name: str
    script: str
    text: str
    parts: int


def chosen_profile(name: str | None, overrides: Sequence[str], run: Path) -> Profile:
    """The profile that is asked for; without a name the one of the run's last submission, or the default.

    Raises:
        InputError: as `load_profile`.
    """
    before = read_record(run) if name is None else None
    if before is None:
        return load_profile(name or DEFAULT, overrides)
    return build_profile(before.profile, overrides, f"the profile in {script_folder(run) / FILE}")


def stage_jobs(context: StageContext, profile: Profile) -> list[StageJob]:
    """The jobs of all stages that are not done under the recipe, in order.

    Raises:
        InputError: resources that do not fit a stage, or what the recipe names cannot be had.
    """
    names = wanted(context)
    check_sources(context, names)
    run, todo = context.run, [name for name in names if not context.run.is_done(name, context.stage_key(name))]
    folder, path = Path.cwd(), run.path.resolve()
    profile, jobs = _with_pieces_for_all(profile, context.recipe, todo), []
    for verb in (verb for verb in VERBS if verb in names):
        text, parts = render(profile, verb, context.recipe.name, path, folder), resources(profile, verb).array
        if verb in todo or (verb == "data" and "target" in todo):
            jobs.append(StageJob(verb, f"{context.recipe.name}-{verb}", f"slurm/{verb}.sbatch", text, parts))
    return jobs


def _with_pieces_for_all(profile: Profile, recipe: Recipe, todo: Sequence[str]) -> Profile:
    """An array of more jobs than collect has shards would leave some with nothing to do: it gets as many as shards."""
    own = profile.stages.get("collect")
    if recipe.collect is None or own is None or own.array is None or own.array <= recipe.collect.shards:
        return profile
    shards = recipe.collect.shards
    if "collect" in todo:
        say(f"collect: {shards} job(s), not {own.array}: the recipe has {shards} shard(s) (collect.shards)")
    return profile.model_copy(
        update={"stages": {**profile.stages, "collect": own.model_copy(update={"array": shards})}}
    )


def plan_text(jobs: Sequence[StageJob], run: Path) -> str:
    """The scripts and the commands that would submit them."""
    parts = []
    for i, job in enumerate(jobs):
        after = f" --dependency=afterok:ID_OF_{jobs[i - 1].stage.upper()} --kill-on-invalid-dep=yes" if i else ""
        file = shlex.quote(str(run.resolve() / job.script))
        parts.append(f"# ---- sbatch{after} {file}\n{job.text}")
    return "\n".join(parts)


def submit(context: StageContext, profile: Profile) -> list[Job]:
    """Write the scripts of what is left to do and hand them to SLURM; returns the jobs, none when all is done.

    Raises:
        InputError: as `stage_jobs`; too little disk, a run folder in use, a chain of it in the queue, no SLURM, or a
            job that SLURM refuses. Nothing is in the queue then.
    """
    jobs, run = stage_jobs(context, profile), context.run.path.resolve()
    if not jobs:
        return []
    if not commands.has_slurm():
        raise InputError("sbatch is not on PATH, so nothing can be submitted here: --plan prints the scripts")
    check_disk(context, wanted(context))
    keys = {name: context.stage_key(name) for name in wanted(context)}
    _refuse_a_live_chain(run)  # before the lock too, which a job that runs would hold
    with hold(run):
        _refuse_a_live_chain(run)
        log_folder(run).mkdir(parents=True, exist_ok=True)
        event_folder(run).mkdir(exist_ok=True)
        for job in jobs:
            write_text(run / job.script, job.text)
        if not (run / "recipe.yaml").exists():  # what SLURM refuses is a run too, one that has not started
            context.run.write_recipe(context.recipe)
        record = _submit_all(jobs, run, Record(keys, profile.model_dump(mode="json")))
        context.run.write_recipe(context.recipe)
    commands.release(record.jobs[0].job_id)  # not before the lock is free: the job takes it
    return list(record.jobs)


def _refuse_a_live_chain(run: Path) -> None:
    """Raises:
    InputError: jobs of an earlier submission wait or run; two chains would meet in one folder.
    """
    before = read_record(run)
    live = [job for job in before.jobs if _is_live(job)] if before else []
    if live:
        ids = " ".join(job.job_id for job in live)
        stages = ", ".join(job.stage for job in live)
        raise InputError(
            f"{run} is in the queue ({stages}): `exittrain status` shows it, `scancel {ids}` ends it; submit again then"
        )


def _is_live(job: Job) -> bool:
    return any(state.is_live and state.name == job.name for state in commands.job_states(job.job_id))


def _submit_all(jobs: Sequence[StageJob], run: Path, record: Record) -> Record:
    """Each job after the one before it, the first held. All or none.

    Raises:
        InputError: SLURM refused one; says whether what it had taken is out of the queue again.
    """
    before = read_record(run)
    taken: list[Job] = []
    try:
        for job in jobs:
            after = taken[-1].job_id if taken else None
            job_id = commands.sbatch(run / job.script, after, after is None)
            taken.append(Job(job.stage, job_id, job.name, job.script, job.parts))
            record = Record(record.keys, record.profile, tuple(taken))
            record.write(run)
        return record
    except BaseException as error:  # also an interrupt from the keyboard
        complaint = commands.cancel([job.job_id for job in taken])
        if complaint:
            say(f"jobs {' '.join(job.job_id for job in taken)} could not be cancelled ({complaint})")
        elif before is not None:
            before.write(run)
        elif taken:
            (script_folder(run) / FILE).unlink(missing_ok=True)
        if isinstance(error, InputError) and not complaint:
            raise InputError(f"nothing was submitted: {error}") from None
        raise
