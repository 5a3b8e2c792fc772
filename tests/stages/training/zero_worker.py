"""One rank of several tiny trainings, one after the other; the main one writes what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from zero_scenarios import Scenario, first_step, trained

from exittrain.runtime import ranks


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folder = Path(asked["folder"])
    ranks.setup(torch.device("cpu"), folder)
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
