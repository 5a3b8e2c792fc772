"""What `tev-paper` prints: drafters, verifiers and milliseconds beside the published ones, and sentences on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from exittrain.stages.benchmarks.verify import DDTREE
from exittrain.stages.evaluation.tables import AGREES, Table, interval, number, signed
from exittrain.stages.reporting.figures import PALETTE, figure, svg
from exittrain.stages.studies.published import TevFigures, gain_percent

if TYPE_CHECKING:
    from exittrain.stages.studies.tev_paper import DrafterGain, Point
    from exittrain.stages.studies.tev_timing import RuleTime

PUBLISHED_BUDGET = 64  # of Tables 2 and 4
SAME = 1e-9  # exact expectations closer than this are the same number


def crossed_table(points: Sequence[Point], figures: TevFigures, note: str) -> Table:
    """One temperature: budget x drafter x verifier."""
    temperature = points[0].temperature
    return Table(
        f"Drafter x verifier, temperature {temperature:g}: block length",
        f"{note} Verdicts: mean of draws on the same trees, 'agrees' 95 times in 100; all rows share their random "
        "numbers, so misses come together.",
        ("budget", "drafter", "verifier", "expected (exact)", "mean of verdicts", "published (Qwen3-4B)"),
        tuple(
            (
                f"{p.budget}", p.drafter, p.verifier, interval(p.expected), number(p.verdicts) + AGREES[p.agrees],
                number(published_length(figures, p.published, p.budget, p.temperature, p.verifier), 2),
            )
            for p in points
        ),
    )  # fmt: skip


def gain_table(gains: Sequence[DrafterGain], figures: TevFigures) -> Table:
    """Every later drafter over every earlier one."""

    def published(gain: DrafterGain) -> str:
        late, early = (published_length(figures, name, gain.budget, gain.temperature) for name in gain.published)
        return "" if late is None or early is None else f"{gain_percent(late, early):+.1f} %"

    return Table(
        "Gain in expected block length",
        "Paired over sequences on the same contexts; the gain over the control is what the node term is worth.",
        ("drafter", "over", "temperature", "budget", "gain", "published (Qwen3-4B)"),
        tuple(
            (g.drafter, g.control, f"{g.temperature:g}", f"{g.budget}", signed(g.percent), published(g)) for g in gains
        ),
    )


def time_table(times: Sequence[RuleTime], figures: TevFigures, note: str) -> Table:
    """Milliseconds a verdict, beside Table 3."""
    rows = []
    for time in times:
        theirs = figures.milliseconds.get(time.temperature, {}).get(time.budget, {})
        own = (
            theirs.get("predraw") if time.verifier == DDTREE else theirs.get("tev") if time.verifier == "tev" else None
        )
        ratio = f"{theirs['tev'] / theirs['predraw']:.3f}" if own is not None and time.verifier == "tev" else ""
        rows.append(
            (
                f"{time.temperature:g}", f"{time.budget}", time.verifier, number(time.milliseconds),
                interval(time.ratio), number(own), ratio,
            )
        )  # fmt: skip
    return Table(
        "Verifier milliseconds",
        f"Mean over trees of the median. {DDTREE}: softmax and a draw at every node, then the walk; predraw: the same "
        f"law, only the nodes on the walk. {note}",
        (
            "temperature", "budget", "verifier", "ms", f"over {DDTREE}", "published ms (H20)",
            "published TEV over predraw",
        ),
        tuple(rows),
    )  # fmt: skip


def published_length(
    figures: TevFigures, drafter: str | None, budget: int, temperature: float, verifier: str | None = None
) -> float | None:
    """The block length the paper prints for a drafter (a name among its figures), none where it prints none.

    verifier: where Table 4 has the pair, its figure; else the figure stands with the verifier that the paper used:
    predraw for the original drafter, tev for the others. None: whichever the paper used.
    """
    if drafter is None:
        return None
    pair = figures.crossed.get(drafter, {})
    if budget == PUBLISHED_BUDGET and temperature == 1 and verifier in pair:
        return pair[verifier]
    if verifier not in (None, "predraw" if drafter == "warm" else "tev"):
        return None
    found = figures.budgets.get(temperature, {}).get(budget, {}).get(drafter)
    if found is None and budget == PUBLISHED_BUDGET:
        found = figures.objectives.get(temperature, {}).get(drafter)
    return found


def summary_lines(
    gains: Sequence[DrafterGain], times: Sequence[RuleTime], verifiers: Sequence[str], spread: float
) -> list[str]:
    """Who gains over whom, whether the verifiers have one law, and what they cost."""
    lines = []
    for key in dict.fromkeys((g.temperature, g.drafter, g.control) for g in gains):
        own = [gain for gain in gains if (gain.temperature, gain.drafter, gain.control) == key]
        parts = ", ".join(f"{signed(gain.percent)} at {gain.budget} nodes" for gain in own)
        lines.append(f"temperature {key[0]:g}: {key[1]} over {key[2]} {parts}.")
    if len(verifiers) > 1:
        said = "one expected block length on every tree" if spread < SAME else "expectations that differ: a fault"
        lines.append(f"{' and '.join(verifiers)}: {said} (largest difference {spread:.1e}).")
    for time in times:
        if time.verifier == "tev":
            place, share = f"temperature {time.temperature:g}, {time.budget} nodes", interval(time.ratio)
            lines.append(f"{place}: tev takes {share} times as long as {DDTREE}.")
    return lines


def budget_plot(points: Sequence[Point]) -> str:
    """Expected block length by budget, a line a drafter, a panel a temperature; all verifiers lie on one line."""
    temperatures = list(dict.fromkeys(point.temperature for point in points))
    drafters = list(dict.fromkeys(point.drafter for point in points))
    first = points[0].verifier
    with figure(min(11.0, 2.6 + 3.0 * len(temperatures)), 3.6, len(temperatures), share=True) as (made, axes):
        for axis, temperature in zip(axes, temperatures, strict=True):
            for index, drafter in enumerate(drafters):
                colour = PALETTE[index % len(PALETTE)]
                own = [p for p in points if (p.temperature, p.drafter, p.verifier) == (temperature, drafter, first)]
                axis.plot([p.budget for p in own], [p.expected.value for p in own], "o-", color=colour, label=drafter)
                for p in own:
                    if p.expected.low is not None and p.expected.high is not None:
                        axis.plot([p.budget] * 2, [p.expected.low, p.expected.high], color=colour)
            axis.set_title(f"temperature {temperature:g}")
            axis.set_xlabel("tree budget, nodes")
            axis.set_xticks(sorted({point.budget for point in points}))
        axes[0].set_ylabel("expected block length")
        handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
        made.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
        return svg(made, "budget", "Expected block length by tree budget and drafter")
