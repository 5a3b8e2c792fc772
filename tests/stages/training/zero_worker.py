"""One rank of several tiny trainings, one after the other; the main one writes what came out."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from zero_scenarios import Scenario, first_step, trained

from exittrain.runtime import ranks
from exittrain.stages.training import checkpoints


def die_in_the_second_save() -> None:
    """This rank writes its file of the second checkpoint, and is gone (SIGKILL)."""
    original, saves = torch.save, count(1)

    def save(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if next(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.torch.save = save  # type: ignore[assignment]


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folder = Path(asked["folder"])
    ranks.setup(torch.device("cpu"), folder)
    if os.environ.get("KILLED_RANK") == str(ranks.rank()):
        die_in_the_second_save()
    found = {}
    for what, fields in asked["scenarios"]:
        scenario = Scenario(**{**fields, "stops": tuple(fields["stops"])})
        if what == "first_step":
            found[f"first_step {scenario.name}"] = first_step(scenario)
        else:
            found[f"trained {scenario.name}"] = trained(scenario, folder / scenario.name)
    if ranks.is_main():
        torch.save(found, folder / f"found-{ranks.world_size()}.pt")


if __name__ == "__main__":
    main()
