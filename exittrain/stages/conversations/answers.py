"""Text written by the target, batch by batch, each batch kept on disk: a killed stage redoes only what is missing.

One rank asks, all write: batches are fixed by what is asked for and shared among the ranks, so their number decides
nothing but the time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from exittrain.config.schema import GenerationSection
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.records.files import read_json, write_json
from exittrain.runtime import ranks
from exittrain.runtime.parts import share
from exittrain.runtime.progress import Bar, progress_bar
from exittrain.runtime.signals import StopFlag

Answer = TypeVar("Answer")
REPEAT_GRAM = 4  # an n-gram of this many tokens ...
REPEAT_SHARE = 0.5  # ... of which at most this share may be repetitions
REPEAT_MIN_TOKENS = 32  # shorter texts are never called repetitive


@dataclass(frozen=True)
class Job:
    """One text to write: the ids it continues, and a name that seeds its own random stream."""

    id: str
    prompt: list[int]


@dataclass(frozen=True)
class Written:
    """New ids (end of turn included when the target wrote it) and whether the target ended by itself."""

    token_ids: list[int]
    finished: bool


@dataclass(frozen=True)
class Order:
    """What the main rank asks all ranks to write. identity: as a `Writer`'s."""

    jobs: list[Job]
    what: str
    max_new_tokens: int
    identity: str

    def batches(self, size: int) -> list[list[int]]:
        """Indices of jobs, sorted by length: whoever shares them, they are the same."""
        order = sorted(range(len(self.jobs)), key=lambda index: (-len(self.jobs[index].prompt), index))
        return [order[start : start + size] for start in range(0, len(order), size)]


class Writer:
    """Runs jobs through the target.

    Every job has its own generator, seeded by (seed, what, job id); batches are fixed by the list of jobs, sorted by
    length. So a run that was killed and one that was not end with the same ids, on any number of ranks.
    """

    def __init__(
        self, target: Any, settings: GenerationSection, folder: Path, seed: int, stop: StopFlag, identity: str
    ) -> None:
        """identity: digest of all else that decides the ids (target, template); stored parts of another are redone."""
        self.target, self.settings, self.folder, self.seed, self.stop = target, settings, folder, seed, stop
        self.identity, self.num_tokens = identity, 0

    def write(self, jobs: Sequence[Job], what: str, max_new_tokens: int) -> list[Written]:
        """Main rank, inside `with_help`: one `Written` a job, in the order of the jobs.

        what: names the parts on disk and the random streams.
        """
        try:
            order = ranks.from_main(lambda: Order(list(jobs), what, max_new_tokens, self.identity))
            rows = ranks.on_all(lambda: self.work(order))
        except Exception as error:
            if ranks.world_size() == 1:
                raise
            raise _PartedError(error) from error
        results: dict[int, Written] = {}
        for number, batch in enumerate(order.batches(self.settings.batch_size)):
            # Another rank's batch is on disk; where it cannot be read, writing it again gives the same ids.
            written = rows[number] if number in rows else self._stored_or(order, number, batch)
            results.update(zip(batch, written, strict=True))
        return [results[index] for index in range(len(jobs))]

    def work(self, order: Order) -> dict[int, list[Written]]:
        """This rank's batches of an order, each stored when it is written.

        Raises:
            InputError: this rank has another target or template than the main one.
            Interrupted: a signal came; finished batches stay.
        """
        if order.identity != self.identity:
            raise InputError("its target or template is not the main rank's: let all nodes see the same files")
        batches = order.batches(self.settings.batch_size)
        own, rows = share(range(len(batches))), {}
        with progress_bar(sum(len(batches[number]) for number in own), f"target writes {order.what}", "texts") as bar:
            for number in own:
                rows[number] = self._stored_or(order, number, batches[number], bar)
                bar.advance(len(batches[number]))
                self.stop.raise_if_set()
        return rows

    def _stored_or(self, order: Order, number: int, batch: Sequence[int], bar: Bar | None = None) -> list[Written]:
        path, jobs = self.folder / f"{order.what}-{number:05d}.json", [order.jobs[index] for index in batch]
        settings = self.settings
        asked = [
            self.identity,
            self.seed,
            order.what,
            order.max_new_tokens,
            settings.temperature,
            settings.top_p,
            [[job.id, job.prompt] for job in jobs],
        ]
        key = _digest(asked)
        stored = _read_part(path, key)
        if stored is None:
            stored = self._generate(jobs, order.what, order.max_new_tokens, bar)
            rows = [[one.token_ids, one.finished] for one in stored]
            write_json(path, {"key": key, "rows": rows}, seal=True)
        return stored

    def _generate(self, jobs: list[Job], what: str, max_new_tokens: int, bar: Bar | None) -> list[Written]:
        from exittrain.decoding.loop import generate

        def count(num_new: int) -> None:
            self.num_tokens += num_new
            if bar is not None:
                bar.advance(0, f"{self.num_tokens} tokens")

        decoded = generate(
            self.target,
            [job.prompt for job in jobs],
            Sampling(temperature=self.settings.temperature, top_p=self.settings.top_p),
            max_new_tokens,
            [generator_for(self.seed, "data", what, job.id) for job in jobs],
            progress=count,
            batch_size=len(jobs),
        )
        return [Written([int(t) for t in one.token_ids], one.finish_reason == "eos") for one in decoded]


class _PartedError(Exception):
    """An order failed, so that every rank has left with its own exception: `error` is the main rank's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def with_help(action: Callable[[], Answer], make: Callable[[], Writer]) -> Answer | None:
    """The main rank does `action`, and whenever a `Writer` writes in it, all ranks write. Returns None on the others.

    make: the other ranks' writer, wanted when the first order comes. All leave together: what the action raises is
    raised on every rank.
    """
    if ranks.is_main():
        return _lead(action)
    writer = cache(make)
    while (order := ranks.from_main(_no_order)) is not None:
        ranks.on_all(partial(_work, writer, order))
    return None


def _lead(action: Callable[[], Answer]) -> Answer:
    try:
        answer = action()
    except _PartedError as parted:
        raise parted.error from None
    except Exception as error:
        ranks.from_main(partial(_raise, error))
        raise
    ranks.from_main(_no_order)
    return answer


def _no_order() -> Order | None:
    return None


def _raise(error: Exception) -> None:
    raise error


def _work(writer: Callable[[], Writer], order: Order) -> None:
    writer().work(order)


def fault(token_ids: Sequence[int], text: str) -> str | None:
    """Why a text of the target's own is not worth training on, or None: it is empty, or it goes round in circles."""
    if not text.strip():
        return "is empty"
    grams = [tuple(token_ids[i : i + REPEAT_GRAM]) for i in range(len(token_ids) - REPEAT_GRAM + 1)]
    if len(token_ids) >= REPEAT_MIN_TOKENS and len(set(grams)) < (1 - REPEAT_SHARE) * len(grams):
        return "repeats itself"
    return None


def text_of(tokenizer: Any, eos_token_ids: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """A function from written ids to text, without end-of-turn and other control tokens."""

    def text(token_ids: Sequence[int]) -> str:
        kept = [token for token in token_ids if token not in eos_token_ids]
        return str(tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return text


def _read_part(path: Path, key: str) -> list[Written] | None:
    """A stored batch; None when it is missing, of other jobs, or damaged: it is then written again."""
    try:
        part = read_json(path)
        if part["key"] == key:
            return [Written(ids, finished) for ids, finished in part["rows"]]
    except (ValueError, KeyError, TypeError):  # InputError is a ValueError
        pass
    return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
