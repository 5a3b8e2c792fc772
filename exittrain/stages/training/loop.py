"""The one training loop: every drafter, every objective and the target made from nothing go through it.

It reads straight down: prepare, sum the counts, forward and backward, step, log, evaluate, save, stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import nn

from exittrain.errors import Interrupted
from exittrain.records.files import clean_temporary
from exittrain.runtime import watch
from exittrain.runtime.progress import progress_bar
from exittrain.runtime.ranks import all_reduce_sums, any_rank, barrier, is_main, rank
from exittrain.runtime.signals import StopFlag
from exittrain.runtime.tracker import Tracker
from exittrain.stages.training.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from exittrain.stages.training.engine import Engine
from exittrain.stages.training.rates import Rates
from exittrain.stages.training.settings import LoopSettings

Sums = dict[str, float]
WORK = ("sequences", "trained_tokens")  # of a step, for rates; of the totals, no denominators


class Batch(Protocol):
    """One micro-batch, ready to be trained on. num_tokens: trained tokens of its sequences; counts: its denominators,
    the same names on every rank."""

    sample_ids: list[str]
    num_tokens: int
    counts: Sums


class Task(Protocol):
    """What is trained. `module(batch, scales)` returns (loss, sums): the batch's sums times `scales`, which are made of
    the global counts, and detached sums for the log (read after the backward pass, so hooks may fill them)."""

    @property
    def module(self) -> nn.Module: ...

    def runs_module(self, step: int) -> bool:
        """Whether `prepare` runs the module, so that it must be whole; the same on every rank."""
        ...

    def prepare(self, step: int) -> list[Any]:
        """This rank's micro-batches of a step; as many on every rank. A function of (seed, step) and the model."""
        ...

    def scales(self, step: int, totals: Sums) -> Sums:
        """What each part of the loss is multiplied by, from the counts over all micro-batches and ranks."""
        ...

    def metrics(self, step: int, sums: Sums, totals: Sums) -> Mapping[str, float]:
        """What is logged, from sums and counts over all micro-batches and ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values of this rank that a resumed run cannot recompute."""
        ...

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """What `state_dict` gave on each of the ranks that saved, which may have been more or fewer than there are."""
        ...


@dataclass
class Best:
    """The best evaluation so far: its score (higher is better) and step."""

    score: float = -math.inf
    step: int = 0


@dataclass(frozen=True)
class Hooks:
    """What happens around the steps. evaluate() -> metrics with a "score"; save_best() keeps the model as it is."""

    evaluate: Callable[[], Mapping[str, float]] | None = None
    save_best: Callable[[], None] = lambda: None
    tracker: Callable[[int | None], Tracker] | None = None  # resumed step -> tracker
    stop: StopFlag = field(default_factory=StopFlag)
    description: str = "train"


@dataclass(frozen=True)
class Result:
    """mean_step_seconds: of preparing, forward, backward and update; best: of the evaluations."""

    mean_step_seconds: float
    best: Best


class Trainer:
    """An engine and a task; `step` is one optimiser step. `train` runs the loop around it."""

    def __init__(self, task: Task, settings: LoopSettings, config: Mapping[str, Any]) -> None:
        self.task, self.settings = task, settings
        self.engine = Engine(task.module, settings, config)
        self.seconds: list[float] = []

    def step(self, step: int) -> tuple[Sums, Sums, float]:
        """One optimiser step; returns (sums, counts, gradient norm), the first two over micro-batches and ranks.

        A step without anything to learn from, on all ranks together, updates nothing.

        Raises:
            FloatingPointError: a loss or the gradient is not finite; names the samples. Nothing was updated.
        """
        began = time.perf_counter()
        with self.engine.whole() if self.task.runs_module(step) else nullcontext():
            batches = self.task.prepare(step)
        totals = all_reduce_sums({**_work(batches), **_total([batch.counts for batch in batches])})
        if not any(count for name, count in totals.items() if name not in WORK):
            return {}, totals, 0.0
        scales = self.task.scales(step, totals)
        parts, bad = [], []
        for i, batch in enumerate(batches):
            loss, sums = self.engine(batch, scales)
            self.engine.backward(loss, last=i == len(batches) - 1)
            parts.append({name: float(value) for name, value in sums.items()})
            if not all(math.isfinite(value) for value in parts[-1].values()):
                bad += batch.sample_ids
        if any_rank(bool(bad)):
            watch.all_end()  # each says so itself
            raise FloatingPointError(_diverged(step, bad))
        try:
            norm = self.engine.step(self.settings.lr_at(step))
        except FloatingPointError as error:
            raise FloatingPointError(_diverged(step, [i for b in batches for i in b.sample_ids], str(error))) from None
        self.seconds.append(time.perf_counter() - began)
        return all_reduce_sums(_total(parts)), totals, norm


