"""What a recipe would do, in numbers, from it and the models' configs. Nothing is loaded, started or written."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exittrain.config.schema import ArmSection, EvalSection, Recipe
from exittrain.errors import InputError
from exittrain.models.features import CACHE_BYTES
from exittrain.records.share import ROOTS
from exittrain.runtime import ranks
from exittrain.stages.costs import (
    CONTEXT_TOKENS,
    Loop,
    forward_bytes,
    kept_bytes,
    logit_bytes,
    matched_steps,
    weight_bytes,
)
from exittrain.stages.sizes import ModelSize, drafter_size, target_size

TRAINED_BYTES = 16  # a float32 parameter in training: weight, gradient, two Adam moments
CHECKPOINT_BYTES = 12  # weight and two Adam moments
KEPT_CHECKPOINTS = 2  # the newest complete one and the one being written
SAVED_BYTES = 4  # a parameter of a saved drafter
ROUND_TOKENS = 2  # assumed of a decoding round: one accepted token and the bonus token
GIB = float(1 << 30)
TARGET_NOTE = "target tokens: positions put through the target."
KEPT_NOTE = (
    f"A head's features and the target's states are computed once and kept, up to {CACHE_BYTES / GIB:g} GiB a process "
    "in host memory; beyond that they are computed again in every epoch."
)
DEFAULT_SEQUENCES = 1000  # assumed where the recipe takes "all there is"
DEFAULT_PROMPTS = 80  # of a task


@dataclass(frozen=True)
class StagePlan:
    """One row: `work` in words; num_tokens counts positions of the drafter (of the target where there is none yet),
    target_tokens those put through the target; bytes are None where a size is unknown."""

    stage: str
    work: str
    num_steps: int
    num_tokens: int
    target_tokens: int
    memory_bytes: float | None
    disk_bytes: float | None


@dataclass(frozen=True)
class Plan:
    rows: list[StagePlan]
    num_processes: int
    target: ModelSize | None
    drafter: ModelSize | None

    @property
    def disk_bytes(self) -> float:
        """What is known of it: rows of unknown size count as nothing."""
        return sum(row.disk_bytes or 0.0 for row in self.rows)


def make_plan(recipe: Recipe) -> Plan:
    """Estimates, rounded up in doubt: memory per process, disk in the run folder.

    Raises:
        InputError: the recipe's head does not fit its target.
    """
    target, drafter = target_size(recipe), drafter_size(recipe)
    sequences = recipe.data.train.count or _num_rows(recipe.data.train.path) or DEFAULT_SEQUENCES
    trained = sequences if recipe.data.heldout else max(1, round(sequences * (1 - recipe.data.heldout_fraction)))
    rows = []
    if recipe.target.scratch is not None and target is not None:
        rows.append(_scratch_row(recipe, target))
    rows.append(_data_row(recipe, sequences, target))
    if recipe.warmup is not None:
        rows.append(_warmup_row(recipe, trained, target, drafter))
    if recipe.collect is not None:
        rows.append(_collect_row(recipe, trained, target, drafter))
    if recipe.train is not None:
        rows.extend(_arm_rows(recipe, trained, target))
    if recipe.eval is not None:
        rows.append(_eval_row(recipe, recipe.eval, max(sequences - trained, 1), target, drafter))
        rows.append(StagePlan("report", "one HTML file", 0, 0, 0, 3e8, 5e6))
    return Plan(rows, ranks.world_size(), target, drafter)


def check_disk(recipe: Recipe, folder: Path) -> None:
    """Raises:
    InputError: the file system of `folder` has less room than the whole recipe is estimated to need.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    needed = make_plan(recipe).disk_bytes - used
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise InputError(
            f"the run needs about {needed / GIB:.1f} GiB more in {folder}, {free / GIB:.1f} GiB are free: "
            "make room, or set run_dir to another disk"
        )


