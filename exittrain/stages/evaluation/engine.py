"""Runs an evaluation: every rank of every part makes its share of the pieces, then one process joins them.

One drafter is in memory at a time; every finished piece is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from exittrain.decoding.auto import AUTO
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.runtime import ranks
from exittrain.runtime.parts import WHOLE, Part
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.cells import Cells
from exittrain.stages.evaluation.contexts import ContextSet
from exittrain.stages.evaluation.decoding import measure_speed, usable_prompts
from exittrain.stages.evaluation.pieces import Piece, PiecedCell, Worker
from exittrain.stages.evaluation.results import AnswerResult, CellStore, SpeedResult
from exittrain.stages.evaluation.setup import Cell, Entrant, Results, Setup, Subject, check_calibrations
from exittrain.stages.evaluation.tasks import Task, answered

SPEED_PROMPTS = 4  # decoded with and without the drafter, in turn

Contexts = dict[Task, ContextSet]


class Engine:
    """`work()` on every rank of every part, then `finish()` by one process.

    What is on disk under the same key is not measured again. part: which share of the work this job does.

    Raises:
        InputError: nothing to measure.
    """

    def __init__(
        self, target: TargetModel, entrants: Sequence[Entrant], setup: Setup, tasks: Sequence[Task], folder: Path,
        stop: StopFlag, part: Part = WHOLE,
    ) -> None:  # fmt: skip
        settings = setup.settings
        self.target, self.entrants, self.setup, self.tasks = target, entrants, setup, tasks
        self.folder, self.stop, self.part = folder, stop, part
        self._store, self._cells = CellStore(folder / "cells"), Cells(target, setup, stop)
        self._worker = Worker(self._store, part, stop)
        self._fingerprints: dict[str, str] = {}
        self._decoded = [task for task in tasks if task.prompts] if settings.decode else []
        self._measured = [task for task in tasks if task.sequences or task.prompts] if settings.contexts else []
        if not self._decoded and not self._measured:
            raise InputError(
                "nothing to evaluate: name eval.tasks, and set eval.decode to true or eval.contexts to a count"
            )

    def check(self) -> None:
        """What can be refused without measuring, and without any drafter's weights.

        Raises:
            InputError: `auto` without a calibration that holds, no room for a task's trees or for its answers.
        """
        setup, length = self.setup, self.setup.settings.max_new_tokens
        if self._decoded and AUTO in setup.settings.verifiers:
            check_calibrations(self.target, setup, {entrant.name: entrant.calibration() for entrant in self.entrants})
        for task in self._measured:
            if task.sequences:
                self._cells.contexts(task)
        answering = [task for task in self._measured if not task.sequences]
        for task in dict.fromkeys([*self._decoded, *answering]):
            if not usable_prompts(task.prompts, self.target.max_positions, length)[0]:
                raise InputError(f"task {task.name}: no prompt leaves room for {length} new tokens")

    def check_weights(self) -> None:
        """Also refuse, with an InputError, what `auto` would: loads every drafter that has a calibration."""
        for entrant in self.entrants if self._decoded and AUTO in self.setup.settings.verifiers else ():
            if entrant.calibration() is not None:
                subject = self._subject(entrant)
                for temperature in self.setup.settings.temperatures:
                    self._cells.choice(subject, temperature)

    def work(self) -> None:
        """Make this rank's share of this part. Every rank enters; all leave together.

        Raises:
            Interrupted: a signal came; the pieces that are whole stay, the same call goes on.
        """
        ranks.on_all(self.check)
        self._work_answers()
        ranks.on_all(self._work)

    def finish(self) -> Results:
        """All cells, joined; measures nothing but speed, which is wall clock, while nobody else is at work.

        Raises:
            Incomplete: a piece is missing.
            Interrupted: a signal came.
        """
        results = Results({}, {}, {}, {}, {}, {}, {})
        contexts = self._contexts(PiecedCell.read)
        for cell, planned in self._oracles(contexts):
            results.oracles[cell] = planned.read(self._store)
        for entrant in self.entrants:
            self.stop.raise_if_set()
            self._read(self._subject(entrant), contexts, results)
        if self._decoded and self.setup.settings.speed:
            for entrant in self.entrants:
                self._measure_speed(self._subject(entrant), results)
        return results

    def _work_answers(self) -> None:
        """Contexts lie in the target's answers, so all of them come first. Ranks wait for one another; parts cannot,
        so once its own share is made a part goes on with what the others lack, each from another place."""
        cells = [self._cells.answers(task) for task in self._measured if not task.sequences]
        pieces: list[Piece[AnswerResult]] = [piece for cell in cells for piece in cell.pieces]
        own, description = self._worker.mine(pieces), "eval, the target's answers"
        ranks.on_all(lambda: self._worker.make(own, description))
        if self.part.count > 1:
            start = len(pieces) * self.part.index // self.part.count
            others = Worker(self._store, WHOLE, self.stop).mine(pieces[start:] + pieces[:start])
            ranks.on_all(lambda: self._worker.make(others, description))

    def _work(self) -> None:
        contexts = self._contexts(PiecedCell.get)
        oracles = [piece for _, planned in self._oracles(contexts) for piece in planned.pieces]
        self._worker.make(self._worker.mine(oracles), "eval oracle")
        for entrant in self.entrants:
            self.stop.raise_if_set()
            self._work_on(self._subject(entrant), contexts)

    def _work_on(self, subject: Subject, contexts: Contexts) -> None:
        planned = self._cells.of(subject, contexts, self._decoded)
        pieces = [piece for _, _, cell in planned for piece in cell.pieces]
        self._worker.make(self._worker.mine(pieces), f"eval {subject.name}")

    def _subject(self, entrant: Entrant) -> Subject:
        drafter = entrant.load()
        drafter.module.eval()
        if entrant.name not in self._fingerprints:
            self._fingerprints[entrant.name] = drafter.fingerprint()
        return Subject(entrant.name, drafter, self._fingerprints[entrant.name])

    def _contexts(self, answers: Callable[[PiecedCell[AnswerResult], CellStore], AnswerResult]) -> Contexts:
        """Where trees grow, by task with its sequences."""
        tasks = [
            task if task.sequences else answered(task, answers(self._cells.answers(task), self._store).answers)
            for task in self._measured
        ]
        return {task: self._cells.contexts(task) for task in tasks}

    def _oracles(self, contexts: Contexts) -> list[tuple[Cell, PiecedCell]]:  # type: ignore[type-arg]
        cells = [
            (task, places, Cell(task.name, temperature))
            for task, places in contexts.items()
            for temperature in (self.setup.settings.temperatures if self.setup.settings.oracle else ())
        ]
        return [(cell, self._cells.oracle(task, places, cell)) for task, places, cell in cells]

    def _read(self, subject: Subject, contexts: Contexts, results: Results) -> None:
        results.fingerprints[subject.name] = subject.fingerprint
        for table, cell, planned in self._cells.of(subject, contexts, self._decoded):
            getattr(results, table).setdefault(cell, {})[subject.name] = planned.read(self._store)
            if cell.verifier == AUTO:
                choice = self._cells.choice(subject, cell.temperature)
                results.choices.setdefault(cell, {})[subject.name] = choice

    def _measure_speed(self, subject: Subject, results: Results) -> None:
        self.stop.raise_if_set()
        served, task = self._cells.served(subject), self._decoded[0]
        if not served:
            return
        cell = Cell(task.name, self.setup.settings.temperatures[0], served[0])
        settings = self._cells.decode_settings(subject, cell)
        usable, _ = self._cells.usable(subject, task)
        if not usable:
            raise InputError(f"task {task.name}: no prompt leaves room for {settings.max_new_tokens} new tokens")
        prompts = usable[:SPEED_PROMPTS]
        key = self._cells.served_key("speed", subject, task, cell, settings, prompts=len(prompts))
        description = f"eval {subject.name}, speed against plain decoding"
        result = self._store.get(
            SpeedResult, key,
            lambda: SpeedResult(
                measure_speed(self.target, subject.drafter, task, prompts, settings, self.stop, description)
            ),
        )  # fmt: skip
        results.speed[subject.name] = SpeedResult({**result.numbers, "verifier": cell.verifier})
