"""Bars with rates on a terminal, a plain line every 20 seconds elsewhere, nothing when off or on other ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from exittrain.runtime.ranks import is_main

Item = TypeVar("Item")
LINE_SECONDS = 20.0


def enabled() -> bool:
    """EXITTRAIN_PROGRESS=0 switches all progress off."""
    return is_main() and os.environ.get("EXITTRAIN_PROGRESS", "1") != "0"


class Bar:
    """Progress of one loop: `advance(units)`, optionally with a short note (a loss, a coverage)."""

    def __init__(self, total: int | None, description: str, unit: str) -> None:
        self.total, self.description, self.unit = total, description, unit
        self.done = 0
        self.note = ""

    def advance(self, units: int = 1, note: str = "") -> None:
        self.done += units
        self.note = note or self.note
        self._show()

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def _show(self) -> None: ...


class LineBar(Bar):
    """One line to stderr at most every `LINE_SECONDS`; short loops print nothing."""

    def start(self) -> None:
        self.began = self.shown = time.monotonic()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self.shown >= LINE_SECONDS:
            self.shown = now
            rate = self.done / (now - self.began)
            total = "" if self.total is None else f"/{self.total}"
            left = "" if self.total is None or not rate else f", {max(self.total - self.done, 0) / rate:.0f} s left"
            note = f", {self.note}" if self.note else ""
            print(
                f"{self.description}: {self.done}{total} {self.unit} ({rate:.2f}/s{left}{note})",
                file=sys.stderr,
                flush=True,
            )


class RichBar(Bar):
    """A live bar on a terminal."""

    def start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.began = time.monotonic()
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        ]
        self.progress = Progress(
            *columns,
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.progress.add_task(self.description, total=self.total, rate="", note="")
        self.progress.start()

    def _show(self) -> None:
        rate = self.done / max(time.monotonic() - self.began, 1e-9)
        self.progress.update(self.task, completed=self.done, rate=f"{rate:.1f} {self.unit}/s", note=self.note)

    def stop(self) -> None:
        self.progress.stop()


@contextmanager
def progress_bar(total: int | None, description: str, unit: str = "it") -> Iterator[Bar]:
    """A `Bar` for a loop that counts its own units: `with progress_bar(n, "collect", "trees") as bar: ...`. One without
    a description stands inside another and shows nothing."""
    kind = Bar if not (description and enabled()) else RichBar if sys.stderr.isatty() else LineBar
    bar = kind(total, description, unit)
    bar.start()
    try:
        yield bar
    finally:
        bar.stop()


def track(items: Iterable[Item], description: str, unit: str = "it", total: int | None = None) -> Iterator[Item]:
    """Iterate with a bar: one unit an item. `track(range(n), ...)` for a bare count."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress_bar(total, description, unit) as bar:
        for item in items:
            yield item
            bar.advance()
