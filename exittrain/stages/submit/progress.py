"""How far a loop of a stage is and how fast it goes, from the files that the stage writes anyway."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

RATED = 20  # of the steps or pieces, the newest: a rate of now


def steps_done(folder: Path, steps: int) -> str:
    """`step 120 of 1,000, 3.2 steps/s, 275 s left`, from a loop's metrics; empty before its first line. steps: 0 when
    their number is not known yet."""
    rows = _metrics(folder / "metrics.jsonl")
    if not rows:
        return ""
    done = int(rows[-1]["step"])
    text = f"step {done:,} of {steps:,}" if steps else f"step {done:,}"
    seconds = [row["time/step_seconds"] for row in rows if row.get("time/step_seconds")][-RATED:]
    if seconds:
        rate = 1.0 / fmean(seconds)
        text += f", {rate:.2f} steps/s" + (f", {max(steps - done, 0) / rate:,.0f} s left" if steps > done else "")
    return text


def pieces_done(files: Iterable[Path], total: int, unit: str) -> str:
    """`12 of 64 shards, 3.4 a minute, 918 s left`, from when the files were written, by however many jobs at once.
    Empty while there are none. total: 0 when it is not known."""
    times = sorted(seconds for file in files if (seconds := _written(file)) is not None)
    if not times:
        return ""
    text = f"{len(times):,} of {total:,} {unit}" if total else f"{len(times):,} {unit}"
    newest = times[-RATED:]
    if newest[-1] > newest[0]:
        rate = (len(newest) - 1) / (newest[-1] - newest[0])
        text += f", {rate * 60.0:.1f} a minute"
        text += f", {(total - len(times)) / rate:,.0f} s left" if total > len(times) else ""
    return text


def _written(file: Path) -> float | None:
    """Seconds since the epoch; None when it is gone."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that somebody may be writing."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
