"""Runs a study on a run's drafters, or on any drafters of one target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from exittrain.law.sampling import Sampling
from exittrain.runtime import ranks
from exittrain.runtime.lock import hold
from exittrain.runtime.signals import StopFlag
from exittrain.stages.context import StageContext
from exittrain.stages.conversations.store import read_sequences
from exittrain.stages.evaluate import make_tasks, renderer_of, run_entrants
from exittrain.stages.evaluation.output import PIPE_WIDTH
from exittrain.stages.evaluation.setup import Entrant
from exittrain.stages.studies.base import Bench, StudyReport, write_report
from exittrain.stages.studies.settings import Study

if TYPE_CHECKING:
    from exittrain.models.target import TargetModel
    from exittrain.stages.conversations.store import TokenSequence
    from exittrain.stages.evaluation.tasks import Render

STUDIES = {
    "verifiers": ("verifiers", "run_verifiers"),
    "traversal-paper": ("traversal_paper", "run_traversal_paper"),
    "tev-paper": ("tev_paper", "run_tev_paper"),
    "oracle": ("oracle", "run_oracle"),
}


def study_run(context: StageContext, settings: Study) -> StudyReport | None:
    """A study of a run's warm start and arms, in the run's folder studies/<name>.

    Raises:
        InputError: a stage it stands on is missing, an unknown task or drafter, a run folder in use.
        Interrupted: a signal came; what was measured is kept.
    """
    ranks.setup(context.device, context.run.path, context.stop)
    if not ranks.is_main():
        return None
    with hold(context.run.path):
        heldout = read_sequences(context.run.path / "data" / "heldout.parquet")
        folder = context.run.path / "studies" / settings.name
        return study(
            context.target(), run_entrants(context), settings, folder, lambda: renderer_of(context), heldout,
            context.sampling, context.recipe.seed, context.stop,
        )  # fmt: skip


def study(
    target: TargetModel,
    entrants: Sequence[Entrant],
    settings: Study,
    folder: Path,
    renderer: Callable[[], Render],
    heldout: Sequence[TokenSequence] = (),
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: StopFlag | None = None,
) -> StudyReport:
    """Measure, write study.json, table.md and plots into `folder`, print. `sampling` gives top-k and top-p.

    Raises:
        InputError: an unknown task or drafter, no context that leaves room for the trees.
        Interrupted: a signal came; finished cells are on disk, the same call goes on.
    """
    tasks = make_tasks(settings.tasks, None, seed, heldout, renderer)
    bench = Bench(target, entrants, tasks, settings, sampling or Sampling(), seed, folder, stop or StopFlag())
    module, function = STUDIES[getattr(settings, "study")]  # noqa: B009 - every study has one, the base has not
    run: Callable[[Bench], StudyReport] = getattr(import_module(f"exittrain.stages.studies.{module}"), function)
    report = run(bench)
    write_report(bench, report)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    for table in report.tables:
        console.print(table.rich())
        console.print()
    for line in report.advice:
        console.print(line)
    return report
