"""Stage `report`: tables, plots and trees of one run, or of several, as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exittrain.errors import InputError
from exittrain.records.files import write_text
from exittrain.stages.context import StageContext, say
from exittrain.stages.reporting.load import load_run
from exittrain.stages.reporting.page import make_page, render
from exittrain.stages.tracked import track_results


def run_report(context: StageContext) -> None:
    """Write report/index.html of the run.

    Raises:
        InputError: the run has no evaluation, or a damaged file.
    """
    page = report([context.run.path], context.run.stage("report") / "index.html")
    say(f"report: {page}")
    track_results(context)


def report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """One HTML file about run folders, without a single outside resource; the same runs give the same bytes.

    Raises:
        InputError: no run given, a run without evaluation, or a damaged file (named); nothing is written.
    """
    if not runs:
        raise InputError("no run to report on: name at least one run folder")
    if Path(out).is_dir():
        raise InputError(f"{out} is a folder: name the page's file, such as {Path(out) / 'report.html'}")
    data = [load_run(Path(run)) for run in runs]
    pages = [make_page(run, number) for number, run in enumerate(data)]
    title = data[0].name if len(data) == 1 else f"{len(data)} runs"
    subtitle = (
        "Draft trees for speculative decoding: what training on the exit law gained, measured. Block length counts "
    )
    write_text(out, render(title, subtitle + "the bonus token everywhere.", pages))
    return Path(out)
