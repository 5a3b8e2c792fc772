"""Makes real wandb segments in processes of their own, and reads them back.

A segment is a log of records in blocks of 32 KiB, each piece with a checksum, a length and a type.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4

LIFE = """
import sys
from pathlib import Path
from exittrain.runtime.wandb_run import WandbRun, identity_of
folder, first, last, how, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
run = WandbRun(folder, identity_of(folder, "unit", None, "tests"), mode, {"recipe": {"seed": 1}})
for step in range(first, last):
    run.log({"warmup/loss": 1 / step}, step)
print("logged", flush=True)
if how == "wait":
    sys.stdin.readline()
run.close()
"""


def life(folder: Path, first: int, last: int, how: str = "", mode: str = "offline", **environment: str) -> Any:
    """A process that logs steps first..last-1 to the folder's wandb run; with "wait" it ends after a line of input."""
    command = [sys.executable, "-c", LIFE, str(folder), str(first), str(last), how, mode]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**kept, **environment}, text=True, **pipes)


@dataclass
class Segment:
    """history: rows in order; metrics: (name or glob, its axis); config and summary: as they are at the end."""

    run: Any = None
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[tuple[str, str]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def records(path: Path) -> Iterator[Any]:
    """wandb's Record messages; one that was cut short by a kill ends them."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), HEAD, b""
    assert data[:4] == b":W&B"
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEAD])
        piece = data[place + HEAD : place + HEAD + length]
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or len(piece) < length:
            return
        parts += piece
        place += HEAD + length
        if kind in (WHOLE, LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def read_segment(folder: Path) -> Segment:
    """The one .wandb file of a segment's folder."""
    (path,) = folder.glob("*.wandb")
    found = Segment()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run = record.run
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "config":
            for item in record.config.update:
                found.config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "history":
            found.history.append({_name(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "metric":
            found.metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
        elif kind == "summary":
            found.summary |= {_name(item): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _name(item: Any) -> str:
    return str(item.key or "/".join(item.nested_key))
