"""A run's data as the parts of a page: headline, tables, plots, trees, provenance. The template only sets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from typing import TypeVar

import jinja2

from exittrain.stages.evaluation import tables
from exittrain.stages.evaluation.schema import ContextRow, ContextTable, DecodeRow, DecodeTable, Gain, Metrics
from exittrain.stages.evaluation.tables import Table
from exittrain.stages.reporting import figures
from exittrain.stages.reporting.load import RunData, StudyData

Item = TypeVar("Item")
TONES = {"interval above zero": "good", "interval below zero": "bad"}


@dataclass(frozen=True)
class Line:
    """One sentence of the headline."""

    lead: str
    text: str
    tone: str = ""


@dataclass(frozen=True)
class Part:
    """One section; what is empty is not shown. plots: (svg, caption)."""

    id: str
    title: str
    intro: str
    plots: Sequence[tuple[str | None, str]] = ()
    points: Sequence[str] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    folded_title: str = ""
    facts: Sequence[tuple[str, str]] = ()
    files: Sequence[tuple[str, str]] = ()

    @property
    def is_empty(self) -> bool:
        shown = any(plot for plot, _ in self.plots)
        return not (shown or self.points or self.tables or self.folded or self.facts or self.files)


@dataclass(frozen=True)
class RunPage:
    id: str
    name: str
    headline: list[Line] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def render(title: str, subtitle: str, runs: Sequence[RunPage]) -> str:
    """The whole page; everything that came from data is escaped, only our own SVG is set as it is."""
    source = files("exittrain.stages.reporting").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tone"] = tone
    return environment.from_string(source).render(title=title, subtitle=subtitle, runs=runs) + "\n"


def tone(cell: str) -> str:
    """The class of a table cell: intervals that leave zero out, and checks that fail, are seen at once."""
    if cell.endswith((" above zero", " agrees")):
        return "good"
    return "bad" if cell.endswith((" below zero", " differs")) else ""


def make_page(data: RunData, number: int) -> RunPage:
    """All parts of a run that have something to show."""
    run = f"run{number}"
    parts = [_gains(data, run), _decoding(data, run), _depths(data, run), _training(data, run), _time(data, run)]
    parts += [_trees(data, run), *(_study(one, run) for one in data.studies), _provenance(data)]
    return RunPage(run, data.name, headline(data.metrics), [part for part in parts if not part.is_empty])


def headline(metrics: Metrics) -> list[Line]:
    """The best arm over each control, at each temperature, said whatever it is."""
    lines = []
    for table in metrics.contexts or metrics.decode:
        exact = isinstance(table, ContextTable)
        gains = table.gains if isinstance(table, ContextTable) else table.gains_pooled
        arms = [gain for gain in gains if metrics.info(gain.drafter).objective != "token"]
        for group in _by_control(arms):
            best = max(group, key=lambda gain: gain.percent.value)
            among = f"(best of {len(group)} arms) " if len(group) > 1 else ""
            lines.append(_headline_line(metrics, table, exact, best, among))
    if not lines:
        for table in metrics.contexts or metrics.decode:
            rows: Sequence[ContextRow | DecodeRow] = table.drafters
            row = max(rows, key=_length)
            where = f"{tables.task_name(metrics, table.task)}, temperature {table.temperature:g}"
            lines.append(
                Line(f"{row.drafter}: block length {_length(row):.3f}", f"on {where}. No control to compare with.")
            )
    return lines


def _by_control(gains: Sequence[Gain]) -> list[list[Gain]]:
    def key(gain: Gain) -> tuple[str, str]:
        return gain.control, gain.basis

    return [list(group) for _, group in groupby(sorted(gains, key=key), key=key)]


def _headline_line(metrics: Metrics, table: ContextTable | DecodeTable, exact: bool, best: Gain, among: str) -> Line:
    part = best.percent
    bounds = "" if part.low is None or part.high is None else f" [{part.low:+.2f}, {part.high:+.2f}]"
    units = f"{table.num_contexts:,} contexts" if isinstance(table, ContextTable) else f"{table.common_prompts} prompts"
    measure = (
        "expected block length (exact)" if exact else f"block length decoded with {getattr(table, 'verifier', '')}"
    )
    text = (
        f"{among}over {best.control} ({best.basis}) in {measure} at temperature {table.temperature:g}, {units} of "
        f"{tables.task_name(metrics, table.task)}: {best.verdict}."
    )
    return Line(f"{best.drafter} {part.value:+.2f} %{bounds}", text, TONES.get(best.verdict, ""))


def _length(row: ContextRow | DecodeRow) -> float:
    part = row.expected_block_length if isinstance(row, ContextRow) else row.block_length_pooled
    return float(part.value)


def _gains(data: RunData, run: str) -> Part:
    metrics = data.metrics
    exact = [
        (f"{tables.task_name(metrics, t.task)}, T = {t.temperature:g}", t.gains) for t in metrics.contexts if t.gains
    ]
    decoded = [
        (f"{tables.task_name(metrics, t.task)}, T = {t.temperature:g}, {t.verifier}", t.gains_prompt_mean)
        for t in metrics.decode
        if t.gains_prompt_mean
    ]
    length = "1 + coverage" if all(table.verifier is None for table in metrics.contexts) else "expected block length"
    plots = [
        (figures.forest(panels, f"{run}-{kind}{i}"), f"Gain in {what}. {FOREST}")
        for kind, what, all_panels in (
            ("exact", f"{length} at the same contexts", exact),
            ("decoded", "decoded block length, mean per prompt", decoded),
        )
        for i, panels in enumerate(_threes(all_panels))
    ]
    return Part(
        "gains", "Does the objective pay?",
        "Every arm starts from the same warm start. The controls train on tokens alone: one for as many steps, one for "
        "as much time. A gain counts where its whole interval lies above zero.",
        plots, tables=[tables.context_table(metrics, table) for table in metrics.contexts],
    )  # fmt: skip


def _threes(items: Sequence[Item]) -> list[Sequence[Item]]:
    """As many panels as fit side by side."""
    return [items[start : start + 3] for start in range(0, len(items), 3)]


FOREST = "Lines are 95 % paired bootstrap intervals; a filled dot: the interval leaves zero out."


def _decoding(data: RunData, run: str) -> Part:
    metrics = data.metrics
    costs = {(c["task"], c["temperature"], c["drafter"]): c["seconds"] for c in data.timing.get("verifiers", [])}
    return Part(
        "decoding", "Decoded for real",
        "Block lengths measured by decoding, beside what the trees of the very same rounds promised. " + tables.WORDS,
        tables=[
            *(tables.decode_table(metrics, table) for table in metrics.decode),
            *(
                tables.verifier_table(metrics, t, costs.get((t.task, t.temperature, t.drafter)))
                for t in metrics.verifiers
            ),
        ] if metrics.decode or metrics.verifiers else [],
    )  # fmt: skip


def _depths(data: RunData, run: str) -> Part:
    metrics, shades = data.metrics, figures.colours(data.metrics)
    exact: list[ContextTable | DecodeTable] = [*metrics.contexts]
    measured = [table for table in metrics.decode if table.verifier == metrics.decode[0].verifier]
    drawn = [figures.by_depth(part, shades, f"{run}-depth{i}") for i, part in enumerate(_threes(exact or measured))]
    total = "coverage" if all(table.verifier is None for table in metrics.contexts) else "expected accepted tokens"
    return Part(
        "depths", "Where trees lose mass",
        "The chance that at least d drafted tokens are accepted. The oracle is the best tree of this budget: the "
        "target drafting for itself. The gap to it is what a better drafter could still win.",
        [(drawing, f"P(accepted >= d); its sum over d is the {total}.") for drawing in drawn],
        folded=[tables.depth_table(metrics, table) for table in [*exact, *metrics.decode]],
        folded_title="Both rates, marginal and conditional, as numbers",
    )  # fmt: skip


def _training(data: RunData, run: str) -> Part:
    shades = figures.colours(data.metrics) | {"warm-up": figures.PALETTE[0]}
    arms = {name: rows for name, rows in data.curves.items() if name != "warm-up"}
    warm = {name: rows for name, rows in data.curves.items() if name == "warm-up"}
    seconds = data.timing.get("training_seconds", {})
    spent = [
        (
            tables.label(data.metrics, info.name), info.objective or "", f"{info.steps:,}", f"{info.sequences or 0:,}",
            f"{seconds[info.name]:,.0f}" if info.name in seconds else "",
        )
        for info in data.metrics.drafters
        if info.steps is not None
    ]  # fmt: skip
    columns = ("arm", "objective", "steps", "sequences", "seconds of steps")
    compute = Table(
        "What each arm spent", "Steps times batch size, and the wall clock of the steps.", columns, tuple(spent)
    )
    return Part(
        "training", "How it trained", "All arms see the same sequences in the same order.",
        [
            (figures.curves(arms, shades, f"{run}-arms"), "Arms, by optimiser step."),
            (figures.curves(warm, shades, f"{run}-warm"), "The warm-up before them."),
        ],
        tables=[compute] if spent else [],
    )  # fmt: skip


def _time(data: RunData, run: str) -> Part:
    found = (tables.speed_table(data.timing), tables.stage_table(data.timing))
    return Part(
        "time", "Where time goes", "Wall clock, on the machine named below; all else on this page is free of it.",
        [(figures.stage_bars(data.timing, f"{run}-stages"), "Mean milliseconds a round, by stage.")],
        tables=[table for table in found[:1] if table is not None],
        folded=[table for table in found[1:] if table is not None], folded_title="All stage times",
    )  # fmt: skip


def _trees(data: RunData, run: str) -> Part:
    drawn = [
        (
            figures.draw_tree(tree, f"{run}-tree{i}"),
            f"Sequence {tree.sequence_id}, position {tree.anchor}: coverage {tree.coverage:.2f}.",
        )
        for i, tree in enumerate(data.trees)
    ]
    return Part(
        "trees", "Trees it drew",
        "Three collected trees, of high, middle and low coverage. Blue discs and the first number: reach, the chance "
        "that the target passes through. Red discs and the number after the arrow: the chance that it leaves there.",
        drawn,
    )  # fmt: skip


def _study(study: StudyData, run: str) -> Part:
    prefix = f"{run}-{study.name}"
    return Part(
        f"study-{study.name}", f"Study: {study.name}", study.description,
        [(figures.inline(svg, prefix), figures.description(svg)) for svg in study.plots.values()],
        points=study.advice, tables=study.tables,
    )  # fmt: skip


def _provenance(data: RunData) -> Part:
    origin, settings = data.provenance, data.metrics.settings
    git, hardware = origin.get("git") or {}, origin.get("hardware") or {}
    facts = [
        ("commit", f"{git.get('commit', 'not a checkout')}{' with local changes' if git.get('diff') else ''}"),
        ("command", " ".join(origin.get("argv", []))),
        ("versions", ", ".join(f"{name} {number}" for name, number in origin.get("versions", {}).items())),
        (
            "machine",
            f"{hardware['cpu']}, {hardware['cpus']} cores" if "cpu" in hardware else data.timing["hardware"],
        ),
        ("target", data.metrics.target_fingerprint),
        *((f"drafter {info.name}", info.fingerprint) for info in data.metrics.drafters),
        ("trees", f"{settings.builder}, budget {settings.budget}, depth {settings.depth}, width {settings.width}"),
        ("tasks", ", ".join(f"{task}: {source}" for task, source in data.metrics.tasks.items())),
        ("bootstrap", f"{settings.bootstrap:,} resamples, seed {settings.seed}"),
    ]
    return Part(
        "provenance", "Provenance", "What made these numbers.",
        facts=[(name, value) for name, value in facts if value],
        files=[("recipe.yaml, as resolved", data.recipe)] if data.recipe else [],
    )  # fmt: skip
