"""How long each rank, and the store that all read, have given no sign of life."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from exittrain.runtime.bulletin import Beat, Bulletin

STORE = -1
ARRIVAL_SECONDS = 600.0  # the first sign of life may be this late: nodes start at different times


class Silence:
    """Counts only time in which this process itself was running: one that was stopped for an hour, with all others or
    alone, accuses nobody when it wakes. A rank is not accused while the store, through which it speaks, is silent.
    """

    def __init__(self, bulletin: Bulletin, ranks: Iterable[int], limit: float) -> None:
        """ranks: those to look after. limit: seconds."""
        self._bulletin, self._limit = bulletin, limit
        self._answers = 0
        self._store = 0.0
        self._beats: dict[int, Beat] = {}
        self._seconds = dict.fromkeys(ranks, 0.0)

    def observe(self, passed: float, excused: Collection[int] = ()) -> int | None:
        """The first rank that has been silent for the limit, or STORE. passed: seconds since the last call."""
        self._store += min(passed, self._limit / 4)
        if self._bulletin.answers == self._answers:
            return STORE if self._store >= self._limit else None
        since_last_answer = min(self._store, self._limit / 4)
        self._answers, self._store = self._bulletin.answers, 0.0
        for rank in self._seconds:
            beat = self._bulletin.beats.get(rank)
            self._seconds[rank] = self._seconds[rank] + since_last_answer if beat == self._beats.get(rank) else 0.0
            if beat is not None:
                self._beats[rank] = beat
        late = [rank for rank, seconds in self._seconds.items() if seconds >= self._patience(rank)]
        return next((rank for rank in late if rank not in excused), None)

    def _patience(self, rank: int) -> float:
        return self._limit if rank in self._beats else max(self._limit, ARRIVAL_SECONDS)
