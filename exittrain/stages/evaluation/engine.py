"""Runs an evaluation cell by cell: one drafter in memory at a time, every finished cell on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exittrain.build.base import TreeShape
from exittrain.config.schema import EvalSection
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.records.schema import CODE_VERSION
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.contexts import ContextSet, measure_contexts, measure_oracle, measure_verifiers
from exittrain.stages.evaluation.decoding import DecodeSettings, decode_cell, measure_speed, why_skipped
from exittrain.stages.evaluation.results import (
    CellStore,
    Comparison,
    ContextResult,
    DecodeResult,
    SpeedResult,
    VerifierResult,
    cell_key,
)  # fmt: skip
from exittrain.stages.evaluation.tasks import HELDOUT, Task, choose_contexts

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

SPEED_PROMPTS = 4  # decoded with and without the drafter, in turn
VERIFIER_CONTEXTS = 128  # trees on which all verifiers are compared
VERIFIER_DRAWS = 16  # verdicts a tree


@dataclass(frozen=True)
class Entrant:
    """A drafter that is measured. load: called once, when its turn comes; the rest is printed beside its numbers.

    steps, sequences: what its training saw; train_seconds: wall clock of the steps.
    """

    name: str
    load: Callable[[], Drafter]
    role: str = "drafter"
    objective: str | None = None
    steps: int | None = None
    sequences: int | None = None
    train_seconds: float | None = None


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


@dataclass(frozen=True)
class Cell:
    """What a result belongs to. verifier is empty where it does not matter."""

    task: str
    temperature: float
    verifier: str = ""


@dataclass(frozen=True)
class Results:
    """All cells of an evaluation, per cell by drafter name in the order of the entrants."""

    fingerprints: dict[str, str]
    contexts: dict[Cell, dict[str, ContextResult]]
    oracles: dict[Cell, ContextResult]
    decoded: dict[Cell, dict[str, DecodeResult]]
    verifiers: dict[Cell, dict[str, VerifierResult]]
    speed: dict[str, SpeedResult]


class Engine:
    """`run()` measures every entrant on every task. A cell that is on disk under the same key is not measured again."""

    def __init__(self, target: TargetModel, setup: Setup, tasks: Sequence[Task], folder: Path, stop: StopFlag) -> None:
        self.target, self.setup, self.stop = target, setup, stop
        self.tasks = [task for task in tasks if task.prompts] if setup.settings.decode else []
        self.store = CellStore(folder / "cells")
        self.heldout = next((task for task in tasks if task.name == HELDOUT), None)
        self.contexts = self._contexts()
        if not self.tasks and self.contexts is None:
            raise InputError(
                "nothing to evaluate: set eval.contexts (coverage without decoding) or eval.tasks with eval.decode true"
            )

    def _contexts(self) -> ContextSet | None:
        count = self.setup.settings.contexts
        if count is None:
            return None
        if self.heldout is None or not self.heldout.sequences:
            raise InputError("eval.contexts needs held-out sequences: evaluate a run, or leave eval.contexts out")
        chosen = choose_contexts(self.heldout.sequences, count, self.setup.seed)
        return ContextSet.of(self.heldout.sequences, chosen)

    def run(self, entrants: Sequence[Entrant]) -> Results:
        """Raises Interrupted when a signal came: run again to go on."""
        results = Results({}, {}, {}, {}, {}, {})
        for temperature in self.setup.settings.temperatures:
            if self.contexts is not None and self.setup.settings.oracle:
                cell = Cell(HELDOUT, temperature)
                results.oracles[cell] = self._oracle(cell)
        for entrant in entrants:
            self.stop.raise_if_set()
            self._entrant(entrant, entrant.load(), results)
        return results

    def _entrant(self, entrant: Entrant, drafter: Drafter, results: Results) -> None:
        drafter.model.module.eval()
        results.fingerprints[entrant.name] = drafter.fingerprint()
        for temperature in self.setup.settings.temperatures:
            if self.contexts is not None:
                cell = Cell(HELDOUT, temperature)
                results.contexts.setdefault(cell, {})[entrant.name] = self._context_cell(entrant, drafter, cell)
                if entrant.name == self.setup.pattern and len(self._rules(temperature)) > 1:
                    table = results.verifiers.setdefault(cell, {})
                    table[entrant.name] = self._verifier_cell(entrant, drafter, cell)
            for task in self.tasks:
                for verifier in self.setup.settings.verifiers:
                    cell = Cell(task.name, temperature, verifier)
                    table_of = results.decoded.setdefault(cell, {})
                    table_of[entrant.name] = self._decode_cell(entrant, drafter, task, cell)
        if self.tasks and self.setup.settings.speed:
            results.speed[entrant.name] = self._speed(entrant, drafter)

    def _rules(self, temperature: float) -> list[str]:
        """Verifiers to set side by side; at temperature 0 they all take the argmax path."""
        return [] if temperature == 0 else self.setup.settings.verifiers

    def _key(self, kind: str, drafter: Drafter | None, task: Task, cell: Cell, **extra: Any) -> str:
        """Everything that decides a cell's numbers; names of drafters and folders do not."""
        setup = self.setup
        return cell_key({
            "kind": kind, "code": CODE_VERSION, "target": self.target.fingerprint(),
            "drafter": None if drafter is None else drafter.fingerprint(), "task": task.fingerprint(),
            "cell": vars(cell), "builder": setup.builder, "shape": vars(setup.shape), "seed": setup.seed,
            "sampling": vars(setup.at(cell.temperature)), **extra,
        })  # fmt: skip

    def _oracle(self, cell: Cell) -> ContextResult:
        assert self.contexts is not None and self.heldout is not None
        contexts, setup = self.contexts, self.setup
        key = self._key("oracle", None, self.heldout, cell, count=setup.settings.contexts)
        return self.store.get(
            ContextResult, key,
            lambda: measure_oracle(
                self.target, contexts, setup.shape, setup.at(cell.temperature), self.stop,
                f"eval oracle, temperature {cell.temperature:g}",
            ),
        )  # fmt: skip

    def _context_cell(self, entrant: Entrant, drafter: Drafter, cell: Cell) -> ContextResult:
        assert self.contexts is not None and self.heldout is not None
        contexts, setup = self.contexts, self.setup
        key = self._key("contexts", drafter, self.heldout, cell, count=setup.settings.contexts)
        return self.store.get(
            ContextResult, key,
            lambda: measure_contexts(
                self.target, drafter, contexts, setup.builder, setup.shape, setup.at(cell.temperature), self.stop,
                f"eval {entrant.name}, temperature {cell.temperature:g}",
            ),
        )  # fmt: skip

    def _verifier_cell(self, entrant: Entrant, drafter: Drafter, cell: Cell) -> VerifierResult:
        assert self.contexts is not None and self.heldout is not None
        setup, rules = self.setup, self._rules(cell.temperature)
        some = self.contexts.select(self.contexts.spread(VERIFIER_CONTEXTS))
        key = self._key("verifiers", drafter, self.heldout, cell, rules=rules, count=len(some), draws=VERIFIER_DRAWS)
        return self.store.get(
            VerifierResult, key,
            lambda: measure_verifiers(
                self.target, drafter, some, rules, setup.builder, setup.shape, setup.at(cell.temperature),
                VERIFIER_DRAWS, setup.seed, self.stop, f"eval {entrant.name}, verifiers side by side",
            ),
        )  # fmt: skip

    def _decode_cell(self, entrant: Entrant, drafter: Drafter, task: Task, cell: Cell) -> DecodeResult:
        settings = self._decode_settings(cell)
        fixed = {"max_new_tokens": settings.max_new_tokens, "batch_size": settings.batch_size}
        key = self._key("decode", drafter, task, cell, **fixed)
        description = f"eval {entrant.name}, {task.name}, temperature {cell.temperature:g}, {cell.verifier}"
        return self.store.get(
            DecodeResult, key, lambda: decode_cell(self.target, drafter, task, settings, self.stop, description)
        )

    def _decode_settings(self, cell: Cell) -> DecodeSettings:
        setup = self.setup
        return DecodeSettings(
            setup.builder, setup.shape, setup.at(cell.temperature), cell.verifier, setup.settings.max_new_tokens,
            setup.settings.batch_size, setup.seed,
        )  # fmt: skip

    def _speed(self, entrant: Entrant, drafter: Drafter) -> SpeedResult:
        task = self.tasks[0]
        cell = Cell(task.name, self.setup.settings.temperatures[0], self.setup.settings.verifiers[0])
        settings = self._decode_settings(cell)
        positions = min(self.target.max_positions, drafter.model.max_positions)
        usable = [p for p in task.prompts if why_skipped(p, positions, settings.max_new_tokens) is None]
        if not usable:
            raise InputError(f"task {task.name}: no prompt leaves room for {settings.max_new_tokens} new tokens")
        prompts = usable[:SPEED_PROMPTS]
        key = self._key("speed", drafter, task, cell, prompts=len(prompts), max_new_tokens=settings.max_new_tokens)
        description = f"eval {entrant.name}, speed against plain decoding"
        return self.store.get(
            SpeedResult, key,
            lambda: SpeedResult(
                measure_speed(self.target, drafter, task, prompts, settings, self.stop, description)
            ),
        )  # fmt: skip
