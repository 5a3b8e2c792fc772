"""Trains in child processes that kill themselves with SIGKILL at one moment of a save, and then once to the end.

Children are forked before anything of torch.distributed is there, so that one import serves them all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  so that children need not import it
import torch
from zero_scenarios import Scenario, trained

from exittrain.stages.training import checkpoints

TOUCHED = [(checkpoints.torch, "save"), (checkpoints.os, "replace"), (checkpoints.shutil, "rmtree")]
TOUCHED += [(checkpoints, name) for name in ("fsync_tree", "sha256", "write_json", "fsync_folder", "from_main")]


def in_child(action: Callable[[], object]) -> int:
    """The status of a forked process that runs `action` and leaves without cleaning up."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def killed_at(moment: int, scenario: Scenario, folder: Path) -> None:
    """Train; the `moment`-th call of what a save is made of, after the first checkpoint, is the last thing done."""
    moments = count()

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if (folder / "step-000002").exists() and next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, name in TOUCHED:
        setattr(module, name, dying(getattr(module, name)))
    trained(scenario, folder)


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    found = []
    for moment in asked["moments"]:
        folder, scenario = Path(asked["folder"]) / str(moment), Scenario(asked["config"], steps=6, save_every=2)
        status = in_child(lambda m=moment, s=scenario, f=folder: killed_at(m, s, f))
        left = sorted(path.name for path in folder.glob("step-*"))
        again = in_child(lambda s=scenario, f=folder: torch.save(trained(s, f)["parameters"], f / "end.pt"))
        found.append({"signal": os.WTERMSIG(status), "left": left, "again": again})
    (Path(asked["folder"]) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