def train(task: Task, settings: LoopSettings, folder: Path, config: Mapping[str, Any], hooks: Hooks) -> Result:
    """Train `task` for `settings.steps` steps in `folder`, going on from its newest whole checkpoint.

    The same steps are taken whether or not it was interrupted: parameters at the end are equal bit for bit.

    Raises:
        Interrupted: a signal came; the step was finished and saved, on all ranks together.
        FloatingPointError: the loss is not finite (samples named).
    """
    if is_main():
        clean_temporary(folder)
    barrier()
    torch.manual_seed(settings.seed)
    trainer, best, rates = Trainer(task, settings, config), Best(), Rates()
    start = _resume(trainer, best, folder)
    tracker = hooks.tracker(start or None) if hooks.tracker else None
    try:
        with progress_bar(settings.steps, hooks.description, "steps") as bar:
            bar.advance(start)
            for step in range(start, settings.steps):
                sums, totals, norm = trainer.step(step)
                done = step + 1
                if sums:
                    rates.add(trainer.seconds[-1], totals)
                if tracker and (_due(done, settings.log_every, settings.steps) or done == 1):
                    numbers = dict(task.metrics(step, sums, totals)) if sums else {}
                    tracker.log({**numbers, "lr": settings.lr_at(step), "grad_norm": norm, **rates.take()}, step=done)
                if hooks.evaluate and settings.eval_every and _due(done, settings.eval_every, settings.steps):
                    with trainer.engine.whole():
                        _evaluate(hooks, tracker, best, done)
                stopped = any_rank(hooks.stop.is_set)
                if stopped or _due(done, settings.save_every, settings.steps):
                    save_checkpoint(folder, done, trainer.engine, _state(trainer, best))
                if stopped and done < settings.steps:
                    raise Interrupted(
                        f"stopped by {hooks.stop.name or 'another rank'} after step {done}, which is saved: "
                        "run the same command again to go on"
                    )
                bar.advance(1, note=_note(sums, totals))
        trainer.engine.make_plain()
        return Result(fmean(trainer.seconds or [0.0]), best)
    finally:
        if tracker:
            tracker.finish()
        trainer.engine.close()


def _evaluate(hooks: Hooks, tracker: Tracker | None, best: Best, done: int) -> None:
    assert hooks.evaluate is not None  # the caller has looked
    numbers = hooks.evaluate()
    if numbers["score"] > best.score:
        best.score, best.step = numbers["score"], done
        hooks.save_best()
    if tracker:
        tracker.log({f"eval/{name}": value for name, value in numbers.items()}, step=done)


def _due(done: int, every: int, steps: int) -> bool:
    return done % every == 0 or done == steps


def _state(trainer: Trainer, best: Best) -> dict[str, Any]:
    return {
        "task": trainer.task.state_dict(), "best_score": best.score, "best_step": best.step, "seconds": trainer.seconds
    }  # fmt: skip


def _resume(trainer: Trainer, best: Best, folder: Path) -> int:
    """Steps already done: restores everything from the newest whole checkpoint, 0 when there is none."""
    found = latest_checkpoint(folder)
    if found is None:
        return 0
    path, step = found
    states = load_checkpoint(path, trainer.engine)
    trainer.task.load_state_dict([state["task"] for state in states])
    best.score, best.step = states[0]["best_score"], states[0]["best_step"]
    trainer.seconds = states[rank() if rank() < len(states) else 0]["seconds"]
    return step


def _work(batches: Sequence[Batch]) -> Sums:
    counts = (sum(len(batch.sample_ids) for batch in batches), sum(batch.num_tokens for batch in batches))
    return dict(zip(WORK, map(float, counts), strict=True))


def _total(parts: list[Sums]) -> Sums:
    names = parts[0].keys() if parts else ()
    return {name: sum(part[name] for part in parts) for name in names}


def _note(sums: Sums, totals: Sums) -> str:
    tokens = totals.get("tokens", 0.0)
    return f"loss {sums['token_loss'] / tokens:.3f}" if sums and tokens else ""


def _diverged(step: int, sample_ids: list[str], what: str = "the loss is not finite") -> str:
    named = ", ".join(sample_ids[:8]) + (" ..." if len(sample_ids) > 8 else "")
    return f"step {step + 1}: {what} at samples {named or 'of another rank'}; lower the learning rate or look at them"
