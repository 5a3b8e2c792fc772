"""What `traversal-paper` prints: our points beside the published ones, and sentences on what they show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from exittrain.stages.evaluation.tables import AGREES, Table, interval, signed
from exittrain.stages.reporting.figures import INK, PALETTE, figure, svg
from exittrain.stages.studies.published import Pair, Shape, TraversalFigures

if TYPE_CHECKING:
    from exittrain.stages.studies.traversal_paper import Point, Side, Step

PAPER_DEPTH = 5
ABOVE = "interval above zero"
SHAPES: dict[Shape, str] = {"chain": "chain", "binary": "binary tree", "eagle": "EAGLE's sparse tree"}
PUBLISHED = "published (token level / traversal, gain)"


def depth_table(points: Sequence[Point], figures: TraversalFigures, note: str, draws: int) -> Table:
    """One temperature, every shape and depth."""
    temperature = points[0].temperature
    verdicts = f" Verdicts: mean of {draws} on the same trees, 'agrees' 95 times in 100." if draws else ""
    rows = [
        (
            SHAPES[p.shape], f"{p.depth}", _count(p.num_nodes), *_sides(p), signed(p.gain),
            *((_verdicts(p.token_level), _verdicts(p.traversal)) if draws else ()),
            _pair(_by_depth(figures, p) if temperature == 1 else None),
        )
        for p in points
    ]  # fmt: skip
    return Table(
        f"Traversal beside token-level verification by depth, temperature {temperature:g}",
        note + verdicts,
        (
            "trees", "depth", "nodes", "token level (rrs_wor)", "traversal", "gain of traversal",
            *(("token level, verdicts", "traversal, verdicts") if draws else ()), PUBLISHED,
        ),
        tuple(rows),
    )  # fmt: skip


def step_table(steps: Sequence[Step], figures: TraversalFigures, temperature: float) -> Table:
    """Whether the gain grows with depth."""

    def published(step: Step) -> str:
        found = figures.depths.get(step.shape, {})
        if temperature != 1 or step.shallow not in found or step.deep not in found:
            return ""
        return f"{found[step.deep].gain - found[step.shallow].gain:+.2f} points"

    return Table(
        f"Growth of the gain with depth, temperature {temperature:g}",
        "The gain at the deeper trees minus the gain at the shallower, in percentage points, on the same trees.",
        ("trees", "from depth", "to depth", "increase of the gain", "published"),
        tuple(
            (SHAPES[s.shape], f"{s.shallow}", f"{s.deep}", signed(s.increase, " points"), published(s)) for s in steps
        ),
    )


def temperature_table(points: Sequence[Point], figures: TraversalFigures, note: str) -> Table:
    """Every temperature at one depth of each shape."""
    return Table(
        f"Traversal beside token-level verification by temperature, depth {PAPER_DEPTH} where it was asked for",
        note,
        ("trees", "depth", "temperature", "token level (rrs_wor)", "traversal", "gain of traversal", PUBLISHED),
        tuple(
            (
                SHAPES[p.shape], f"{p.depth}", f"{p.temperature:g}", *_sides(p), signed(p.gain),
                _pair(figures.temperatures.get(p.temperature, {}).get(p.shape) if p.depth == PAPER_DEPTH else None),
            )
            for p in points
        ),
    )  # fmt: skip


def pair_table(points: Sequence[Point], figures: TraversalFigures) -> Table:
    """Temperature 1, beside every published pair of models."""
    return Table(
        f"Beside the published pairs of models, temperature 1, depth {PAPER_DEPTH}",
        "Token level / traversal, gain.",
        ("trees", "this run", *figures.depth_5),
        tuple(
            (
                SHAPES[p.shape], _pair(Pair(p.token_level.expected.value, p.traversal.expected.value)),
                *(_pair(pair.get(p.shape)) for pair in figures.depth_5.values()),
            )
            for p in points
            if p.depth == PAPER_DEPTH
        ),
    )  # fmt: skip


def paper_depth(depths: Collection[int]) -> int:
    """The depth of the paper's tables, the deepest where that was not asked for."""
    return PAPER_DEPTH if PAPER_DEPTH in depths else max(depths)


