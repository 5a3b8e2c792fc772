"""What a drafter's trees and verifiers were measured to give: `verifier="auto"` takes the best of it.

Measured by the study `verifiers`, kept as calibration.json beside the drafter's weights.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from exittrain.build.base import TreeShape
from exittrain.build.registry import drawn_by
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.folders import write_bytes
from exittrain.models.sums import CALIBRATION_FILE as CALIBRATION_FILE
from exittrain.models.sums import sealed, unsealed
from exittrain.verify.registry import get_verifier

SCHEMA_VERSION = 1
EQUAL = 1e-6  # block lengths closer than this are the same number: float32 logits give no more
REMEDY = "measure it with `exittrain eval RUN_OR_DRAFTER --suite verifiers`"

Branching = str | tuple[tuple[int, ...], ...]
Record = TypeVar("Record")


@dataclass(frozen=True)
class Choice:
    """One tree and verifier, and what they gave: expected_block_length (bonus included, exact given the trees, mean
    over contexts) with its 95 % interval (None: too few sequences), and round_seconds, wall clock of a decoded round
    (None: not timed).

    Raises InputError where the verifier is not exact for the builder's trees, or a number makes no sense.
    """

    temperature: float
    budget: int
    builder: str
    depth: int
    width: int
    branching: Branching
    verifier: str
    expected_block_length: float
    low: float | None
    high: float | None
    round_seconds: float | None

    def __post_init__(self) -> None:
        get_verifier(self.verifier).check(drawn_by(self.builder))
        if self.verifier == "greedy":
            raise InputError("verifier 'greedy' has nothing to choose by: at temperature 0 it is tev, so calibrate tev")
        numbers = (self.temperature, self.expected_block_length, self.low, self.high, self.round_seconds)
        if not all(math.isfinite(number) for number in numbers if number is not None):
            raise InputError(f"a choice of {self.verifier} on {self.builder} holds a number that is not finite")
        if self.temperature < 0 or self.expected_block_length < 1 or (self.round_seconds or 1.0) <= 0:
            raise InputError(
                f"a choice of {self.verifier} on {self.builder} has temperature {self.temperature}, block length "
                f"{self.expected_block_length}, round seconds {self.round_seconds}: no measurement gives that"
            )
        _ = self.shape

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.budget, self.depth, self.width, self.branching)

    def __str__(self) -> str:
        return describe(self.verifier, self.builder, self.branching, self.budget, self.depth)


@dataclass(frozen=True)
class Calibration:
    """All choices of one drafter for one target at one top_k and top_p. hardware: where round_seconds were taken.

    Fingerprints are of config and weights in the dtype they were measured in (`CausalModel.fingerprint`).
    """

    target_fingerprint: str
    drafter_fingerprint: str
    top_k: int
    top_p: float
    hardware: str
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise InputError("a calibration without choices says nothing: give at least one")
        Sampling(1.0, self.top_k, self.top_p)  # raises where there is no such setting

    def save(self, folder: str | Path) -> Path:
        """Write calibration.json into the drafter's folder, whole or not at all; returns its path."""
        path = Path(folder) / CALIBRATION_FILE
        data = sealed({"schema_version": SCHEMA_VERSION, **asdict(self)})
        text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
        write_bytes(path, f"{text}\n".encode())
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Calibration | None:
        """The folder's calibration, None where there is none.

        Raises:
            InputError: damaged, of another schema, or with keys or values that do not belong there.
        """
        path = Path(folder) / CALIBRATION_FILE
        if not path.is_file():
            return None
        try:
            data = unsealed(json.loads(path.read_text(encoding="utf-8")))
            version = data.pop("schema_version")
            if version != SCHEMA_VERSION:
                raise InputError(f"its schema is {version}, this version reads {SCHEMA_VERSION}")
            return _strict(cls, data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # InputError is a ValueError
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{path} cannot be used ({line}): delete it, then {REMEDY}") from None

    def choose(self, temperature: float, budget: int) -> Choice:
        """The longest expected block at the nearest calibrated temperature (of two as near, the lower) among trees of
        at most `budget` nodes. Of equal ones trees chosen by score first (`drawn_by` "top": they need no draft rows,
        and one tree a context is all there is), then tev, then fewer nodes, then by name.

        Raises:
            InputError: no calibrated tree is that small.
        """
        near = self._at(temperature)
        fitting = [choice for choice in near if choice.budget <= budget]
        if not fitting:
            smallest = min(choice.budget for choice in near)
            raise InputError(f"no calibrated tree has at most {budget} nodes: the smallest budget is {smallest}")
        return _best(fitting, lambda choice: choice.expected_block_length)

    def fastest(self, temperature: float) -> Choice:
        """The most tokens a second, by expected block length over round seconds, at the nearest calibrated temperature.

        Raises:
            InputError: nothing was timed there.
        """
        timed = [choice for choice in self._at(temperature) if choice.round_seconds is not None]
        if not timed:
            raise InputError(f"the calibration near temperature {temperature:g} has no round seconds: {REMEDY}")
        return _best(timed, lambda choice: choice.expected_block_length / (choice.round_seconds or math.inf))

    def _at(self, temperature: float) -> list[Choice]:
        nearest = min({c.temperature for c in self.choices}, key=lambda known: (abs(known - temperature), known))
        return [choice for choice in self.choices if choice.temperature == nearest]


def describe(verifier: str, builder: str, branching: str | Sequence[Sequence[int]], budget: int, depth: int) -> str:
    """`traversal on sampled_wor (2-ary), at most 16 nodes of depth 4`."""
    form = branching if isinstance(branching, str) else f"{len(branching)} rank paths"
    shown = "" if builder in ("best_first", "beam") else f" ({form})"
    return f"{verifier} on {builder}{shown}, at most {budget} nodes of depth {depth}"


def _best(choices: Sequence[Choice], value: Callable[[Choice], float]) -> Choice:
    most = max(map(value, choices))
    equal = [choice for choice in choices if value(choice) >= most * (1 - EQUAL)]
    return min(
        equal,
        key=lambda c: (
            drawn_by(c.builder) != "top", c.verifier != "tev", c.budget, c.verifier, c.builder, str(c.branching),
        ),
    )  # fmt: skip


def _strict(record: type[Record], data: Any) -> Record:
    """A record from parsed JSON: exactly its fields, each of its type. Raises ValueError naming the key."""
    if not isinstance(data, dict):
        raise ValueError(f"a {record.__name__.lower()} is no mapping")
    types = typing.get_type_hints(record)
    wrong = sorted(types.keys() ^ data.keys())
    if wrong:
        raise ValueError(f"key {wrong[0]!r} is {'unknown' if wrong[0] in data else 'missing'}")
    return record(**{name: _value(name, data[name], kind) for name, kind in types.items()})


def _value(name: str, value: Any, kind: Any) -> Any:
    if kind == tuple[Choice, ...] and isinstance(value, list):
        return tuple(_strict(Choice, one) for one in value)
    if kind == Branching and isinstance(value, list):
        if all(isinstance(path, list) and all(type(rank) is int for rank in path) for path in value):
            return tuple(map(tuple, value))
    elif kind in (float, float | None) and type(value) in (int, float):
        return float(value)
    elif type(value) in (typing.get_args(kind) or (kind,)):
        return value
    raise ValueError(f"{name!r} cannot be {value!r}")
