"""What a study gets, what it gives back, and what becomes of it on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from exittrain.errors import InputError, nearest
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import seed_for
from exittrain.models.target import TargetModel
from exittrain.records.files import record_of, write_json, write_text
from exittrain.records.schema import CODE_VERSION
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.contexts import ContextSet
from exittrain.stages.evaluation.decoding import plain_answers
from exittrain.stages.evaluation.intervals import Bootstrap
from exittrain.stages.evaluation.output import hardware
from exittrain.stages.evaluation.results import AnswerResult, CellStore, Storable, cell_key
from exittrain.stages.evaluation.setup import Entrant, Subject
from exittrain.stages.evaluation.tables import Table
from exittrain.stages.evaluation.tasks import Task, answered, choose_contexts
from exittrain.stages.reporting.figures import standalone
from exittrain.stages.studies.laws import LawResult, TreeSource, measure_laws
from exittrain.stages.studies.settings import Study

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

Result = TypeVar("Result", bound=Storable)


@dataclass(frozen=True)
class Bench:
    """Target, drafters, prompts and a folder: what every study measures on. sampling: its top-k and top-p serve all.

    `folder/cells` keeps every finished cell; a study that was killed goes on from there.
    """

    target: TargetModel
    entrants: Sequence[Entrant]
    tasks: Sequence[Task]
    settings: Study
    sampling: Sampling
    seed: int
    folder: Path
    stop: StopFlag
    _subjects: dict[str, Subject] = field(default_factory=dict, repr=False)

    @property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap(self.settings.bootstrap, seed_for(self.seed, "study", "bootstrap"))

    def at(self, temperature: float) -> Sampling:
        return replace(self.sampling, temperature=temperature)

    def entrant(self, name: str) -> Entrant:
        """Raises InputError where no drafter has this name: studies of several ask for all before they measure one."""
        names = [entrant.name for entrant in self.entrants]
        if name not in names:
            raise InputError(f"no drafter {name!r}{nearest(name, names)} (there are: {', '.join(names)})")
        return self.entrants[names.index(name)]

    def subject(self, name: str) -> Subject:
        """A drafter by its entrant's name; loaded once, and then the only one in memory."""
        if name not in self._subjects:
            drafter: Drafter = self.entrant(name).load()
            drafter.module.eval()
            self._subjects.clear()
            self._subjects[name] = Subject(name, drafter, drafter.fingerprint())
        return self._subjects[name]

    def default_drafter(self) -> str:
        """The drafter a study of one takes: the settings' first, else the last arm, else the last drafter given."""
        arms = [entrant.name for entrant in self.entrants if entrant.role == "arm"]
        named = self.settings.drafters or arms[-1:] or [self.entrants[-1].name]
        return named[0]

    def get(self, kind: type[Result], parts: Mapping[str, Any], make: Callable[[], Result]) -> Result:
        """A cell from disk, or made and stored; `parts` is all that decides it, next to target, sampling and seed."""
        key = cell_key({
            **parts, "kind": kind.__name__, "code": CODE_VERSION, "target": self.target.fingerprint(),
            "sampling": vars(self.sampling), "seed": self.seed,
        })  # fmt: skip
        return CellStore(self.folder / "cells").get(kind, key, make)

    def contexts(self, drafters: Sequence[str], depth: int, chain: int = 0) -> ContextSet:
        """The study's contexts over all its tasks, spread evenly: one set for all its drafters. Behind each, trees of
        `depth` levels fit the positions of these drafters and of the target, and a chain of `chain` nodes the target's.

        In a benchmark they lie in the target's own answers, sampled at temperature 1.

        Raises:
            InputError: no context leaves that room.
        """
        limits = {"the target": (self.target.max_positions, max(depth, chain))}
        for name in reversed(drafters):  # the first is left in memory, where measuring begins
            limits[name] = (self.subject(name).drafter.max_positions, depth)
        tightest = min(limits, key=lambda name: limits[name][0] - limits[name][1])
        positions, levels = limits[tightest]
        sequences = [sequence for task in self.tasks for sequence in self._answered(task).sequences]
        chosen = choose_contexts(sequences, self.settings.contexts, self.seed, positions - 1 - levels)
        if not chosen:
            raise InputError(
                f"no context leaves room for {levels} levels of nodes in the {positions} positions of {tightest}: ask "
                "for smaller trees, or take other tasks"
            )
        return ContextSet.of(sequences, chosen)

    def laws(
        self, drafter: str, contexts: ContextSet, source: TreeSource, verifiers: Sequence[str], temperature: float,
        draws: int | None = None,
    ) -> LawResult:  # fmt: skip
        """`measure_laws` as a stored cell. draws: default the settings' own."""
        subject, sampling = self.subject(drafter), self.at(temperature)
        count = self.settings.draws if draws is None else draws
        parts = {
            "drafter": subject.fingerprint, "contexts": contexts_hash(contexts), "source": source.key(),
            "verifiers": list(verifiers), "temperature": temperature, "draws": count,
        }  # fmt: skip
        description = f"{self.settings.name}: {drafter}, {source.builder}, temperature {temperature:g}"
        return self.get(
            LawResult, parts,
            lambda: measure_laws(
                self.target, subject.drafter, contexts, source, verifiers, sampling, count, self.seed, self.stop,
                description,
            ),
        )  # fmt: skip

    def _answered(self, task: Task) -> Task:
        if task.sequences:
            return task
        length, sampling = self.settings.max_new_tokens, self.at(1.0)
        made = self.get(
            AnswerResult, {"answers": task.fingerprint(), "max_new_tokens": length},
            lambda: plain_answers(self.target, task, sampling, length, self.seed, self.stop),
        )  # fmt: skip
        return answered(task, made.answers)


def hash_of(value: Any) -> str:
    return cell_key({"value": value})


def contexts_hash(contexts: ContextSet) -> str:
    """What a cell's key says of its contexts: which places, in which tokens."""
    places = [contexts.ids, contexts.anchors.tolist(), [hash_of(s.tolist()) for s in contexts.sequences]]
    return hash_of(places)


@dataclass(frozen=True)
class StudyReport:
    """tables: in reading order; plots: name -> svg; data: the results in study.json (numbers, never formatted text);
    advice: sentences for the user, printed last."""

    tables: Sequence[Table]
    plots: Mapping[str, str]
    data: Mapping[str, Any]
    advice: Sequence[str] = ()


def write_report(bench: Bench, report: StudyReport) -> None:
    """study.json, table.md and <plot>.svg in the study's folder, each whole or not at all; study.json last.

    It also names the plots and holds the tables as printed: the run's report sets them.
    """
    settings, folder = bench.settings, bench.folder
    note = {
        "schema_version": 1,
        "suite": settings.model_dump(mode="json"),
        "target_fingerprint": bench.target.fingerprint(),
        "hardware": hardware(bench.target.device),
        "seed": bench.seed,
        "sampling": vars(bench.sampling),
        "tasks": {task.name: task.source for task in bench.tasks},
    }
    parts = [f"## {settings.name}", "", settings.description, ""]
    parts += [f"- {line}" for line in report.advice] + ([""] if report.advice else [])
    write_text(folder / "table.md", "\n".join([*parts, *(table.markdown() for table in report.tables)]))
    plots = {}
    for name, text in report.plots.items():
        write_text(folder / f"{name}.svg", standalone(text))
        plots[name] = record_of(folder / f"{name}.svg")
    shown = {"tables": [asdict(table) for table in report.tables], "plots": plots}
    write_json(
        folder / "study.json", {**note, "advice": list(report.advice), **shown, "results": report.data}, seal=True
    )
