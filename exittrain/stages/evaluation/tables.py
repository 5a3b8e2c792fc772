"""metrics.json (and timing.json) as tables: one content, printed by rich, written as Markdown, set in the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable

from exittrain.drafters.calibration import describe
from exittrain.stages.evaluation.schema import (
    ContextTable,
    DecodeRow,
    DecodeTable,
    Gain,
    Interval,
    Metrics,
    VerifierTable,
)  # fmt: skip

WORDS = (
    "Block length counts the bonus token; accepted tokens = block length - 1. Intervals are 95 % paired bootstrap "
    "intervals over prompts (over sequences for fixed contexts); below 8 of them there is none. Gains are relative to "
    "the named control, on the same prompts or contexts; 'above zero' means that the whole interval is. '(fixture)' "
    "means the few prompts that come with exittrain, not the public benchmark of that name."
)
SHORT = {"interval above zero": "above zero", "interval below zero": "below zero", "interval holds zero": "holds zero"}
AGREES = {True: " agrees", False: " differs", None: ""}  # what is measured lies in the interval of its expectation


@dataclass(frozen=True)
class Table:
    """A title, a line that says what was counted, column names, and rows of finished cells."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", self.note, "", _line(self.columns)]
        lines.append(_line(["---"] + ["---:"] * (len(self.columns) - 1)))
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, caption=self.note, title_justify="left", caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def interval(part: Interval | None, digits: int = 3) -> str:
    """`1.741 [1.722, 1.760]`."""
    if part is None:
        return ""
    bounds = "" if part.low is None or part.high is None else f" [{part.low:.{digits}f}, {part.high:.{digits}f}]"
    return f"{part.value:.{digits}f}{bounds}"


def percent(gain: Gain | None) -> str:
    """`+0.62 % [+0.42, +0.83] above zero`."""
    return "" if gain is None else signed(gain.percent)


def signed(part: Interval, unit: str = " %") -> str:
    """`+0.62 % [+0.42, +0.83] above zero`."""
    bounds = "" if part.low is None or part.high is None else f" [{part.low:+.2f}, {part.high:+.2f}]"
    return f"{part.value:+.2f}{unit}{bounds} {SHORT.get(part.verdict, part.verdict)}"


def gain_columns(gains: Sequence[Gain]) -> list[tuple[str, str]]:
    """The (control, basis) pairs that occur, in order: one column each."""
    return list(dict.fromkeys((gain.control, gain.basis) for gain in gains))


def gain_cells(gains: Sequence[Gain], drafter: str) -> list[str]:
    found: dict[tuple[str, str], Gain] = {(g.control, g.basis): g for g in gains if g.drafter == drafter}
    return [percent(found.get(column)) for column in gain_columns(gains)]


def _gain_names(gains: Sequence[Gain]) -> list[str]:
    return [f"gain over {control} ({basis})" for control, basis in gain_columns(gains)]


def label(metrics: Metrics, drafter: str) -> str:
    """`reach_kl (arm, 400 steps)`."""
    info = metrics.info(drafter)
    words: list[str] = [] if info.role in (drafter, "drafter") else [info.role]
    words += [f"{info.steps:,} steps"] if info.steps is not None else []
    return f"{drafter} ({', '.join(words)})" if words else drafter


def task_name(metrics: Metrics, task: str) -> str:
    """`gsm8k (fixture)`: a task's name, with where its prompts come from unless that is the file of this name."""
    source = metrics.tasks.get(task, task)
    return source if source.startswith(f"{task} (") else task


def context_table(metrics: Metrics, table: ContextTable) -> Table:
    """Trees chosen by score have a ceiling, 1 + coverage; of sampled ones it is said whose expectation this is."""
    rule, gains = table.verifier, table.gains
    last = ["tree efficiency"] if rule is None else []  # the ceiling of fixed trees is none of sampled ones
    rows = [
        (
            label(metrics, row.drafter), interval(row.expected_block_length), *gain_cells(gains, row.drafter),
            *(number(row.tree_efficiency) for _ in last),
        )
        for row in table.drafters
    ]  # fmt: skip
    if table.oracle_block_length is not None:
        blank = ("",) * len(gain_columns(gains))
        name = f"oracle (best {'' if rule is None else 'fixed '}trees of this budget)"
        rows.append((name, interval(table.oracle_block_length), *blank, *(number(1.0) for _ in last)))
    where = f"mean over {table.num_contexts:,} contexts of {table.num_sequences:,} sequences."
    drawn = f"Verifier {rule}, one tree of {metrics.settings.builder} drawn a context, exact given the trees: {where}"
    return Table(
        f"{task_name(metrics, table.task)}, temperature {table.temperature:g}: expected block length at fixed contexts",
        drawn if rule else f"1 + coverage, exact: {where}",
        ("drafter", f"expected ({rule})" if rule else "1 + coverage", *_gain_names(gains), *last),
        tuple(rows),
    )


def decode_table(metrics: Metrics, table: DecodeTable) -> Table:
    rows = [
        (
            label(metrics, row.drafter),
            interval(row.block_length_prompt_mean),
            *gain_cells(table.gains_prompt_mean, row.drafter),
            interval(row.block_length_pooled),
            interval(row.expected_block_length_pooled) + AGREES[row.agrees],
            number(row.accepted_pooled),
            _counts(row),
        )
        + (() if row.served is None else (describe(**row.served.model_dump(exclude={"width"})),))
        for row in table.drafters
    ]
    chosen = ["chosen by its calibration"] if any(row.served for row in table.drafters) else []
    here = {row.drafter for row in table.drafters}
    missing = ", ".join(info.name for info in metrics.drafters if info.name not in here)
    without = f" Without a calibration, so not here: {missing}." if missing else ""
    return Table(
        f"{task_name(metrics, table.task)}, temperature {table.temperature:g}, verifier {table.verifier}: "
        "block length by decoding",
        f"On the {table.common_prompts} prompts that every drafter finished. 'Expected' is the verifier's own, exact "
        "given the trees, at the very rounds that were decoded; the pooled block length lies in its interval (agrees) "
        f"95 times in 100.{without}",
        (
            "drafter", "block length (mean per prompt)", *_gain_names(table.gains_prompt_mean),
            "block length (pooled over rounds)", "expected (same rounds)", "accepted tokens (pooled)",
            "finished / attempted", *chosen,
        ),
        tuple(rows),
    )  # fmt: skip