def render(plan: Plan, recipe: Recipe, stages: Sequence[str] | None = None) -> str:
    """The plan as plain text, one row a stage (of `stages` only, when given)."""
    rows = [row for row in plan.rows if stages is None or row.stage.partition("/")[0] in stages]
    lines = [
        f"{recipe.name}: {plan.num_processes} process(es), {len(os.sched_getaffinity(0))} CPU(s)",
        f"target   {_model_line(plan.target, recipe.target.model or 'from nothing')}",
        f"drafter  {_model_line(plan.drafter, recipe.drafter.init or recipe.drafter.model or recipe.drafter.kind)}",
        f"{'stage':<22}{'steps':>7}{'tokens':>16}{'target tokens':>16}{'memory':>12}{'disk':>12}  work",
    ]
    for row in rows:
        sizes = "".join(f"{_gib(value):>12}" for value in (row.memory_bytes, row.disk_bytes))
        tokens = f"{row.num_tokens:>16,}{row.target_tokens:>16,}"
        lines.append(f"{row.stage:<22}{row.num_steps or '-':>7}{tokens}{sizes}  {row.work}")
    lines.append(f"disk in all: {_gib(sum(row.disk_bytes or 0.0 for row in rows))}. Estimates; nothing was started.")
    has_head = plan.drafter is not None and plan.drafter.head is not None
    return "\n".join([*lines, f"{TARGET_NOTE} {KEPT_NOTE}" if has_head else TARGET_NOTE])


def _scratch_row(recipe: Recipe, target: ModelSize) -> StagePlan:
    scratch = recipe.target.scratch
    assert scratch is not None
    micro = scratch.micro_batch_size or math.ceil(scratch.batch_size / ranks.world_size())
    memory = target.num_parameters * TRAINED_BYTES + micro * kept_bytes(target, scratch.length, scratch.length)
    memory += logit_bytes(micro * scratch.length, target.vocab_size)
    tokens = scratch.steps * scratch.batch_size * scratch.length
    disk = _training_disk(target, 1)
    return StagePlan("target", "train a target from nothing", scratch.steps, tokens, tokens, memory, disk)


def _data_row(recipe: Recipe, sequences: int, target: ModelSize | None) -> StagePlan:
    source, generation = recipe.data.train, recipe.data.generation
    generated = source.kind in ("prompts", "magpie") or source.regenerate
    work = f"{source.kind}, {sequences} sequences" + (", written by the target" if generated else "")
    if not generated:
        return StagePlan("data", work, 0, sequences * recipe.data.max_length, 0, 5e8, 10.0 * sequences * 512)
    tokens = sequences * (generation.max_new_tokens + generation.max_prompt_tokens)
    memory = None
    if target is not None:
        columns = generation.batch_size * (generation.max_new_tokens + generation.max_prompt_tokens)
        memory = weight_bytes(recipe, target) + forward_bytes(target, columns, recipe)
    return StagePlan("data", work, 0, tokens, tokens, memory, 10.0 * tokens)


def _warmup_row(recipe: Recipe, sequences: int, target: ModelSize | None, drafter: ModelSize | None) -> StagePlan:
    warmup = recipe.warmup
    assert warmup is not None
    loop = Loop(recipe, warmup, sequences, warmup.token_loss, trained=drafter, target=target)
    work = f"drafter from {recipe.drafter.init or recipe.drafter.kind}, {warmup.token_loss}"
    return _loop_row("warmup", work, loop, 1)


def _collect_row(recipe: Recipe, sequences: int, target: ModelSize | None, drafter: ModelSize | None) -> StagePlan:
    collect = recipe.collect
    assert collect is not None
    used = min(collect.sequences or sequences, sequences)
    trees, nodes = used * collect.anchors_per_sequence, recipe.tree.budget + 1
    disk = trees * nodes * (52.0 + 8.0 * collect.top_k_logprobs)
    work = f"{trees:,} trees of {recipe.tree.budget} nodes in {collect.shards} shards"
    scored = used * recipe.data.max_length + trees * recipe.tree.budget
    return StagePlan("collect", work, 0, trees * nodes, scored, _serving_bytes(recipe, target, drafter), disk)


def _arm_rows(recipe: Recipe, sequences: int, target: ModelSize | None) -> list[StagePlan]:
    train = recipe.train
    assert train is not None
    drafter = drafter_size(recipe, train.lora)
    loops = {name: Loop.of_arm(recipe, arm, sequences, drafter, target) for name, arm in train.arms.items()}
    rows = []
    for name, arm in train.arms.items():
        loop, work = _matched(loops, name, arm)
        adapters = "" if train.lora is None else f", adapters of rank {train.lora.rank}"
        rows.append(_loop_row(f"train/{name}", work + adapters, loop, 2))
    return rows


