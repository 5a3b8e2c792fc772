"""Text written by the target, batch by batch, each batch kept on disk: a killed stage redoes only what is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exittrain.config.schema import GenerationSection
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.records.files import write_json
from exittrain.runtime.progress import Bar, progress_bar
from exittrain.runtime.signals import StopFlag

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


class Writer:
    """Runs jobs through the target.

    Every job has its own generator, seeded by (seed, what, job id); batches are fixed by the list of jobs, sorted by
    length. So a run that was killed and one that was not end with the same ids.
    """

    def __init__(
        self, target: Any, settings: GenerationSection, folder: Path, seed: int, stop: StopFlag, identity: str
    ) -> None:
        """identity: digest of all else that decides the ids (target, template); stored parts of another are redone."""
        self.target, self.settings, self.folder, self.seed, self.stop = target, settings, folder, seed, stop
        self.identity, self.num_tokens = identity, 0

    def write(self, jobs: Sequence[Job], what: str, max_new_tokens: int) -> list[Written]:
        """One `Written` a job, in the order of the jobs. what: names the parts on disk and the random streams."""
        order = sorted(range(len(jobs)), key=lambda index: (-len(jobs[index].prompt), index))
        size = self.settings.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        results: dict[int, Written] = {}
        with progress_bar(len(jobs), f"target writes {what}", "texts") as bar:
            for number, batch in enumerate(batches):
                path = self.folder / f"{what}-{number:05d}.json"
                chosen = [jobs[index] for index in batch]
                rows = self._stored_or(path, chosen, what, max_new_tokens, bar)
                results.update(zip(batch, rows, strict=True))
                bar.advance(len(batch))
                self.stop.raise_if_set()
        return [results[index] for index in range(len(jobs))]

    def _stored_or(self, path: Path, jobs: list[Job], what: str, max_new_tokens: int, bar: Bar) -> list[Written]:
        settings = self.settings
        asked = [
            self.identity,
            self.seed,
            what,
            max_new_tokens,
            settings.temperature,
            settings.top_p,
            [[job.id, job.prompt] for job in jobs],
        ]
        key = _digest(asked)
        stored = _read_part(path, key)
        if stored is None:
            stored = self._generate(jobs, what, max_new_tokens, bar)
            rows = [[one.token_ids, one.finished] for one in stored]
            write_json(path, {"key": key, "rows": rows, "sha256": _digest(rows)})
        return stored

    def _generate(self, jobs: list[Job], what: str, max_new_tokens: int, bar: Bar) -> list[Written]:
        from exittrain.decoding.loop import generate

        def count(num_new: int) -> None:
            self.num_tokens += num_new
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
        part = json.loads(path.read_text(encoding="utf-8"))
        if part["key"] == key and part["sha256"] == _digest(part["rows"]):
            return [Written(ids, finished) for ids, finished in part["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