def at_paper_depth(points: Sequence[Point]) -> list[Point]:
    """Each shape's points of its `paper_depth`, shape by shape."""
    chosen = []
    for shape in SHAPES:
        own = [point for point in points if point.shape == shape]
        depth = paper_depth({point.depth for point in own})
        chosen += [point for point in own if point.depth == depth]
    return chosen


def summary_lines(points: Sequence[Point], steps: Sequence[Step], temperature: float) -> list[str]:
    """One sentence a shape on its gains, and one on their growth. steps: as `steps_of` gives them, the widest last."""
    lines = []
    for shape, name in SHAPES.items():
        own = [point for point in points if point.shape == shape]
        gains = ", ".join(f"{p.gain.value:+.2f} % at depth {p.depth}" for p in own)
        low = [f"depth {p.depth} ({p.gain.verdict})" for p in own if p.gain.verdict != ABOVE]
        tail = f"not above zero with its interval: {', '.join(low)}" if low else "every interval above zero"
        lines.append(f"{name}, temperature {temperature:g}: gain of traversal over token level {gains}; {tail}.")
    for shape in dict.fromkeys(step.shape for step in steps):
        *single, whole = (step for step in steps if step.shape == shape)
        flat = [f"{s.shallow} to {s.deep} ({s.increase.verdict})" for s in single if s.increase.verdict != ABOVE]
        tail = f"; not every step is above zero with its interval: {', '.join(flat)}" if flat else ""
        tail = "; so is every step's" if single and not flat else tail
        change = f"from depth {whole.shallow} to {whole.deep} the gain changes by {signed(whole.increase, ' points')}"
        lines.append(f"{SHAPES[shape]}, temperature {temperature:g}: {change}{tail}.")
    return lines


def gain_plot(points: Sequence[Point], figures: TraversalFigures, temperature: float) -> str:
    """Gain by depth with its intervals; the published gains of temperature 1 dashed beside."""
    with figure(6.6, 3.9) as (made, axes):
        axis = axes[0]
        axis.axhline(0, color=INK, linewidth=1)
        for index, (shape, name) in enumerate(SHAPES.items()):
            own, colour = [point for point in points if point.shape == shape], PALETTE[index]
            places = [p.depth + 0.08 * (index - 1) for p in own]  # beside each other, or intervals hide intervals
            axis.plot(places, [p.gain.value for p in own], "o-", color=colour, markersize=5, label=name)
            for place, point in zip(places, own, strict=True):
                if point.gain.low is not None and point.gain.high is not None:
                    axis.plot([place] * 2, [point.gain.low, point.gain.high], color=colour, linewidth=1.8)
            known = {} if temperature != 1 else figures.depths.get(shape, {})
            if known:
                gains = [pair.gain for pair in known.values()]
                label = f"{name}, published"
                axis.plot(list(known), gains, "s--", color=colour, markerfacecolor="none", linewidth=1, label=label)
        axis.set_title(f"Traversal over token-level verification, temperature {temperature:g}")
        axis.set_xlabel("depth of the tree")
        axis.set_ylabel("gain in block length, %")
        axis.set_xticks(sorted({point.depth for point in points}))
        made.legend(loc="outside lower center", ncols=3)
        return svg(made, "gain", "Gain of traversal over token-level verification by depth")


def _by_depth(figures: TraversalFigures, point: Point) -> Pair | None:
    """What Figure 3 has, else Tables 2 and 3 at their depth: the first pair of models at temperature 1."""
    found = figures.depths.get(point.shape, {}).get(point.depth)
    if found is None and point.depth == PAPER_DEPTH:
        found = figures.temperatures[1.0].get(point.shape)
    return found


def _pair(pair: Pair | None) -> str:
    return "" if pair is None else f"{pair.token_level:.2f} / {pair.traversal:.2f}, {pair.gain:+.1f} %"


def _sides(point: Point) -> tuple[str, str]:
    return interval(point.token_level.expected), interval(point.traversal.expected)


def _verdicts(side: Side) -> str:
    return "" if side.verdicts is None else f"{side.verdicts:.3f}" + AGREES[side.agrees]


def _count(nodes: float) -> str:
    return f"{nodes:.1f}".removesuffix(".0")
