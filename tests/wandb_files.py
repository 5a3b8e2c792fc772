"""Reads a wandb segment back: a log of records in blocks of 32 KiB, each piece with a checksum, a length and a type."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


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
