"""Tiny trainings at every ZeRO stage: run in the tests' own process, or by `zero_worker.py` in each of several ranks.

Several of them share a process: starting one costs more than any of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny_heads import VOCAB as HEAD_VOCAB
from tiny_heads import make_head
from tiny_heads import make_target as make_head_target
from tiny_training import SHAPE, VOCAB, make_drafter, make_rows
from torch import Tensor

from exittrain.drafters.adapter import add_adapter
from exittrain.drafters.base import Drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import Interrupted
from exittrain.models.target import TargetModel
from exittrain.runtime.ranks import is_main
from exittrain.runtime.signals import StopFlag
from exittrain.stages.training.checkpoints import latest_checkpoint, load_checkpoint
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.loop import Hooks, Trainer, train
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import deepspeed_config

DRAFTERS = ("draft_lm", "lora", "eagle3", "block")


@dataclass(frozen=True)
class Scenario:
    """A training of `steps` steps of a tiny drafter. micro: sequences a forward; stops: steps after which it is
    interrupted and begun again; ends: whether the last of them is followed by the rest; place: the folder's name, where
    several scenarios go on with each other's checkpoints."""

    config: str = "zero0"
    drafter: str = "draft_lm"
    objective: str = "reach_kl"
    sequences: int = 10
    batch: int = 5
    micro: int | None = 2
    steps: int = 3
    stops: tuple[int, ...] = ()
    ends: bool = True
    place: str = ""
    save_every: int = 100
    lr: float = 1e-2

    @property
    def name(self) -> str:
        if self.place:
            return self.place
        parts = (self.config, self.drafter, self.objective, f"{self.sequences}-{self.batch}-{self.micro}-{self.steps}")
        return "_".join((*parts, *(f"stop{stop}" for stop in self.stops), *(() if self.ends else ("cut",))))


class StopAt(StopFlag):
    """Says stop after step `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.done = at, 0

    @property
    def is_set(self) -> bool:
        return self.done == self.at


class Lines:
    """A tracker that keeps what it is told, up to the step that is gone on from."""

    def __init__(self, file: Path, step: int) -> None:
        self._file = file
        self._lines = [line for line in read_lines(file) if line["step"] <= step]

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._lines.append({**numbers, "step": step})

    def finish(self) -> None:
        if is_main():
            self._file.write_text(json.dumps(self._lines))


def read_lines(file: Path) -> list[dict[str, float]]:
    lines: list[dict[str, float]] = json.loads(file.read_text()) if file.exists() else []
    return lines


def make(scenario: Scenario) -> tuple[Drafter, DrafterTask, LoopSettings]:
    head = scenario.drafter in ("eagle3", "block")
    if head:
        target = make_head_target()
        drafter = make_head(scenario.drafter, target)
    else:
        made = make_causal_lm(VOCAB, 32, 2, 2, 64, seed=1)
        target = TargetModel(made.module.requires_grad_(False), None, "t", verify=False)
        drafter = make_drafter()
        if scenario.drafter == "lora":
            add_adapter(drafter, 2, 4.0, "all-linear", seed=5)  # type: ignore[arg-type]
            for name, parameter in drafter.module.named_parameters():  # else half of all gradients are zero
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    rows = make_rows(scenario.sequences, vocab=HEAD_VOCAB if head else VOCAB)
    settings = LoopSettings(
        steps=scenario.steps, batch_size=scenario.batch, micro_batch_size=scenario.micro, lr=scenario.lr,
        warmup_ratio=0.3, log_every=1, save_every=scenario.save_every, seed=3, weight_decay=0.1,
    )  # fmt: skip
    loss = LossSettings(
        objective=scenario.objective, anchors_per_sequence=3, refresh_every=3, shape=replace(SHAPE, branching="2-ary")
    )
    return drafter, DrafterTask(drafter, target, SequenceSet.from_rows(rows), settings, loss), settings


def first_step(scenario: Scenario) -> dict[str, Any]:
    """Losses and the gradient before clipping of the first step, whole and by name, and the drafter after it."""
    from deepspeed.utils import safe_get_full_grad

    drafter, task, settings = make(scenario)
    trainer = Trainer(task, settings, deepspeed_config(scenario.config))
    engine, gradients = trainer.engine, {}
    original = engine.step

    def step(lr: float) -> float:
        for name, parameter in engine.parameters.items():
            gradients[name] = safe_get_full_grad(parameter).detach().float().clone()
        return original(lr)

    engine.step = step  # type: ignore[method-assign]
    sums, totals, norm = trainer.step(0)
    engine.make_plain()
    engine.close()
    numbers = {name: float(value) for name, value in {**sums, **totals}.items()}
    return {"numbers": {**numbers, "norm": norm}, "gradients": gradients, "parameters": parameters(drafter)}


def trained(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """The drafter at the end, which sequences each step saw, and the moments as they were saved and as loaded."""
    loaded = []
    for stop in (*scenario.stops, *((scenario.steps,) if scenario.ends else ())):
        drafter, task, settings = make(scenario)
        found = latest_checkpoint(folder)
        if found is not None:
            loaded.append(_moments(scenario, found[0]))
        flag, original = StopAt(stop), task.prepare

        def prepare(step: int, flag: StopAt = flag, original: Any = original) -> Any:
            flag.done = step + 1
            return original(step)

        task.prepare = prepare  # type: ignore[method-assign]
        tracker: Any = lambda step: Lines(folder / "lines.json", step or 0)  # noqa: E731
        try:
            train(task, settings, folder, deepspeed_config(scenario.config), Hooks(tracker=tracker, stop=flag))
        except Interrupted:
            assert stop < scenario.steps
    order = [[sorted(batch.sample_ids) for batch in task.prepare(step)] for step in (0, 1)] if scenario.ends else []
    return {"parameters": parameters(drafter), "loaded": loaded, "order": order}


def _moments(scenario: Scenario, path: Path) -> dict[str, Any]:
    """Norms of parameters and moments in a checkpoint, and in a fresh engine that has loaded it."""
    _, task, settings = make(scenario)
    trainer = Trainer(task, settings, deepspeed_config(scenario.config))
    load_checkpoint(path, trainer.engine)
    again = trainer.engine.state()
    trainer.engine.close()
    state = torch.load(path / "model.pt", weights_only=True)
    same = not is_main() or all(
        again[kind].keys() == state[kind].keys() and all(torch.equal(again[kind][n], v) for n, v in state[kind].items())
        for kind in ("parameters", "exp_avg", "exp_avg_sq")
    )
    norms = {kind: sum(float(v.norm()) for v in state[kind].values()) for kind in ("exp_avg", "exp_avg_sq")}
    return {"same": same and again["updates"] == state["updates"], "updates": state["updates"], **norms}


def parameters(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.detach().clone().float() for name, p in drafter.module.named_parameters()}
