"""Runs an evaluation cell by cell: one drafter in memory at a time, every finished cell on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exittrain.decoding.auto import AUTO, choose_auto
from exittrain.drafters.calibration import Calibration, Choice
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.records.schema import CODE_VERSION
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.contexts import (
    ContextSet,
    measure_contexts,
    measure_oracle,
    measure_sampled,
    measure_verifiers,
)  # fmt: skip
from exittrain.stages.evaluation.decoding import DecodeSettings, decode_cell, measure_speed, plain_answers, why_skipped
from exittrain.stages.evaluation.results import (
    AnswerResult,
    CellStore,
    ContextResult,
    DecodeResult,
    SpeedResult,
    VerifierResult,
    cell_key,
)  # fmt: skip
from exittrain.stages.evaluation.setup import Cell, Results, Setup, check_calibrations
from exittrain.stages.evaluation.tasks import Task, answered, choose_contexts

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

SPEED_PROMPTS = 4  # decoded with and without the drafter, in turn
VERIFIER_CONTEXTS = 128  # trees on which all verifiers are compared
VERIFIER_DRAWS = 16  # verdicts a tree


@dataclass(frozen=True)
class Entrant:
    """A drafter that is measured. load: called once, when its turn comes; the rest is printed beside its numbers.

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


class Engine:
    """`run()` measures every entrant on every task. A cell that is on disk under the same key is not measured again."""

    def __init__(self, target: TargetModel, setup: Setup, tasks: Sequence[Task], folder: Path, stop: StopFlag) -> None:
        settings = setup.settings
        self.target, self.setup, self.stop = target, setup, stop
        self.store = CellStore(folder / "cells")
        self.tasks = [task for task in tasks if task.prompts] if settings.decode else []
        self.measured = [task for task in tasks if task.sequences or task.prompts] if settings.contexts else []
        if not self.tasks and not self.measured:
            raise InputError(
                "nothing to evaluate: name eval.tasks, and set eval.decode to true or eval.contexts to a count"
            )

    def run(self, entrants: Sequence[Entrant]) -> Results:
        """Raises Interrupted when a signal came: run again to go on."""
        if self.tasks and AUTO in self.setup.settings.verifiers:
            known = {entrant.name: entrant.calibration() for entrant in entrants}
            check_calibrations(self.target, self.setup, known)
        results = Results({}, {}, {}, {}, {}, {}, {})
        contexts = {task: self._contexts(task) for task in map(self._answered, self.measured)}
        for task, places in contexts.items():
            for temperature in self.setup.settings.temperatures if self.setup.settings.oracle else ():
                cell = Cell(task.name, temperature)
                results.oracles[cell] = self._oracle(task, places, cell)
        for entrant in entrants:
            self.stop.raise_if_set()
            self._entrant(entrant, entrant.load(), contexts, results)
        return results

    def _entrant(self, entrant: Entrant, drafter: Drafter, contexts: dict[Task, ContextSet], results: Results) -> None:
        drafter.module.eval()
        subject = Subject(entrant.name, drafter, drafter.fingerprint())
        results.fingerprints[entrant.name] = subject.fingerprint
        for temperature in self.setup.settings.temperatures:
            for task, places in contexts.items():
                cell = Cell(task.name, temperature)
                results.contexts.setdefault(cell, {})[entrant.name] = self._context_cell(subject, task, places, cell)
                if entrant.name == self.setup.pattern and len(self._rules(temperature)) > 1:
                    result = self._verifier_cell(subject, task, places, cell)
                    results.verifiers.setdefault(cell, {})[entrant.name] = result
            for task in self.tasks:
                for verifier in self._served(subject):
                    cell = Cell(task.name, temperature, verifier)
                    if verifier == AUTO:
                        results.choices.setdefault(cell, {})[entrant.name] = self._choice(subject, temperature)
                    results.decoded.setdefault(cell, {})[entrant.name] = self._decode_cell(subject, task, cell)
        if self.tasks and self.setup.settings.speed and self._served(subject):
            results.speed[entrant.name] = self._speed(subject)

    def _served(self, subject: Subject) -> list[str]:
        """The verifiers this drafter is decoded with: `auto` only where it has a calibration."""
        known = subject.drafter.calibration is not None
        return [verifier for verifier in self.setup.settings.verifiers if known or verifier != AUTO]

    def _choice(self, subject: Subject, temperature: float) -> Choice:
        setup = self.setup
        return choose_auto(self.target, subject.drafter, setup.at(temperature), setup.shape.budget)

    def _rules(self, temperature: float) -> list[str]:
        """Verifiers to set side by side; at temperature 0 they all take the argmax path."""
        return [] if temperature == 0 else [rule for rule in self.setup.settings.verifiers if rule != AUTO]

    def _key(self, kind: str, subject: Subject | None, task: Task, cell: Cell, **extra: Any) -> str:
        """Everything that decides a cell's numbers; names of drafters and folders do not."""
        setup = self.setup
        return cell_key({
            "kind": kind, "code": CODE_VERSION, "target": self.target.fingerprint(),
            "drafter": None if subject is None else subject.fingerprint, "task": task.fingerprint(),
            "cell": vars(cell), "builder": setup.builder, "shape": vars(setup.shape), "seed": setup.seed,
            "sampling": vars(setup.at(cell.temperature)), **extra,
        })  # fmt: skip

    def _answered(self, task: Task) -> Task:
        """A benchmark gets the target's own answers (sampled plainly, at the first temperature) to grow trees in."""
        if task.sequences:
            return task
        cell, length = Cell(task.name, self.setup.settings.temperatures[0]), self.setup.settings.max_new_tokens
        sampling, seed = self.setup.at(cell.temperature), self.setup.seed
        made = self.store.get(
            AnswerResult, self._key("answers", None, task, cell, max_new_tokens=length),
            lambda: plain_answers(self.target, task, sampling, length, seed, self.stop),
        )  # fmt: skip
        return answered(task, made.answers)

    def _contexts(self, task: Task) -> ContextSet:
        settings, shape, positions = self.setup.settings, self.setup.shape, self.target.max_positions
        assert settings.contexts is not None  # `measured` is empty otherwise
        deepest = max(shape.depth, shape.budget)  # the oracle may grow a chain
        chosen = choose_contexts(task.sequences, settings.contexts, self.setup.seed, positions - 1 - deepest)
        if not chosen:
            raise InputError(
                f"task {task.name}: no context leaves room for trees in the target's {positions} positions"
            )
        return ContextSet.of(task.sequences, chosen)

    def _oracle(self, task: Task, places: ContextSet, cell: Cell) -> ContextResult:
        sampling, name = self.setup.at(cell.temperature), f"eval oracle, {task.name}, temperature {cell.temperature:g}"
        return self.store.get(
            ContextResult, self._key("oracle", None, task, cell, count=len(places)),
            lambda: measure_oracle(self.target, places, self.setup.shape, sampling, self.stop, name),
        )  # fmt: skip

    def _context_cell(self, subject: Subject, task: Task, places: ContextSet, cell: Cell) -> ContextResult:
        setup, sampling, drafter = self.setup, self.setup.at(cell.temperature), subject.drafter
        name = f"eval {subject.name}, {task.name}, temperature {cell.temperature:g}"
        trees, rule = (setup.builder, setup.shape, sampling), setup.context_rule
        if rule is None:
            return self.store.get(
                ContextResult, self._key("contexts", subject, task, cell, count=len(places)),
                lambda: measure_contexts(self.target, drafter, places, *trees, self.stop, name),
            )  # fmt: skip
        return self.store.get(
            ContextResult, self._key("contexts", subject, task, cell, count=len(places), rule=rule),
            lambda: measure_sampled(self.target, drafter, places, rule, *trees, setup.seed, self.stop, name),
        )  # fmt: skip

    def _verifier_cell(self, subject: Subject, task: Task, places: ContextSet, cell: Cell) -> VerifierResult:
        setup, rules = self.setup, self._rules(cell.temperature)
        some = places.select(places.spread(VERIFIER_CONTEXTS))
        key = self._key("verifiers", subject, task, cell, rules=rules, count=len(some), draws=VERIFIER_DRAWS)
        return self.store.get(
            VerifierResult, key,
            lambda: measure_verifiers(
                self.target, subject.drafter, some, rules, setup.builder, setup.shape, setup.at(cell.temperature),
                VERIFIER_DRAWS, setup.seed, self.stop, f"eval {subject.name}, verifiers side by side",
            ),
        )  # fmt: skip

    def _decode_cell(self, subject: Subject, task: Task, cell: Cell) -> DecodeResult:
        settings = self._decode_settings(subject, cell)
        key = self._served_key("decode", subject, task, cell, settings, batch_size=settings.batch_size)
        description = f"eval {subject.name}, {task.name}, temperature {cell.temperature:g}, {cell.verifier}"
        return self.store.get(
            DecodeResult, key, lambda: decode_cell(self.target, subject.drafter, task, settings, self.stop, description)
        )

    def _decode_settings(self, subject: Subject, cell: Cell) -> DecodeSettings:
        setup = self.setup
        builder, shape, verifier = setup.builder, setup.shape, cell.verifier
        if verifier == AUTO:
            choice = self._choice(subject, cell.temperature)
            builder, shape, verifier = choice.builder, choice.shape, choice.verifier
        return DecodeSettings(
            builder, shape, setup.at(cell.temperature), verifier, setup.settings.max_new_tokens,
            setup.settings.batch_size, setup.seed,
        )  # fmt: skip

    def _served_key(
        self, kind: str, subject: Subject, task: Task, cell: Cell, settings: DecodeSettings, **extra: Any
    ) -> str:
        """The key of what is decoded under these settings, whether they were named or chosen by `auto`."""
        return self._key(
            kind, subject, task, replace(cell, verifier=settings.verifier), builder=settings.builder,
            shape=vars(settings.shape), max_new_tokens=settings.max_new_tokens, **extra,
        )  # fmt: skip

    def _speed(self, subject: Subject) -> SpeedResult:
        task = self.tasks[0]
        cell = Cell(task.name, self.setup.settings.temperatures[0], self._served(subject)[0])
        settings = self._decode_settings(subject, cell)
        positions = min(self.target.max_positions, subject.drafter.max_positions)
        usable = [p for p in task.prompts if why_skipped(p, positions, settings.max_new_tokens) is None]
        if not usable:
            raise InputError(f"task {task.name}: no prompt leaves room for {settings.max_new_tokens} new tokens")
        prompts = usable[:SPEED_PROMPTS]
        key = self._served_key("speed", subject, task, cell, settings, prompts=len(prompts))
        description = f"eval {subject.name}, speed against plain decoding"
        result = self.store.get(
            SpeedResult, key,
            lambda: SpeedResult(
                measure_speed(self.target, subject.drafter, task, prompts, settings, self.stop, description)
            ),
        )  # fmt: skip
        return SpeedResult({**result.numbers, "verifier": cell.verifier})