def _matched(loops: Mapping[str, Loop], name: str, arm: ArmSection) -> tuple[Loop, str]:
    """An arm's loop, of an arm that matches another's time with as many steps as arithmetic says; its work in words."""
    loop, role = loops[name], ", the control" if name == _control(loops[name].recipe) else ""
    if arm.match_time is None:
        weight = "" if arm.objective == "token" else f", lambda {arm.weight:g}"
        return loop, arm.objective + weight + role
    steps = matched_steps(loop, loops[arm.match_time])
    optim = loop.optim.model_copy(update={"steps": steps})
    return replace(
        loop, optim=optim
    ), f"{arm.objective}, as long as {arm.match_time}: steps by arithmetic, measured when it runs"


def _control(recipe: Recipe) -> str | None:
    return recipe.train.control if recipe.train else None


def _loop_row(stage: str, work: str, loop: Loop, saved: int) -> StagePlan:
    """saved: drafters written beside the checkpoints."""
    tokens = loop.passes * loop.trained_positions
    disk = None if loop.trained is None else _training_disk(loop.trained, saved)
    return StagePlan(stage, work, loop.optim.steps, tokens, loop.target_tokens, loop.memory_bytes, disk)


def _training_disk(size: ModelSize, saved: int) -> float:
    checkpoints = CHECKPOINT_BYTES * KEPT_CHECKPOINTS * size.trained_parameters
    return float(checkpoints + saved * SAVED_BYTES * size.num_parameters)


def _eval_row(
    recipe: Recipe, section: EvalSection, heldout: int, target: ModelSize | None, drafter: ModelSize | None
) -> StagePlan:
    """Every context's tree is scored; a decoding round puts a tree through the target for ROUND_TOKENS tokens."""
    arms, budget = 1 + (len(recipe.train.arms) if recipe.train else 0), recipe.tree.budget
    temperatures = len(section.temperatures)
    prompts = len(section.tasks) * (section.prompts_per_task or DEFAULT_PROMPTS)
    decoded = arms * temperatures * len(section.verifiers) * prompts * section.max_new_tokens if section.decode else 0
    contexts, cells = section.contexts or 0, arms * temperatures
    tokens = decoded + cells * contexts * (budget + 1)
    scored = decoded // ROUND_TOKENS * (budget + 1)
    if contexts:
        scored += (cells + temperatures * section.oracle) * (contexts * budget + heldout * recipe.data.max_length)
    work = f"{arms} drafters, temperatures {section.temperatures}, verifiers {', '.join(section.verifiers)}"
    return StagePlan("eval", work, 0, tokens, scored, _serving_bytes(recipe, target, drafter), 2e6 * arms)


def _serving_bytes(recipe: Recipe, target: ModelSize | None, drafter: ModelSize | None) -> float | None:
    """Both models in the target's dtype, and the target at work."""
    if target is None or drafter is None:
        return None
    rows = logit_bytes(CONTEXT_TOKENS, target.vocab_size)
    weights = weight_bytes(recipe, target) + weight_bytes(recipe, drafter)
    return weights + forward_bytes(target, CONTEXT_TOKENS, recipe) + rows


def _num_rows(path: str | None) -> int | None:
    """Lines of a local JSONL file."""
    found = next((root / path for root in (Path(), *ROOTS) if (root / path).is_file()), None) if path else None
    if found is None or found.suffix != ".jsonl":
        return None
    with open(found, "rb") as file:
        return sum(1 for line in file if line.strip())


def _model_line(size: ModelSize | None, name: str) -> str:
    if size is None:
        return f"{name} (its config is not known here: size, memory and disk are unknown)"
    line = f"{name}: {size.num_parameters / 1e6:,.1f} M parameters, {size.num_layers} layers"
    head = size.head
    if head is None:
        return f"{line}, vocabulary {size.vocab_size}"
    block = "" if head.block_size is None else f", blocks of {head.block_size}"
    features = ", ".join(map(str, head.feature_layers))
    return f"{line}, drafts {size.vocab_size} tokens, reads hidden states {features}{block}"


def _gib(value: float | None) -> str:
    return "?" if value is None else f"{value / GIB:.2f} GiB"
