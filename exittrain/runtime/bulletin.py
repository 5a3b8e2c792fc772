"""What ranks tell each other beside their collectives: signs of life, and news in the order in which they came.

Everything goes through the store that the ranks met in, by a connection and a thread of its own, so that it works while
the main thread waits in a collective. The keys, below a prefix: `beat/R` is "count news-read host" of rank R, `news`
is one JSON object a line.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

TICK_SECONDS = 0.5
CONNECT_SECONDS = 5.0
NEVER = "-"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life. count: how many it has given; read: entries of the news that it knows."""

    count: int = 0
    read: int = 0
    host: str = "an unknown host"


class Bulletin:
    """One rank's connection. `entries`, `beats` and `answers` (how often the store has answered) only ever grow."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self.entries: list[Entry] = []
        self.beats: dict[int, Beat] = {}
        self.answers = 0
        self.everyone = rank == 0  # read all beats, not only rank 0's
        self._at, self._rank, self._world_size = (host, port), rank, world_size
        self._outbox: list[Entry] = []
        self._broken = False
        self._probe: socket.socket | None = None
        self._made: set[str] = set()
        self._count = 0
        self._over = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="bulletin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, entry: Entry) -> None:
        """Tell all ranks, this one too; returns at once."""
        self._outbox.append(entry)
        self._hurry.set()

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true within `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._hurry.set()
            time.sleep(0.05)
        return condition()

    def delivered(self) -> bool:
        """All that was posted can be read by the others, or there is nowhere to write it."""
        return self._broken or not self._outbox

    def close(self, seconds: float = 2.0) -> bool:
        """Whether the thread has ended: while it is in C, the interpreter must not be torn down."""
        self._over.set()
        self._hurry.set()
        self._thread.join(seconds)
        if self._probe is not None:
            self._probe.close()
        return not self._thread.is_alive()

    def _talk(self) -> None:
        store: Any = None
        while not self._over.is_set() and not self._is_closing():
            try:
                store = store or self._connect()
                self._exchange(store)
                self._broken = False
            except (OSError, RuntimeError, ValueError):  # whoever watches sees that `answers` stands still
                store, self._broken = None, True
            self._hurry.wait(TICK_SECONDS)
            self._hurry.clear()
        self._broken = True

    def _is_closing(self) -> bool:
        """Rank 0 has left, and the store mostly with it."""
        return any(entry["kind"] == "left" and entry["rank"] == 0 for entry in self.entries) and self._rank != 0

    def _connect(self) -> Any:
        """A plain connection comes first and stays: it shows whether somebody listens, and later that the process that
        does has ended, for which torch's own prints pages."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        if self._probe is not None:
            self._probe.close()
        self._probe = socket.create_connection(self._at, CONNECT_SECONDS)
        unlimited = timedelta(days=30)  # a store that does not answer is the watch's affair
        store = TCPStore(*self._at, is_master=False, wait_for_workers=False, timeout=unlimited)
        self._made.clear()
        return PrefixStore(f"exittrain/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _exchange(self, store: Any) -> None:
        assert self._probe is not None
        if select.select([self._probe], [], [], 0)[0]:
            raise ConnectionResetError("the store's process has ended")
        ranks = range(self._world_size) if self.everyone else (0,)
        keys = ["news", *(f"beat/{rank}" for rank in ranks)]
        for key in keys:
            if key not in self._made:  # what is not there would be waited for
                store.compare_set(key, "", NEVER)
                self._made.add(key)
        self._beat(store)
        posted = len(self._outbox)
        for entry in self._outbox[:posted]:
            store.append("news", "\n" + json.dumps(entry))
        news, *beats = (value.decode() for value in store.multi_get(keys))
        self.entries += [json.loads(line) for line in news.split("\n")[1 + len(self.entries) :]]
        for rank, beat in zip(ranks, beats, strict=True):
            if beat != NEVER:
                count, read, host = beat.split(" ", 2)
                self.beats[rank] = Beat(int(count), int(read), host)
        del self._outbox[:posted]
        self.answers += 1
        if self._is_closing():  # it waits until we know
            self._beat(store)

    def _beat(self, store: Any) -> None:
        self._count += 1
        store.set(f"beat/{self._rank}", f"{self._count} {len(self.entries)} {socket.gethostname()}")
