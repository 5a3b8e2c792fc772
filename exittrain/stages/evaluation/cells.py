"""Which cells an evaluation has, and of which pieces each consists. Nothing is measured until a piece is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from exittrain.decoding.auto import AUTO, choose_auto
from exittrain.drafters.calibration import Choice
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.records.schema import CODE_VERSION
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation import contexts as ctx
from exittrain.stages.evaluation import decoding as dec
from exittrain.stages.evaluation.pieces import Piece, PiecedCell
from exittrain.stages.evaluation.results import (
    AnswerResult,
    ContextResult,
    DecodeResult,
    VerifierResult,
    cell_key,
)  # fmt: skip
from exittrain.stages.evaluation.setup import Cell, Setup, Subject
from exittrain.stages.evaluation.tasks import EvalPrompt, Task, choose_contexts

VERIFIER_CONTEXTS = 128  # trees on which all verifiers are compared
VERIFIER_DRAWS = 16  # verdicts a tree


class Planned(NamedTuple):
    """A drafter's cell. table: the field of `Results` it belongs to."""

    table: str
    cell: Cell
    planned: PiecedCell[Any]


class Cells:
    """The cells of one target under one setup."""

    def __init__(self, target: TargetModel, setup: Setup, stop: StopFlag) -> None:
        self.target, self.setup, self.stop = target, setup, stop
        self._choices: dict[tuple[str, float], Choice] = {}

    def answers(self, task: Task) -> PiecedCell[AnswerResult]:
        """The target's own answers, sampled plainly at the first temperature: where a benchmark's trees may grow."""
        target, setup, length = self.target, self.setup, self.setup.settings.max_new_tokens
        cell = Cell(task.name, setup.settings.temperatures[0])

        def piece(batch: Sequence[EvalPrompt]) -> Piece[AnswerResult]:
            key = self.key("answers", None, task, cell, max_new_tokens=length, prompts=[p.id for p in batch])
            some = replace(task, prompts=tuple(batch))
            return Piece(
                AnswerResult, key, f"a piece of the target's answers to {task.name}",
                lambda: dec.plain_answers(target, some, setup.at(cell.temperature), length, setup.seed, self.stop, ""),
            )  # fmt: skip

        found = dec.answer_batches(task.prompts, target.max_positions, length)
        return PiecedCell(AnswerResult, tuple(map(piece, found)))

    def contexts(self, task: Task) -> ctx.ContextSet:
        """Where a task's trees grow.

        Raises:
            InputError: no context leaves room for them.
        """
        settings, shape, positions = self.setup.settings, self.setup.shape, self.target.max_positions
        assert settings.contexts is not None  # the caller has looked
        deepest = max(shape.depth, shape.budget)  # the oracle may grow a chain
        chosen = choose_contexts(task.sequences, settings.contexts, self.setup.seed, positions - 1 - deepest)
        if not chosen:
            raise InputError(
                f"task {task.name}: no context leaves room for trees in the target's {positions} positions"
            )
        return ctx.ContextSet.of(task.sequences, chosen)

    def oracle(self, task: Task, places: ctx.ContextSet, cell: Cell) -> PiecedCell[ContextResult]:
        target, setup, sampling = self.target, self.setup, self.setup.at(cell.temperature)

        def piece(some: ctx.ContextSet) -> Piece[ContextResult]:
            return Piece(
                ContextResult, self.key("oracle", None, task, cell, places=some.places()), _named("the oracle", cell),
                lambda: ctx.measure_oracle(target, some, setup.shape, sampling, self.stop, ""),
            )  # fmt: skip

        return PiecedCell(ContextResult, tuple(map(piece, places.pieces())))

    def of(self, subject: Subject, contexts: Mapping[Task, ctx.ContextSet], tasks: Sequence[Task]) -> Iterator[Planned]:
        """All cells of a drafter, in order: at `contexts`, and decoding the prompts of `tasks`."""
        for temperature in self.setup.settings.temperatures:
            for task, places in contexts.items():
                cell = Cell(task.name, temperature)
                yield Planned("contexts", cell, self._contexts(subject, task, places, cell))
                if subject.name == self.setup.pattern and len(self._rules(temperature)) > 1:
                    yield Planned("verifiers", cell, self._verifiers(subject, task, places, cell))
            for task in tasks:
                for verifier in self.served(subject):
                    cell = Cell(task.name, temperature, verifier)
                    yield Planned("decoded", cell, self._decoded(subject, task, cell))

    def served(self, subject: Subject) -> list[str]:
        """The verifiers this drafter is decoded with: `auto` only where it has a calibration."""
        known = subject.drafter.calibration is not None
        return [verifier for verifier in self.setup.settings.verifiers if known or verifier != AUTO]

    def choice(self, subject: Subject, temperature: float) -> Choice:
        """What `auto` takes for this drafter. Raises InputError where its calibration does not hold."""
        setup, place = self.setup, (subject.fingerprint, temperature)
        if place not in self._choices:
            chosen = choose_auto(self.target, subject.drafter, setup.at(temperature), setup.shape.budget)
            self._choices[place] = chosen
        return self._choices[place]

    def key(self, kind: str, subject: Subject | None, task: Task, cell: Cell, **extra: Any) -> str:
        """Everything that decides a cell's numbers; names of drafters and folders do not."""
        setup = self.setup
        return cell_key({
            "kind": kind, "code": CODE_VERSION, "target": self._target_fingerprint,
            "drafter": None if subject is None else subject.fingerprint, "task": task.fingerprint(),
            "cell": vars(cell), "builder": setup.builder, "shape": vars(setup.shape), "seed": setup.seed,
            "sampling": vars(setup.at(cell.temperature)), **extra,
        })  # fmt: skip

    @cached_property
    def _target_fingerprint(self) -> str:
        return self.target.fingerprint()

    def served_key(
        self, kind: str, subject: Subject, task: Task, cell: Cell, settings: dec.DecodeSettings, **extra: Any
    ) -> str:
        """The key of what is decoded under these settings, whether they were named or chosen by `auto`."""
        return self.key(
            kind, subject, task, replace(cell, verifier=settings.verifier), builder=settings.builder,
            shape=vars(settings.shape), max_new_tokens=settings.max_new_tokens, **extra,
        )  # fmt: skip

    def decode_settings(self, subject: Subject, cell: Cell) -> dec.DecodeSettings:
        setup = self.setup
        builder, shape, verifier = setup.builder, setup.shape, cell.verifier
        if verifier == AUTO:
            choice = self.choice(subject, cell.temperature)
            builder, shape, verifier = choice.builder, choice.shape, choice.verifier
        return dec.DecodeSettings(
            builder, shape, setup.at(cell.temperature), verifier, setup.settings.max_new_tokens,
            setup.settings.batch_size, setup.seed,
        )  # fmt: skip

    def usable(self, subject: Subject, task: Task) -> tuple[list[EvalPrompt], dict[str, str]]:
        """(prompts with room in the positions of target and drafter, the others' reasons by id)."""
        positions = min(self.target.max_positions, subject.drafter.max_positions)
        return dec.usable_prompts(task.prompts, positions, self.setup.settings.max_new_tokens)

    def _rules(self, temperature: float) -> list[str]:
        """Verifiers to set side by side; at temperature 0 they all take the argmax path."""
        return [] if temperature == 0 else [rule for rule in self.setup.settings.verifiers if rule != AUTO]

    def _contexts(self, subject: Subject, task: Task, places: ctx.ContextSet, cell: Cell) -> PiecedCell[ContextResult]:
        target, setup, drafter, rule = self.target, self.setup, subject.drafter, self.setup.context_rule
        trees = (setup.builder, setup.shape, setup.at(cell.temperature))
        extra = {} if rule is None else {"rule": rule}

        def piece(some: ctx.ContextSet) -> Piece[ContextResult]:
            key = self.key("contexts", subject, task, cell, places=some.places(), **extra)

            def make() -> ContextResult:
                if rule is None:
                    return ctx.measure_contexts(target, drafter, some, *trees, self.stop, "")
                return ctx.measure_sampled(target, drafter, some, rule, *trees, setup.seed, self.stop, "")

            return Piece(ContextResult, key, _named(subject.name, cell), make)

        return PiecedCell(ContextResult, tuple(map(piece, places.pieces())))

    def _verifiers(
        self, subject: Subject, task: Task, places: ctx.ContextSet, cell: Cell
    ) -> PiecedCell[VerifierResult]:
        target, setup, rules = self.target, self.setup, self._rules(cell.temperature)

        def piece(some: ctx.ContextSet) -> Piece[VerifierResult]:
            return Piece(
                VerifierResult,
                self.key(
                    "verifiers", subject, task, cell, rules=rules, places=some.places(), draws=VERIFIER_DRAWS
                ),
                f"{_named(subject.name, cell)}, verifiers side by side",
                lambda: ctx.measure_verifiers(
                    target, subject.drafter, some, rules, setup.builder, setup.shape, setup.at(cell.temperature),
                    VERIFIER_DRAWS, setup.seed, self.stop, "",
                ),
            )  # fmt: skip

        compared = places.select(places.spread(VERIFIER_CONTEXTS))
        return PiecedCell(VerifierResult, tuple(map(piece, compared.pieces())))

    def _decoded(self, subject: Subject, task: Task, cell: Cell) -> PiecedCell[DecodeResult]:
        settings = self.decode_settings(subject, cell)
        usable, skipped = self.usable(subject, task)

        def piece(batch: Sequence[EvalPrompt]) -> Piece[DecodeResult]:
            some = replace(task, prompts=tuple(batch))
            key = self.served_key("decode", subject, task, cell, settings, prompts=[prompt.id for prompt in batch])
            return Piece(
                DecodeResult, key, _named(subject.name, cell),
                lambda: dec.decode_cell(self.target, subject.drafter, some, settings, self.stop, ""),
            )  # fmt: skip

        pieces = tuple(map(piece, dec.batches(usable, settings.batch_size)))
        return PiecedCell(DecodeResult, pieces, (DecodeResult((), skipped),))


def _named(who: str, cell: Cell) -> str:
    rule = f", {cell.verifier}" if cell.verifier else ""
    return f"a piece of {who} on {cell.task} at temperature {cell.temperature:g}{rule}"
