"""What the target writes, on two processes: one asks, both write, and both leave together (cases.md 88, 95)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

WORKER = Path(__file__).with_name("answers_worker.py")


def launch(folder: Path, *arguments: str) -> list[list[str]]:
    """The lines of both ranks, which end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    both = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(WORKER), str(folder), *arguments]
        both.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return said


def test_both_write_and_leave_together(tmp_path: Path) -> None:
    """Ten jobs in batches of three. A failure, a signal, other files: on one rank, and none waits for the other."""
    tried = ["first", "raises", "fails-0", "fails-1", "stops-0", "stops-1", "differs", "last"]
    main, helper = launch(tmp_path, *tried)
    assert main == [
        "first returned True",
        "raises InputError no such source",
        "fails-0 RuntimeError no memory",
        "fails-1 InputError rank 1 could not go on: RuntimeError: no memory",
        "stops-0 Interrupted stopped by SIGTERM: run the same command again to go on",
        "stops-1 Interrupted stopped by SIGTERM: run the same command again to go on",
        "differs InputError rank 1 could not go on: its target or template is not the main rank's: let all nodes see "
        "the same files",
        "last returned True",
    ]
    assert helper == [
        "first returned False",
        "raises InputError no such source",
        "fails-0 InputError rank 0 could not go on: RuntimeError: no memory",
        "fails-1 RuntimeError no memory",
        "stops-0 Interrupted stopped by SIGTERM: run the same command again to go on",
        "stops-1 Interrupted stopped by SIGTERM: run the same command again to go on",
        "differs InputError its target or template is not the main rank's: let all nodes see the same files",
        "last returned False",
    ]
    written = Counter(line for line in (tmp_path / "log.txt").read_text().splitlines() if line.startswith("first"))
    # batches 0 and 2 are rank 0's, 1 and 3 rank 1's; two orders of four batches, the last of one job
    assert written == {"first 0 3": 4, "first 1 3": 2, "first 1 1": 2}
