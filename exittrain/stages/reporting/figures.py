"""Plots as inline SVG that follow the page's colours: text and axes take the reader's light or dark theme.

Same data, same bytes: ids come from a fixed salt, and no date is written.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exittrain.stages.evaluation.schema import ContextTable, DecodeTable, Gain, Metrics
from exittrain.stages.reporting.load import ExampleTree

INK, FAINT = "#010203", "#010204"  # stand-ins that become the page's own colours
PALETTE = ("#3987c9", "#e08a2e", "#2f9f6e", "#c0538f", "#8b6fd6", "#c9483c", "#3fa0a8", "#9a8a3c")
STYLE: Any = {
    "svg.hashsalt": "exittrain", "svg.fonttype": "none", "font.size": 10, "axes.titlesize": 10.5,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.5, "axes.axisbelow": True, "legend.frameon": False,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "lines.linewidth": 1.8,
    "axes.formatter.useoffset": False,
}  # fmt: skip


@contextmanager
def figure(width: float, height: float, columns: int = 1, share: bool = False) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of `columns` panels side by side, outside pyplot's global state."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made, list(made.subplots(1, columns, squeeze=False, sharey=share)[0])


def svg(made: Figure, name: str, description: str) -> str:
    """One `<svg>` element; ids are prefixed by `name`, so that several fit in one page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's font has it
        made.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = inline(text, name).replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt"', r'\1 style="max-width:\2pt" width="100%"', text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def inline(text: str, name: str) -> str:
    """An `<svg>` element as a page takes it: without namespaces, its ids and what refers to them prefixed by `name`."""
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    return re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{name}-\1"', text)


def description(text: str) -> str:
    """What the element says of itself to those who cannot see it."""
    found = re.search(r'aria-label="([^"]*)"', text)
    return found[1] if found else ""


def standalone(text: str) -> str:
    """The same element as a file that any viewer shows: with its namespaces, and a colour where no page gives one."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    text = text.replace("<svg", f"<svg {spaces}", 1).replace(' href="#', ' xlink:href="#')
    return text.replace("var(--faint)", "var(--faint, #c9ced5)")


def colours(metrics: Metrics) -> dict[str, str]:
    """One colour a drafter, the same in every plot."""
    return {info.name: PALETTE[i % len(PALETTE)] for i, info in enumerate(metrics.drafters)}


def forest(panels: Sequence[tuple[str, Sequence[Gain]]], name: str) -> str:
    """Gains with their intervals, a panel a temperature; filled: the interval leaves zero out."""
    labels = list(dict.fromkeys(f"{g.drafter}\nover {g.control}, {g.basis}" for _, gains in panels for g in gains))
    height = 1.0 + 0.5 * len(labels)
    with figure(min(11.0, 3.2 + 2.8 * len(panels)), height, len(panels), share=True) as (made, axes):
        bases = {g.basis: PALETTE[i] for i, g in enumerate({g.basis: g for _, gs in panels for g in gs}.values())}
        for axis, (title, gains) in zip(axes, panels, strict=True):
            axis.axvline(0, color=INK, linewidth=1)
            for gain in gains:
                row, part = labels.index(f"{gain.drafter}\nover {gain.control}, {gain.basis}"), gain.percent
                colour, clear = bases[gain.basis], gain.verdict in ("interval above zero", "interval below zero")
                if part.low is not None and part.high is not None:
                    axis.plot([part.low, part.high], [row, row], color=colour, linewidth=2.2, solid_capstyle="round")
                fill = colour if clear else "none"
                axis.plot(part.value, row, "o", color=colour, markerfacecolor=fill, markersize=6.5)
            axis.set_title(title)
            axis.set_xlabel("gain in block length, %")
            axis.grid(axis="y", visible=False)
        axes[0].set_yticks(range(len(labels)), labels)
        axes[0].set_ylim(len(labels) - 0.4, -0.6)
        return svg(made, name, "Gains over the controls with 95 percent intervals")


def curves(rows: dict[str, list[dict[str, Any]]], shades: dict[str, str], name: str) -> str | None:
    """Held-out 1 + coverage, token loss and the node term's gradient share by step; a panel where there is data."""
    wanted = [
        ("eval/score", "held-out 1 + coverage"),
        ("token_loss", "token loss, nats"),
        ("node_gradient_share", "gradient share of the node term"),
    ]
    panels = [
        (title, {arm: [(r["step"], r[key]) for r in log if r.get(key) is not None] for arm, log in rows.items()})
        for key, title in wanted
    ]
    panels = [(title, lines) for title, lines in panels if any(lines.values())]
    if not panels:
        return None
    with figure(min(11.0, 3.7 * len(panels)), 3.1, len(panels)) as (made, axes):
        for axis, (title, lines) in zip(axes, panels, strict=True):
            for arm, points in lines.items():
                if points:
                    marker = "o" if len(points) < 30 else ""
                    axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, color=shades[arm], label=arm)
            axis.set_title(title)
            axis.set_xlabel("step")
        handles = {text: line for axis in axes for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
        if len(rows) > 1:
            made.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)))
        return svg(made, name, "Training curves of all arms")