def _counts(row: DecodeRow) -> str:
    skipped = "".join(f"; {count} skipped: {reason}" for reason, count in sorted(row.skipped.items()))
    return f"{row.finished} / {row.attempted}{skipped}"


def depth_table(metrics: Metrics, table: ContextTable | DecodeTable) -> Table:
    """Accepted tokens by depth: both rates, both named."""
    depths = sorted({depth.depth for row in table.drafters for depth in row.depths})
    rows = []
    for row in table.drafters:
        found = {depth.depth: depth for depth in row.depths}
        for kind in ("marginal", "conditional"):
            values = [number(getattr(found[d], kind)) if d in found else "" for d in depths]
            rows.append((row.drafter, kind, *values))
    source = (
        "exact at fixed contexts"
        if isinstance(table, ContextTable)
        else f"measured by decoding with {table.verifier}, pooled over rounds"
    )
    return Table(
        f"{task_name(metrics, table.task)}, temperature {table.temperature:g}: accepted tokens by depth ({source})",
        "marginal: P(accepted >= d). conditional: P(accepted >= d | accepted >= d - 1).",
        ("drafter", "rate", *(f"d = {d}" for d in depths)),
        tuple(rows),
    )


def verifier_table(metrics: Metrics, table: VerifierTable, seconds: dict[str, float] | None = None) -> Table:
    """Verifiers on the same trees. seconds: a verdict's wall clock, where it was measured."""
    rows = [
        (row.verifier, number(row.expected, 4), interval(row.measured, 4))
        + ((f"{1e6 * seconds[row.verifier]:,.0f}",) if seconds else ())
        for row in table.rows
    ]
    longest = "equal for all" if table.longest == "equal" else f"longest for {table.longest}"
    cheapest = f"; cheapest: {min(seconds, key=lambda rule: seconds[rule])}" if seconds and len(seconds) > 1 else ""
    return Table(
        f"{task_name(metrics, table.task)}, temperature {table.temperature:g}: "
        f"verifiers on the same trees of {table.drafter}",
        f"{table.num_trees:,} trees, {table.draws} verdicts each. Expected block length: {longest}{cheapest}.",
        ("verifier", "expected block length (exact)", "block length (mean of verdicts)")
        + (("microseconds a verdict",) if seconds else ()),
        tuple(rows),
    )


def speed_table(timing: dict[str, Any]) -> Table | None:
    """Tokens a second against plain decoding of the same target; new token ids counted on both sides."""
    rows = [
        (
            row["drafter"], f"{row['temperature']:g}", row["verifier"], number(row["tokens_per_second"], 1),
            number(row["plain_tokens_per_second"], 1), f"{row['speed_up']:.2f}x", f"{row['prompts']}",
        )
        for row in timing.get("speed", [])
    ]  # fmt: skip
    if not rows:
        return None
    return Table(
        "Speed (wall clock)",
        "New token ids a second, plain decoding of the same target by the same loop, in the same process, prompt by "
        f"prompt in turn. {timing.get('hardware', '')}",
        ("drafter", "temperature", "verifier", "tokens/s", "plain tokens/s", "speed-up", "prompts"),
        tuple(rows),
    )


def stage_table(timing: dict[str, Any]) -> Table | None:
    """Where a round's time goes."""
    entries = timing.get("stages", [])
    if not entries:
        return None
    names = [name for name in ("draft", "build", "score", "verify", "commit") if name in entries[0]["milliseconds"]]
    rows = [
        (
            entry["drafter"], entry["task"], f"{entry['temperature']:g}", entry["verifier"],
            *(number(entry["milliseconds"][name], 2) for name in names),
        )
        for entry in entries
    ]  # fmt: skip
    return Table(
        "Stage times (wall clock)",
        "Milliseconds a round, mean over the rounds of all finished prompts.",
        ("drafter", "task", "temperature", "verifier", *names),
        tuple(rows),
    )


def main_tables(metrics: Metrics, timing: dict[str, Any]) -> list[Table]:
    """What is printed, in reading order."""
    costs = {(c["task"], c["temperature"], c["drafter"]): c["seconds"] for c in timing.get("verifiers", [])}
    clock = [table for table in (speed_table(timing), stage_table(timing)) if table is not None]
    return [
        *(context_table(metrics, table) for table in metrics.contexts),
        *(decode_table(metrics, table) for table in metrics.decode),
        *(verifier_table(metrics, t, costs.get((t.task, t.temperature, t.drafter))) for t in metrics.verifiers),
        *clock,
    ]


def all_tables(metrics: Metrics, timing: dict[str, Any]) -> list[Table]:
    """The printed tables and accepted tokens by depth."""
    measured: list[ContextTable | DecodeTable] = [*metrics.contexts, *metrics.decode]
    return main_tables(metrics, timing) + [depth_table(metrics, table) for table in measured]


def markdown(metrics: Metrics, timing: dict[str, Any]) -> str:
    """table.md."""
    parts = [f"## {metrics.name}", "", WORDS, ""]
    return "\n".join(parts) + "\n" + "\n".join(table.markdown() for table in all_tables(metrics, timing))
