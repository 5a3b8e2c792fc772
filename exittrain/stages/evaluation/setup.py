"""Who is measured, what is held fixed, where results belong, and what `auto` needs before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from exittrain.build.base import TreeShape
from exittrain.build.registry import drawn_by
from exittrain.config.schema import EvalSection
from exittrain.decoding.auto import AUTO, calibration_for
from exittrain.drafters.calibration import REMEDY, Calibration, Choice
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.stages.evaluation.results import (
    Comparison,
    ContextResult,
    DecodeResult,
    SpeedResult,
    VerifierResult,
)  # fmt: skip

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter


@dataclass(frozen=True)
class Entrant:
    """A drafter that is measured. load: called when its turn comes; the rest is printed beside its numbers.

    steps, sequences: what its training saw; train_seconds: wall clock of the steps; folder: where its weights lie, None
    for one that is in memory alone.
    """

    name: str
    load: Callable[[], Drafter]
    role: str = "drafter"
    objective: str | None = None
    steps: int | None = None
    sequences: int | None = None
    train_seconds: float | None = None
    folder: Path | None = None

    def calibration(self) -> Calibration | None:
        """Read without loading the weights, where they lie in a folder."""
        return self.load().calibration if self.folder is None else Calibration.load(self.folder)


@dataclass(frozen=True)
class Subject:
    """The drafter whose turn it is; its fingerprint is computed once."""

    name: str
    drafter: Drafter
    fingerprint: str


@dataclass(frozen=True)
class Setup:
    """What is held fixed for all drafters of one evaluation. sampling: its top-k and top-p."""

    name: str
    settings: EvalSection
    builder: str
    shape: TreeShape
    sampling: Sampling
    seed: int
    comparisons: tuple[Comparison, ...]
    pattern: str  # the drafter on whose trees all verifiers are set side by side

    def at(self, temperature: float) -> Sampling:
        return replace(self.sampling, temperature=temperature)

    @property
    def context_rule(self) -> str | None:
        """The verifier that fixed contexts are measured under: of sampled trees the first one named (tev for `auto`);
        None for trees chosen by score, where coverage says it for all."""
        named = [verifier for verifier in self.settings.verifiers if verifier != AUTO]
        return None if drawn_by(self.builder) == "top" else [*named, "tev"][0]


@dataclass(frozen=True)
class Cell:
    """What a result belongs to. verifier is empty where it does not matter."""

    task: str
    temperature: float
    verifier: str = ""


@dataclass(frozen=True)
class Results:
    """All cells of an evaluation, per cell by drafter name in the order of the entrants. choices: what `auto` took."""

    fingerprints: dict[str, str]
    contexts: dict[Cell, dict[str, ContextResult]]
    oracles: dict[Cell, ContextResult]
    decoded: dict[Cell, dict[str, DecodeResult]]
    verifiers: dict[Cell, dict[str, VerifierResult]]
    speed: dict[str, SpeedResult]
    choices: dict[Cell, dict[str, Choice]]


def check_calibrations(target: TargetModel, setup: Setup, known: Mapping[str, Calibration | None]) -> None:
    """Can `auto` decode? known: by drafter.

    Raises:
        InputError: no drafter has a calibration, or one is of another target or setting, or has no tree that small.
    """
    found = {name: one for name, one in known.items() if one is not None}
    if not found:
        raise InputError(f"'eval.verifiers' has 'auto' and none of {', '.join(known)} has a calibration: {REMEDY}")
    for name, one in found.items():
        for temperature in setup.settings.temperatures:
            calibration_for(target, one, setup.at(temperature), name).choose(temperature, setup.shape.budget)
