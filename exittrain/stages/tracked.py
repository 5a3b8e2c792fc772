"""What an evaluation found, shown where the training curves are: tables, trees and the page, in wandb, TensorBoard."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from exittrain.runtime.tracker import EVENTS, write_page
from exittrain.stages.context import StageContext
from exittrain.stages.evaluation import tables
from exittrain.stages.evaluation.schema import Metrics
from exittrain.stages.evaluation.tables import Table
from exittrain.stages.reporting.figures import draw_tree
from exittrain.stages.reporting.load import ExampleTree, load_run

MAX_PAGE_BYTES = 10 << 20  # a larger page stays in the run folder
STYLE = "<style>:root{--faint:#c9ced5} body{font-family:sans-serif}</style>"


@dataclass(frozen=True)
class Found:
    """By the name it is shown under. values: block lengths, coverages, efficiencies; pages: whole HTML documents."""

    values: dict[str, float]
    tables: dict[str, Table]
    pages: dict[str, str]


def track_results(context: StageContext) -> None:
    """Send what eval/ and report/ of the run hold to where the recipe wants it. The main rank alone calls it.

    Raises:
        InputError: the run has no evaluation, or a damaged file.
    """
    wandb, wants_events = context.wandb(), context.recipe.tracking.tensorboard
    if wandb is None and not wants_events:
        return
    found = find_results(context.run.path)
    if wandb is not None:
        wandb.send(lambda run: send_results(run, found))
    if wants_events:
        texts = {name: table.markdown() for name, table in found.tables.items()}
        write_page(context.run.stage("report") / EVENTS, found.values, texts)


def find_results(folder: Path) -> Found:
    """All that a run folder has of its evaluation.

    Raises:
        InputError: it has no evaluation, or a damaged file.
    """
    data = load_run(folder)
    pages = {"report/trees": _trees_page(data.trees)} if data.trees else {}
    report = folder / "report" / "index.html"
    if report.is_file() and report.stat().st_size <= MAX_PAGE_BYTES:
        pages["report/page"] = report.read_text(encoding="utf-8")
    return Found(_values(data.metrics), _tables(data.metrics, data.timing), pages)


def send_results(run: Any, found: Found) -> None:
    """In wandb's thread: tables and pages as media, values as the run's summary. run: wandb's own object."""
    import wandb

    media: dict[str, Any] = {
        name: wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        for name, table in found.tables.items()
    }
    run.log(media | {name: wandb.Html(page) for name, page in found.pages.items()})
    run.summary.update(found.values)


def _tables(metrics: Metrics, timing: dict[str, Any]) -> dict[str, Table]:
    found = {_name("contexts", t.task, t.temperature): tables.context_table(metrics, t) for t in metrics.contexts}
    found |= {
        _name("decoding", t.task, t.temperature, t.verifier): tables.decode_table(metrics, t) for t in metrics.decode
    }
    found |= {
        _name("verifiers", t.task, t.temperature, t.drafter): tables.verifier_table(metrics, t)
        for t in metrics.verifiers
    }
    clock = {"eval/speed": tables.speed_table(timing), "eval/stages": tables.stage_table(timing)}
    return found | {name: table for name, table in clock.items() if table is not None}


def _values(metrics: Metrics) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for table in metrics.contexts:
        for row in table.drafters:
            name = _name(table.task, table.temperature, row.drafter)
            found[f"{name}/expected_block_length"] = row.expected_block_length.value
            found[f"{name}/coverage"] = row.coverage
            found[f"{name}/tree_efficiency"] = row.tree_efficiency
    for decoded in metrics.decode:
        for one in decoded.drafters:
            name = _name(decoded.task, decoded.temperature, one.drafter, decoded.verifier)
            found[f"{name}/block_length_pooled"] = one.block_length_pooled.value
            found[f"{name}/block_length_prompt_mean"] = one.block_length_prompt_mean.value
    return {name: value for name, value in found.items() if value is not None}


def _name(*parts: str | float) -> str:
    """`eval/heldout/T1/reach_kl`: names without what wandb's files could not be called."""
    words = [f"T{part:g}" if isinstance(part, float) else re.sub(r"[^\w.-]+", "_", part) for part in parts]
    return "/".join(["eval", *words])


def _trees_page(trees: tuple[ExampleTree, ...]) -> str:
    drawn = "".join(
        f"<h3>Sequence {escape(tree.sequence_id)}, position {tree.anchor}: coverage {tree.coverage:.2f}</h3>"
        + draw_tree(tree, f"tree{i}")
        for i, tree in enumerate(trees)
    )
    words = "Blue, first number: the chance that the target passes through. Red, after the arrow: that it leaves there."
    return f"<!doctype html><meta charset='utf-8'>{STYLE}<p>{words}</p>{drawn}"
