"""Stage `train`: every arm of the recipe, from the same warm start, through the same loop."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from exittrain.config.schema import ArmSection
from exittrain.drafters.adapter import add_adapter
from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.load import load_drafter
from exittrain.errors import InputError
from exittrain.law.sampling import training_samplings
from exittrain.law.seeding import generator_for, seed_for
from exittrain.models.target import TargetModel
from exittrain.records.files import read_json, write_json
from exittrain.records.shards import read_shards
from exittrain.runtime.ranks import barrier, from_main, is_main, on_all, raise_if_stopped
from exittrain.stages.collect import collected_generators
from exittrain.stages.context import StageContext, say
from exittrain.stages.heads import dials_of
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.held_out import HeldOut, staleness
from exittrain.stages.training.loop import Hooks, Trainer, train
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.trees import StoredTrees
from exittrain.stages.warmup import (
    TRAINED_DTYPE,
    engine_config,
    held_out_of,
    start_stage,
    training_sequences,
    warm_drafter,
)

STAGE = "train"
PROBED_STEPS = 12  # of each of two arms, side by side, to match their times
STALENESS_TREES = 64


def run_train(context: StageContext) -> None:
    """Train what is left of the arms, each in train/<arm>/ with drafters best/ and last/.

    Raises:
        InputError: arms that wait for each other, stored trees of another target, data of another target.
        Interrupted: stopped by a signal, with a checkpoint of the arm in work.
    """
    if context.recipe.train is None:
        raise InputError("the recipe has no 'train' section")
    todo = [
        arm for arm in arm_order(context) if start_stage(context, f"{STAGE}/{arm}", context.stage_key(f"train/{arm}"))
    ]
    if not todo:
        return
    target = on_all(context.target)
    sequences, held_out = on_all(lambda: (training_sequences(context, target), held_out_of(context, target)))
    for arm in todo:
        raise_if_stopped(context.stop)
        _run_arm(context, arm, target, sequences, held_out)


def arm_order(context: StageContext) -> list[str]:
    """The recipe's arms, each after the arm whose time it matches.

    Raises:
        InputError: an arm matches the time of itself, of an unknown arm, or in a circle.
    """
    assert context.recipe.train is not None  # the caller has looked
    order: list[str] = []
    waiting = list(context.recipe.train.arms)
    while waiting:
        ready = [name for name in waiting if context.arm(name).match_time in (None, *order)]
        if not ready:
            raise InputError(f"arms {', '.join(waiting)} wait for each other's time: 'match_time' goes in a circle")
        order += ready
        waiting = [name for name in waiting if name not in ready]
    return order


class Arm:
    """One arm ready to run: its drafter, task and settings, all fresh from the warm start."""

    def __init__(
        self, context: StageContext, name: str, steps: int, target: TargetModel, sequences: SequenceSet
    ) -> None:
        section, train_section = context.arm(name), context.recipe.train
        assert train_section is not None and section.steps is not None and section.lr is not None
        self.drafter: Drafter = load_drafter(warm_drafter(context), target, TRAINED_DTYPE)
        self.drafter.dials = dials_of(context.recipe.drafter)
        self.loss = loss_settings(context, section, train_section.token_loss)
        # One seed for all arms: they see the same sequences, in the same order, at the same steps.
        seed = seed_for(context.recipe.seed, STAGE) % 2**31
        if train_section.lora is not None:
            if not isinstance(self.drafter, CausalDrafter):
                raise InputError("'train.lora' is for draft LMs: a head is small, train it whole (remove 'train.lora')")
            add_adapter(self.drafter, **train_section.lora.model_dump(), seed=seed)
        self.settings = LoopSettings.from_section(train_section.model_dump(), steps=steps, lr=section.lr, seed=seed)
        self.stored = None
        if section.source == "shards" and self.loss.uses_trees:
            rows = on_all(lambda: read_shards(context.run.path / "collect"))
            self.stored = StoredTrees.from_rows(
                rows, sequences, self.loss.samplings[0].temperature, target.fingerprint()
            )
            bare = sum(not len(members) for members in self.stored.members)
            if bare:
                say(f"{name}: {bare} of {len(sequences)} sequences have no stored tree: token loss only")
        self.task = DrafterTask(self.drafter, target, sequences, self.settings, self.loss, self.stored)


def loss_settings(context: StageContext, arm: ArmSection, token_loss: str) -> LossSettings:
    """What an arm minimises, its law at the arm's temperature."""
    return LossSettings(
        objective=arm.objective,
        weight=arm.weight,
        weight_warmup_ratio=arm.weight_warmup_ratio,
        token_weight=arm.token_weight,
        token_loss=token_loss,
        normaliser=arm.normaliser,
        anchors_per_sequence=arm.anchors_per_sequence or 1,
        refresh_every=arm.refresh_every,
        samplings=training_samplings(context.sampling, arm.temperature),
        shape=context.shape,
        builder=context.recipe.tree.builder,
    )


