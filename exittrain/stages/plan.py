"""What a recipe would do, in numbers, from it and the models' configs. Nothing is loaded, started or written."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from exittrain.config.schema import ArmSection, EvalSection, Recipe
from exittrain.models.features import CACHE_BYTES
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
from exittrain.stages.disk import DEFAULT_PROMPTS, num_sequences, stage_bytes
from exittrain.stages.sizes import ModelSize, drafter_size, target_size

TRAINED_BYTES = 16  # a float32 parameter in training: weight, gradient, two Adam moments
ROUND_TOKENS = 2  # assumed of a decoding round: one accepted token and the bonus token
GIB = float(1 << 30)
SPREAD_NOTE = "target.device_map: the memory of a process is that of all devices its target lies on, together."
TARGET_NOTE = "target tokens: positions put through the target."
KEPT_NOTE = (
    f"A head's features and the target's states are computed once and kept, up to {CACHE_BYTES / GIB:g} GiB a process "
    "in host memory; beyond that they are computed again in every epoch."
)


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
    """Estimates, rounded up in doubt: memory per process, disk in the run folder (stages/disk.py).

    Raises:
        InputError: the recipe's head does not fit its target.
    """
    target, drafter = target_size(recipe), drafter_size(recipe)
    sequences, disk = num_sequences(recipe), stage_bytes(recipe)
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
        rows.append(StagePlan("report", "one HTML file", 0, 0, 0, 3e8, None))
    rows = [replace(row, disk_bytes=disk[row.stage]) for row in rows]
    return Plan(rows, ranks.world_size(), target, drafter)


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
    if recipe.target.device_map is not None:
        lines.append(SPREAD_NOTE)
    has_head = plan.drafter is not None and plan.drafter.head is not None
    return "\n".join([*lines, f"{TARGET_NOTE} {KEPT_NOTE}" if has_head else TARGET_NOTE])


def _scratch_row(recipe: Recipe, target: ModelSize) -> StagePlan:
    scratch = recipe.target.scratch
    assert scratch is not None
    micro = scratch.micro_batch_size or math.ceil(scratch.batch_size / ranks.world_size())
    memory = target.num_parameters * TRAINED_BYTES + micro * kept_bytes(target, scratch.length, scratch.length)
    memory += logit_bytes(micro * scratch.length, target.vocab_size)
    tokens = scratch.steps * scratch.batch_size * scratch.length
    return StagePlan("target", "train a target from nothing", scratch.steps, tokens, tokens, memory, None)


def _data_row(recipe: Recipe, sequences: int, target: ModelSize | None) -> StagePlan:
    source, generation = recipe.data.train, recipe.data.generation
    generated = source.kind in ("prompts", "magpie") or source.regenerate
    work = f"{source.kind}, {sequences} sequences" + (", written by the target" if generated else "")
    if not generated:
        return StagePlan("data", work, 0, sequences * recipe.data.max_length, 0, 5e8, None)
    tokens = sequences * (generation.max_new_tokens + generation.max_prompt_tokens)
    memory = None
    if target is not None:
        columns = generation.batch_size * (generation.max_new_tokens + generation.max_prompt_tokens)
        memory = weight_bytes(recipe, target) + forward_bytes(target, columns, recipe)
    return StagePlan("data", work, 0, tokens, tokens, memory, None)


def _warmup_row(recipe: Recipe, sequences: int, target: ModelSize | None, drafter: ModelSize | None) -> StagePlan:
    warmup = recipe.warmup
    assert warmup is not None
    loop = Loop(
        recipe, warmup, sequences, warmup.token_loss, trained=drafter, target=target, unroll_from=warmup.unroll_from
    )
    work = f"drafter from {recipe.drafter.init or recipe.drafter.kind}, {warmup.token_loss}"
    return _loop_row("warmup", work, loop)


def _collect_row(recipe: Recipe, sequences: int, target: ModelSize | None, drafter: ModelSize | None) -> StagePlan:
    collect = recipe.collect
    assert collect is not None
    used = min(collect.sequences or sequences, sequences)
    trees, nodes = used * collect.anchors_per_sequence, recipe.tree.budget + 1
    work = f"{trees:,} trees of {recipe.tree.budget} nodes in {collect.shards} shards"
    scored = used * recipe.data.max_length + trees * recipe.tree.budget
    return StagePlan("collect", work, 0, trees * nodes, scored, _serving_bytes(recipe, target, drafter), None)


def _arm_rows(recipe: Recipe, sequences: int, target: ModelSize | None) -> list[StagePlan]:
    train = recipe.train
    assert train is not None
    drafter = drafter_size(recipe, train.lora)
    loops = {name: Loop.of_arm(recipe, arm, sequences, drafter, target) for name, arm in train.arms.items()}
    rows = []
    for name, arm in train.arms.items():
        loop, work = _matched(loops, name, arm)
        adapters = "" if train.lora is None else f", adapters of rank {train.lora.rank}"
        rows.append(_loop_row(f"train/{name}", work + adapters, loop))
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


def _loop_row(stage: str, work: str, loop: Loop) -> StagePlan:
    tokens = round(loop.passes * loop.mean_positions)
    return StagePlan(stage, work, loop.optim.steps, tokens, loop.target_tokens, loop.memory_bytes, None)


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
    return StagePlan("eval", work, 0, tokens, scored, _serving_bytes(recipe, target, drafter), None)


def _serving_bytes(recipe: Recipe, target: ModelSize | None, drafter: ModelSize | None) -> float | None:
    """Both models in the target's dtype, and the target at work."""
    if target is None or drafter is None:
        return None
    rows = logit_bytes(CONTEXT_TOKENS, target.vocab_size)
    weights = weight_bytes(recipe, target) + weight_bytes(recipe, drafter)
    return weights + forward_bytes(target, CONTEXT_TOKENS, recipe) + rows


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
