"""What one cell of an evaluation holds, and how it is kept on disk so that a killed evaluation goes on.

A cell is one (drafter, task, temperature[, verifier]), joined from pieces (evaluation/pieces.py). What is kept is one
JSON file, written atomically when it is whole, with the key it was made under; a damaged one is named and made again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from exittrain.errors import InputError
from exittrain.records.files import read_json, write_json
from exittrain.stages.evaluation.measures import Floats, Trace

if TYPE_CHECKING:
    from typing_extensions import Self


class Storable(Protocol):
    """What a cell can hold: it goes to JSON and comes back equal."""

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self: ...


Result = TypeVar("Result", bound=Storable)


def _in_order(parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for part in parts for name in part)


@dataclass(frozen=True)
class Comparison:
    """Whose gain over whom is quoted, and what is equal between the two."""

    drafter: str
    control: str
    basis: str


@dataclass(frozen=True, eq=False)
class ContextResult:
    """reach [A, D]: probability that at least d drafted tokens are accepted, d = 1..D, exact given each context's tree.

    Its sum over depths is the expected number of accepted tokens, because E[accepted] = sum over d of P(accepted >= d):
    the coverage, where the verifier is a fixed one.
    """

    sequence_ids: tuple[str, ...]
    anchors: tuple[int, ...]
    reach: Floats

    @property
    def coverage(self) -> Floats:
        """[A] expected accepted tokens."""
        return np.asarray(self.reach.sum(axis=1))

    def to_json(self) -> dict[str, Any]:
        return {"sequence_ids": self.sequence_ids, "anchors": self.anchors, "reach": self.reach.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ContextResult:
        reach = np.asarray(data["reach"], dtype=np.float64)
        return cls(tuple(data["sequence_ids"]), tuple(data["anchors"]), reach)

    @classmethod
    def join(cls, parts: Sequence[ContextResult]) -> ContextResult:
        """One result of all contexts."""
        anchors = tuple(anchor for part in parts for anchor in part.anchors)
        reach = np.concatenate([part.reach for part in parts])
        return cls(_in_order([part.sequence_ids for part in parts]), anchors, reach)


@dataclass(frozen=True)
class DecodeResult:
    """traces: finished prompts; skipped: reasons by prompt; stage_seconds: sums over rounds."""

    traces: tuple[Trace, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        traces = [
            [t.prompt_id, t.block_lengths, t.num_tokens, t.expected_block_lengths, t.coverages] for t in self.traces
        ]
        return {"traces": traces, "skipped": self.skipped, "stage_seconds": self.stage_seconds}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecodeResult:
        traces = tuple(
            Trace(prompt, tuple(blocks), tokens, *(None if v is None else tuple(v) for v in recorded))
            for prompt, blocks, tokens, *recorded in data["traces"]
        )
        return cls(traces, dict(data["skipped"]), dict(data["stage_seconds"]))

    @classmethod
    def join(cls, parts: Sequence[DecodeResult]) -> DecodeResult:
        """One result of all prompts; none of no parts."""
        skipped: dict[str, str] = {}
        seconds: Counter[str] = Counter()
        for part in parts:
            skipped.update(part.skipped)
            seconds.update(part.stage_seconds)
        return cls(tuple(trace for part in parts for trace in part.traces), skipped, dict(seconds))


@dataclass(frozen=True, eq=False)
class VerifierResult:
    """Verifiers on the same trees. expected [A] exact, measured [A] mean of the draws; seconds: mean of a verdict."""

    sequence_ids: tuple[str, ...]
    draws: int
    expected: dict[str, Floats]
    measured: dict[str, Floats]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        tables = {"expected": self.expected, "measured": self.measured}
        lists = {name: {rule: values.tolist() for rule, values in table.items()} for name, table in tables.items()}
        return {"sequence_ids": self.sequence_ids, "draws": self.draws, "seconds": self.seconds, **lists}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VerifierResult:
        expected, measured = (
            {rule: np.asarray(values, dtype=np.float64) for rule, values in data[name].items()}
            for name in ("expected", "measured")
        )
        return cls(tuple(data["sequence_ids"]), data["draws"], expected, measured, dict(data["seconds"]))

    @classmethod
    def join(cls, parts: Sequence[VerifierResult]) -> VerifierResult:
        """One result of all trees, each of as many draws."""
        first, count = parts[0], sum(len(part.sequence_ids) for part in parts)
        expected = {rule: np.concatenate([part.expected[rule] for part in parts]) for rule in first.expected}
        measured = {rule: np.concatenate([part.measured[rule] for part in parts]) for rule in first.measured}
        seconds = {
            rule: sum(part.seconds[rule] * len(part.sequence_ids) for part in parts) / count for rule in first.seconds
        }
        return cls(_in_order([part.sequence_ids for part in parts]), first.draws, expected, measured, seconds)


@dataclass(frozen=True)
class AnswerResult:
    """The target's own plain answers to a task's prompts: new token ids by prompt."""

    answers: dict[str, list[int]]

    def to_json(self) -> dict[str, Any]:
        return self.answers

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AnswerResult:
        return cls({prompt: list(tokens) for prompt, tokens in data.items()})

    @classmethod
    def join(cls, parts: Sequence[AnswerResult]) -> AnswerResult:
        """The answers to all prompts."""
        return cls({prompt: tokens for part in parts for prompt, tokens in part.answers.items()})


@dataclass(frozen=True)
class SpeedResult:
    """Wall-clock numbers of one drafter beside plain decoding."""

    numbers: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.numbers

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpeedResult:
        return cls(dict(data))


def cell_key(parts: Mapping[str, Any]) -> str:
    """sha256 over everything that decides a cell's numbers."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class CellStore:
    """What is kept below one folder. Several processes may read and write there at once."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / f"{key[:24]}.json"

    def find(self, kind: type[Result], key: str) -> Result | None:
        """What is stored under `key`; None where nothing is, or what is there is damaged, which is said."""
        try:
            return self._read(kind, key)
        except FileNotFoundError:
            return None
        except (InputError, KeyError, TypeError, ValueError):
            print(f"{self.path(key)} is damaged: what it held is measured again", file=sys.stderr, flush=True)
            return None

    def get(self, kind: type[Result], key: str, make: Callable[[], Result]) -> Result:
        """What is stored under `key`, or `make()`, stored first; both are read back, so they are equal.

        Where another process stored it meanwhile, that stays: readers never see two results under one key.
        """
        found = self.find(kind, key)
        if found is not None:
            return found
        made = make().to_json()
        try:
            return self._read(kind, key)
        except (InputError, OSError, KeyError, TypeError, ValueError):
            write_json(self.path(key), {"key": key, "cell": made}, seal=True)
        return self._read(kind, key)

    def _read(self, kind: type[Result], key: str) -> Result:
        path = self.path(key)
        path.stat()  # a missing file is no damage: FileNotFoundError
        data = read_json(path)
        if data["key"] != key:
            raise ValueError(f"{path} holds another cell")
        return kind.from_json(data["cell"])
