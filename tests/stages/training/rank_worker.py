"""One rank of a tiny training: run by the tests of several ranks with a launcher's variables set."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tiny_training import SHAPE, VOCAB, make_drafter, make_rows

from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import Interrupted
from exittrain.models.target import TargetModel
from exittrain.runtime import ranks
from exittrain.runtime.signals import StopFlag
from exittrain.runtime.tracker import Tracker
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.loop import Hooks, train
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import deepspeed_config


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ranks.setup(torch.device("cpu"), Path(asked["folder"]))
    target = TargetModel(
        make_causal_lm(VOCAB, 32, 2, 2, 64, seed=1).module.requires_grad_(False), None, "t", verify=False
    )
    data = SequenceSet.from_rows(make_rows(asked.get("sequences", 10)))
    settings = LoopSettings(
        **{"steps": 4, "batch_size": 5, "micro_batch_size": 2, "lr": 1e-2, "log_every": 1, **asked["loop"]}
    )
    tree = {"builder": asked.get("builder", "best_first"), "shape": replace(SHAPE, branching="2-ary")}
    loss = LossSettings(objective=asked["objective"], anchors_per_sequence=3, refresh_every=3, **tree)
    drafter, stop = make_drafter(), StopFlag()
    task = DrafterTask(drafter, target, data, settings, loss)
    original = task.prepare

    def prepare(step: int) -> object:
        if step == asked.get("stop_at") and ranks.rank() == 1:
            stop.set("SIGUSR1")
        return original(step)

    task.prepare = prepare  # type: ignore[method-assign]
    folder = Path(asked["folder"])
    hooks = Hooks(tracker=lambda step: Tracker(folder, "t", step), stop=stop)
    try:
        train(task, settings, folder, deepspeed_config(asked["config"]), hooks)
    except Interrupted as error:
        print(error)
        raise SystemExit(error.exit_code) from None
    if ranks.is_main():
        values = {name: p.detach().clone() for name, p in drafter.model.module.named_parameters()}
        torch.save({name: torch.tensor(value.numpy()) for name, value in values.items()}, folder / "parameters.pt")


if __name__ == "__main__":
    main()