def _run_arm(
    context: StageContext, name: str, target: TargetModel, sequences: SequenceSet, held_out: HeldOut | None
) -> None:
    stage, folder = f"{STAGE}/{name}", context.run.stage(f"{STAGE}/{name}")
    arm = Arm(context, name, arm_steps(context, name, folder, target, sequences), target, sequences)

    def evaluate() -> dict[str, float]:
        assert held_out is not None  # the hook is only set then
        return {**held_out.measure(arm.drafter), **_staleness(arm, target, sequences, context.recipe.seed)}

    def save_best() -> None:
        from_main(lambda: arm.drafter.save(folder / "best"))

    hooks = Hooks(
        evaluate=None if held_out is None else evaluate,
        save_best=save_best,
        tracker=lambda step: context.tracker(stage, step),
        stop=context.stop,
        description=stage,
    )
    result = train(arm.task, arm.settings, folder, engine_config(context.recipe), hooks)
    if is_main():
        arm.drafter.save(folder / "last")
        if held_out is None:
            arm.drafter.save(folder / "best")
        extra = {
            "num_steps": arm.settings.steps,
            "best_step": result.best.step or arm.settings.steps,
            "best_score": result.best.score if held_out is not None else None,
            "mean_step_seconds": result.mean_step_seconds,
        }
        context.run.finish(stage, context.stage_key(stage), extra)
        best = f", best held-out score {result.best.score:.3f} at step {extra['best_step']}" if held_out else ""
        say(f"{stage}: {arm.settings.steps} steps{best}; {folder / 'last'}")
    barrier()


def _staleness(arm: Arm, target: TargetModel, sequences: SequenceSet, seed: int) -> dict[str, float]:
    """For an arm on stored trees: how far its drafter has left them behind. seed: the recipe's."""
    if arm.stored is None:
        return {}
    chosen = torch.randperm(len(arm.stored.anchors), generator=generator_for(arm.settings.seed, "staleness"))
    loss, rows = arm.loss, chosen[:STALENESS_TREES].sort().values
    generators = collected_generators(loss.builder, arm.stored.places(sequences, rows), seed)
    tree = (loss.shape, loss.samplings[0], loss.builder, generators)
    return staleness(arm.drafter, target, sequences.tokens, arm.stored, rows, *tree)


def arm_steps(context: StageContext, name: str, folder: Path, target: TargetModel, sequences: SequenceSet) -> int:
    """Steps of an arm: its own, or as many as take the time of the arm it matches.

    Matched steps are measured once and written down; a run that is started again keeps them.
    """
    section, file = context.arm(name), folder / "steps.json"
    assert section.steps is not None  # context.arm fills it in
    if section.match_time is None:
        return section.steps
    if not from_main(file.exists):
        other = section.match_time
        other_steps = from_main(lambda: int(context.run.done(f"{STAGE}/{other}")["num_steps"]))
        ratio = _time_ratio(context, name, other, target, sequences)

        def write() -> None:
            steps = max(1, round(other_steps * ratio))
            write_json(
                file,
                {"steps": steps, "matches": other, "step_time_ratio": ratio, "matched_steps": other_steps},
                seal=True,
            )
            say(
                f"{name}: {steps} steps take as long as {other_steps} of {other}, whose step takes {ratio:.2f} of these"
            )

        from_main(write)
    return int(from_main(lambda: read_json(file))["steps"])


def _time_ratio(context: StageContext, name: str, other: str, target: TargetModel, sequences: SequenceSet) -> float:
    """Seconds of a step of `other` over seconds of a step of `name`, from steps taken in turn on throw-away drafters.

    In turn, so that both meet the same load of the machine; in blocks of whole redraws, so that drawing trees counts.
    """
    block = max(context.arm(arm).refresh_every for arm in (name, other))
    count = max(PROBED_STEPS // block, 3)
    trainers = []
    say(f"{name}: measuring what its steps and those of {other} take")
    for arm in (name, other):
        made = Arm(context, arm, (count + 1) * block, target, sequences)
        made.task.keep_states(range((count + 1) * block))  # else the first to meet a sequence would pay for both
        trainers.append(Trainer(made.task, made.settings, engine_config(context.recipe)))
    ratios = []
    for start in range(0, (count + 1) * block, block):
        for trainer in trainers:
            trainer.seconds.clear()
            for step in range(start, start + block):
                trainer.step(step)
        own, theirs = (sum(trainer.seconds) for trainer in trainers)
        ratios.append(theirs / own if own else 1.0)
    for trainer in trainers:
        trainer.engine.close()
    return median(ratios[1:])  # the first block warms up
