"""What a recipe would do, in numbers, from it and the models' configs. Nothing is loaded, started or written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exittrain.config.schema import OptimSection, Recipe
from exittrain.errors import InputError
from exittrain.records.share import ROOTS
from exittrain.runtime import ranks
from exittrain.stages.sizes import ModelSize, drafter_size, target_size

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINED_BYTES = 16  # a trained float32 parameter: weight, gradient, two Adam moments
CHECKPOINT_BYTES = 12  # weight and two Adam moments
KEPT_CHECKPOINTS = 2  # the newest complete one and the one being written
GIB = float(1 << 30)
DEFAULT_SEQUENCES = 1000  # assumed where the recipe takes "all there is"


@dataclass(frozen=True)
class StagePlan:
    """One row: `work` in words; tokens counts positions put through a model; bytes are None where a size is unknown."""

    stage: str
    work: str
    num_steps: int
    num_tokens: int
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
    """Estimates, rounded up in doubt: memory per process, disk in the run folder."""
    target = target_size(recipe)
    drafter = drafter_size(recipe, target)
    sequences = recipe.data.train.count or _num_rows(recipe.data.train.path) or DEFAULT_SEQUENCES
    rows = []
    scratch = recipe.target.scratch
    if scratch is not None and target is not None:
        memory = _training_bytes(target, scratch, scratch.length)
        rows.append(_optim_row("target", "train a target from nothing", scratch, scratch.length, memory, target))
    rows.append(_data_row(recipe, sequences, target))
    if recipe.warmup is not None:
        rows.append(_warmup_row(recipe, target, drafter))
    if recipe.collect is not None:
        rows.append(_collect_row(recipe, sequences, target, drafter))
    if recipe.train is not None:
        rows.extend(_arm_rows(recipe, target, drafter))
    if recipe.eval is not None:
        arms = 1 + (len(recipe.train.arms) if recipe.train else 0)
        cells = arms * len(recipe.eval.temperatures)
        decoded = cells * len(recipe.eval.verifiers) * len(recipe.eval.tasks) * (recipe.eval.prompts_per_task or 80)
        tokens = decoded * recipe.eval.max_new_tokens if recipe.eval.decode else 0
        tokens += cells * (recipe.eval.contexts or 0) * (recipe.tree.budget + 1)
        work = f"{arms} drafters, temperatures {recipe.eval.temperatures}, verifiers {', '.join(recipe.eval.verifiers)}"
        both = _sum(_weights(recipe, target), _weights(recipe, drafter))
        rows.append(StagePlan("eval", work, 0, tokens, both, 2e6 * arms))
        rows.append(StagePlan("report", "one HTML file", 0, 0, 3e8, 5e6))
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
        f"{'stage':<22}{'steps':>7}{'tokens':>14}{'memory':>12}{'disk':>12}  work",
    ]
    for row in rows:
        sizes = "".join(f"{_gib(value):>12}" for value in (row.memory_bytes, row.disk_bytes))
        lines.append(f"{row.stage:<22}{row.num_steps or '-':>7}{row.num_tokens:>14,}{sizes}  {row.work}")
    lines.append(f"disk in all: {_gib(sum(row.disk_bytes or 0.0 for row in rows))}. Estimates; nothing was started.")
    return "\n".join(lines)


def _optim_row(
    stage: str, work: str, optim: OptimSection, length: int, memory: float | None, model: ModelSize | None
) -> StagePlan:
    disk = None if model is None else model.num_parameters * (CHECKPOINT_BYTES * KEPT_CHECKPOINTS + 4.0)
    return StagePlan(stage, work, optim.steps, optim.steps * optim.batch_size * length, memory, disk)


def _data_row(recipe: Recipe, sequences: int, target: ModelSize | None) -> StagePlan:
    source = recipe.data.train
    generated = source.kind in ("prompts", "magpie") or source.regenerate
    work = f"{source.kind}, {sequences} sequences" + (", written by the target" if generated else "")
    if not generated:
        return StagePlan("data", work, 0, sequences * recipe.data.max_length, 5e8, 10.0 * sequences * 512)
    tokens = sequences * (recipe.data.generation.max_new_tokens + recipe.data.generation.max_prompt_tokens)
    memory = None
    if target is not None:
        rows = recipe.data.generation.batch_size * recipe.data.max_length
        memory = target.num_parameters * BYTES[recipe.target.dtype] + _cache_bytes(target, rows, recipe)
    return StagePlan("data", work, 0, tokens, memory, 10.0 * tokens)


def _warmup_row(recipe: Recipe, target: ModelSize | None, drafter: ModelSize | None) -> StagePlan:
    warmup = recipe.warmup
    assert warmup is not None
    training = None if drafter is None else _training_bytes(drafter, warmup, recipe.data.max_length)
    memory = _sum(_weights(recipe, target), training)
    work = f"drafter from {recipe.drafter.init or recipe.drafter.kind}, {warmup.token_loss}"
    return _optim_row("warmup", work, warmup, recipe.data.max_length, memory, drafter)


def _collect_row(recipe: Recipe, sequences: int, target: ModelSize | None, drafter: ModelSize | None) -> StagePlan:
    collect = recipe.collect
    assert collect is not None
    trees = min(collect.sequences or sequences, sequences) * collect.anchors_per_sequence
    nodes = recipe.tree.budget + 1
    disk = trees * nodes * (52.0 + 8.0 * collect.top_k_logprobs)
    work = f"{trees:,} trees of {recipe.tree.budget} nodes in {collect.shards} shards"
    return StagePlan("collect", work, 0, trees * nodes, _sum(_weights(recipe, target), _weights(recipe, drafter)), disk)


def _arm_rows(recipe: Recipe, target: ModelSize | None, drafter: ModelSize | None) -> list[StagePlan]:
    train = recipe.train
    assert train is not None
    rows = []
    for name, arm in train.arms.items():
        steps = arm.steps or train.steps
        anchors = 0 if arm.objective == "token" else arm.anchors_per_sequence or train.anchors_per_sequence
        length = recipe.data.max_length + anchors * (recipe.tree.budget + 1)
        training = None if drafter is None else _training_bytes(drafter, train, length)
        work = arm.objective + (f", as long as {arm.match_time}" if arm.match_time else f", lambda {arm.weight:g}")
        optim = train.model_copy(update={"steps": steps})
        memory = _sum(_weights(recipe, target), training)
        rows.append(_optim_row(f"train/{name}", work, optim, length, memory, drafter))
    return rows


def _training_bytes(model: ModelSize, optim: OptimSection, length: int) -> float:
    """Trained parameters, and one micro-batch's activations: 34 hidden-sized numbers a layer, 3 rows of logits."""
    micro = optim.micro_batch_size or max(optim.batch_size // ranks.world_size(), 1)
    positions = micro * length
    activations = positions * (34.0 * model.hidden_size * model.num_layers + 3.0 * model.vocab_size) * 4
    return model.num_parameters * TRAINED_BYTES + activations


def _cache_bytes(model: ModelSize, positions: int, recipe: Recipe) -> float:
    return 2.0 * positions * model.num_layers * model.kv_width * BYTES[recipe.target.dtype]


def _weights(recipe: Recipe, model: ModelSize | None) -> float | None:
    return None if model is None else float(model.num_parameters * BYTES[recipe.target.dtype])


def _num_rows(path: str | None) -> int | None:
    """Lines of a local JSONL file."""
    found = next((root / path for root in (Path(), *ROOTS) if (root / path).is_file()), None) if path else None
    if found is None or found.suffix != ".jsonl":
        return None
    with open(found, "rb") as file:
        return sum(1 for line in file if line.strip())


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _model_line(size: ModelSize | None, name: str) -> str:
    if size is None:
        return f"{name} (not on this machine: its size, memory and disk are unknown)"
    return (
        f"{name}: {size.num_parameters / 1e6:,.1f} M parameters, {size.num_layers} layers, vocabulary {size.vocab_size}"
    )


def _gib(value: float | None) -> str:
    return "?" if value is None else f"{value / GIB:.2f} GiB"
