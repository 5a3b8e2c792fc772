"""Several ranks on a free port, as a launcher would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def launch_ranks(worker: Path, text: str, world: int, timeout: float = 300) -> list[int]:
    """Exit codes of `world` processes of `worker`, each given `text`; none outlives the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "EXITTRAIN_PROGRESS": "0"}
    launcher = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(world):
        own = {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        processes.append(subprocess.Popen([sys.executable, str(worker), text], env={**shared, **own}))
    try:
        return [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