def by_depth(tables: Sequence[ContextTable | DecodeTable], shades: dict[str, str], name: str) -> str:
    """P(accepted >= d) of every drafter, and of the oracle where it was measured; a panel a table."""
    with figure(min(11.0, 3.7 * len(tables)), 3.2, len(tables), share=True) as (made, axes):
        for axis, table in zip(axes, tables, strict=True):
            deepest = 1
            for row in table.drafters:
                points = [(d.depth, d.marginal) for d in row.depths]
                deepest = max(deepest, len(points))
                if points:
                    colour = shades[row.drafter]
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=colour, label=row.drafter)
            oracle = [(d.depth, d.marginal) for d in getattr(table, "oracle_depths", [])][:deepest]
            if oracle:
                axis.plot(*zip(*oracle, strict=True), "--", color=INK, linewidth=1.2, label="oracle")
            axis.set_title(f"{table.task}, temperature {table.temperature:g}")
            axis.set_xlabel("depth d")
            axis.set_xticks(range(1, deepest + 1))
            axis.set_ylim(0, 1.02)
        axes[0].set_ylabel("P(accepted ≥ d)")
        handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
        made.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)))
        return svg(made, name, "Accepted tokens by depth beside the oracle")


def stage_bars(timing: dict[str, Any], name: str) -> str | None:
    """Where a round's milliseconds go, one bar a decoded cell of the first task and temperature."""
    entries = timing.get("stages", [])
    if not entries:
        return None
    first = (entries[0]["task"], entries[0]["temperature"])
    entries = [e for e in entries if (e["task"], e["temperature"]) == first]
    with figure(9.5, 1.3 + 0.38 * len(entries)) as (made, axes):
        axis, left = axes[0], [0.0] * len(entries)
        for i, stage in enumerate(("draft", "build", "score", "verify", "commit")):
            widths = [entry["milliseconds"].get(stage, 0.0) for entry in entries]
            axis.barh(range(len(entries)), widths, left=left, color=PALETTE[i], label=stage, height=0.62)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_yticks(range(len(entries)), [f"{e['drafter']}, {e['verifier']}" for e in entries])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"milliseconds a round ({first[0]}, temperature {first[1]:g})")
        made.legend(loc="outside lower center", ncols=5)
        return svg(made, name, "Milliseconds of each stage of a round")


def draw_tree(tree: ExampleTree, name: str) -> str:
    """One draft tree: discs by reach (area), numbers beside them, and the mass that leaves at each node in colour."""
    depth, rows = _layout(tree.parents)
    with figure(1.0 + 1.45 * (max(depth) + 1), 0.6 + 0.42 * (max(rows) + 1)) as (made, axes):
        axis = axes[0]
        for node in range(1, len(depth)):
            parent, bend = tree.parents[node], depth[node] - 0.3
            axis.plot(
                [depth[parent], bend, bend, depth[node]], [rows[parent], rows[parent], rows[node], rows[node]],
                color=FAINT, linewidth=0.8 + 3 * tree.reach[node], solid_joinstyle="round", zorder=1,
            )  # fmt: skip
        axis.scatter(depth, rows, s=[14 + 150 * r for r in tree.reach], color=PALETTE[0], zorder=2, linewidths=0)
        lost = [(d, r, 14 + 150 * w) for d, r, w in zip(depth, rows, tree.exit, strict=True) if w > 0.01]
        if lost:
            x, y, size = zip(*lost, strict=True)
            axis.scatter(x, y, s=size, color=PALETTE[5], zorder=3, linewidths=0)
        for node, text in enumerate(tree.labels):
            note = f"{tree.reach[node]:.2f}" + (f" → {tree.exit[node]:.2f}" if tree.exit[node] > 0.01 else "")
            axis.text(
                depth[node] + 0.09, rows[node] - 0.06, text[:14], fontweight="bold", va="bottom", parse_math=False
            )
            axis.text(depth[node] + 0.09, rows[node] + 0.12, note, fontsize=7.5, va="top", parse_math=False)
        axis.set_xlim(-0.2, max(depth) + 0.95)
        axis.set_ylim(max(rows) + 0.7, -0.7)
        axis.axis("off")
        return svg(made, name, f"A draft tree with coverage {tree.coverage:.2f}")


def _layout(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, row) of each node: leaves in order, a parent in the middle of its children."""
    children: dict[int, list[int]] = {node: [] for node in range(len(parents))}
    depth = [0] * len(parents)
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
        depth[node] = depth[parents[node]] + 1
    rows, next_row = [0.0] * len(parents), 0.0
    stack: list[tuple[int, bool]] = [(0, False)]
    while stack:
        node, placed = stack.pop()
        if placed:
            rows[node] = sum(rows[c] for c in children[node]) / len(children[node])
        elif not children[node]:
            rows[node], next_row = next_row, next_row + 1
        else:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node])]
    return depth, rows
