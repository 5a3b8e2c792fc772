"""Stage `warmup`: the first drafter, made as the recipe says and trained on the token loss alone."""

from __future__ import annotations

from pathlib import Path

import torch

from exittrain.config.schema import HEADS, DrafterSection, Recipe
from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.layers import copy_layers
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.sampling import training_samplings
from exittrain.law.seeding import seed_for
from exittrain.models.target import TargetModel
from exittrain.records.files import read_json
from exittrain.records.shards import read_rows
from exittrain.runtime.ranks import barrier, from_main, is_main
from exittrain.stages.context import StageContext, say
from exittrain.stages.heads import dials_of, make_head
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.held_out import HeldOut
from exittrain.stages.training.loop import Hooks, train
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import deepspeed_config

STAGE = "warmup"
TRAINED_DTYPE = (
    torch.float32
)  # updates are lost in fewer bits; a DeepSpeed config with bf16 keeps float32 masters itself
EVAL_SEQUENCES, EVAL_ANCHORS = 16, 8  # where the recipe has no train section to say


def run_warmup(context: StageContext) -> None:
    """Write warmup/drafter, the start of every arm. Without a warmup section it is the drafter as made.

    Raises:
        InputError: the data was made for another target, or the drafter cannot be made.
        Interrupted: stopped by a signal, with a checkpoint.
    """
    key, recipe = context.stage_key(STAGE), context.recipe
    if not start_stage(context, STAGE, key):
        return
    target, folder = context.target(), context.run.stage(STAGE)
    sequences = training_sequences(context, target)
    drafter = first_drafter(recipe.drafter, target, sequences, seed_for(recipe.seed, "drafter"))
    drafter.dials = dials_of(recipe.drafter)
    if drafter.match is not None:
        say(f"{STAGE}: from {recipe.drafter.init or recipe.drafter.model}: {drafter.match}")
    if recipe.warmup is not None:
        seed = seed_for(recipe.seed, STAGE) % 2**31
        section = recipe.warmup
        changes = {"eval_every": max(1, section.steps // 2), "save_every": 100, "seed": seed}
        settings = LoopSettings.from_section(section.model_dump(), **changes)
        samplings = training_samplings(context.sampling, section.temperature)
        loss = LossSettings(
            token_loss=section.token_loss, samplings=samplings, shape=context.shape, unroll_from=section.unroll_from
        )
        held_out = held_out_of(context, target)
        hooks = Hooks(
            evaluate=None if held_out is None else lambda: held_out.measure(drafter),
            tracker=lambda step: context.tracker(STAGE, step),
            stop=context.stop,
            description=STAGE,
        )
        task = DrafterTask(drafter, target, sequences, settings, loss)
        train(task, settings, folder, engine_config(recipe), hooks)
    if is_main():
        drafter.save(folder / "drafter")
        context.run.finish(STAGE, key)
        say(f"{STAGE}: {recipe.warmup.steps if recipe.warmup else 0} steps; {folder / 'drafter'}")
    barrier()


def start_stage(context: StageContext, stage: str, key: str) -> bool:
    """False where the stage is done under `key`; else its folder is ready, with what was begun under `key`."""

    def begin() -> bool:
        if context.run.is_done(stage, key):
            return False
        context.run.begin(stage, key)
        return True

    return from_main(begin)


def first_drafter(section: DrafterSection, target: TargetModel, sequences: SequenceSet, seed: int) -> Drafter:
    """The recipe's drafter before any training: saved, layers of the target, another model, or from nothing.

    sequences: the training data, of which a head's draft vocabulary is made.
    """
    if section.init is not None:
        return load_drafter(section.init, target, TRAINED_DTYPE)
    if section.layers is not None:
        return copy_layers(target, section.layers, TRAINED_DTYPE)
    if section.model is not None:
        return load_drafter(section.model, target, TRAINED_DTYPE)
    if section.kind in HEADS:
        return make_head(section, target, sequences, seed)
    if section.shape is None:
        raise InputError("the recipe's drafter section names no init, layers, model or shape")
    model = make_causal_lm(
        target.vocab_size,
        **section.shape.model_dump(),
        max_positions=target.max_positions,
        eos_token_ids=target.eos_token_ids,
        tokenizer=target.tokenizer,
        seed=seed,
        dtype=TRAINED_DTYPE,
        name="drafter",
    )
    model.module.to(target.device)
    return CausalDrafter(model, "causal_lm", target.fingerprint())


def training_sequences(context: StageContext, target: TargetModel) -> SequenceSet:
    """The training data of the run.

    Raises:
        InputError: it was made by or for another target, so that its token ids or answers are not this target's.
    """
    folder = context.run.path / "data"
    made_for = read_json(folder / "manifest.json")["target"]
    if made_for["fingerprint"] != target.fingerprint():
        raise InputError(
            f"{folder} was made for target {made_for['name']!r}, whose weights are not {target.name!r}'s: "
            "run `exittrain data` again"
        )
    sequences = SequenceSet.from_rows(read_rows(folder / "train.parquet"), str(folder / "train.parquet"))
    if sequences.num_dropped:
        say(f"{sequences.num_dropped} training sequences have no trained token and are left out")
    return sequences


def held_out_of(context: StageContext, target: TargetModel) -> HeldOut | None:
    """What the run measures while it trains, or None when nothing is held out."""
    rows = read_rows(context.run.path / "data" / "heldout.parquet")
    if not any(any(row["loss_mask"]) for row in rows):
        return None
    train_section = context.recipe.train
    return HeldOut(
        target,
        SequenceSet.from_rows(rows),
        train_section.eval_sequences if train_section else EVAL_SEQUENCES,
        train_section.anchors_per_sequence if train_section else EVAL_ANCHORS,
        context.recipe.seed,
        context.shape,
        context.sampling,
        context.recipe.tree.builder,
    )


def engine_config(recipe: Recipe) -> dict[str, object]:
    """The DeepSpeed settings all of a recipe's training uses."""
    return deepspeed_config(recipe.train.deepspeed if recipe.train else "zero0")


def warm_drafter(context: StageContext) -> Path:
    """Where every arm starts."""
    return context.run.path / STAGE / "drafter"
