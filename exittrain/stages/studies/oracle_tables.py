"""What the study `oracle` prints and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exittrain.law.gap import PLACES
from exittrain.law.sampling import Sampling
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation.intervals import Bootstrap, Estimate
from exittrain.stages.evaluation.measures import Floats
from exittrain.stages.evaluation.schema import Interval
from exittrain.stages.evaluation.tables import Table, interval, number
from exittrain.stages.reporting.figures import FAINT, INK, PALETTE, figure, svg

NAMES = {
    "root": "root (first token)",
    "branch": "interior, with children",
    "leaf": "interior, leaf above the limit",
    "horizon": "horizon (depth limit)",
}
MEANING = {
    "root": "at the root: the first token is what is missed. Train the drafter",
    "branch": "inside the tree, mostly where nodes have children and the right one is not among them. Train the "
    "drafter, or look at more children a node (suite.width)",
    "leaf": "inside the tree, mostly at leaves above the depth limit: nodes are spent on other branches. Train the "
    "drafter, whose ranking of branches is off",
    "horizon": "at the depth limit: the tree is right as far as it goes. Draw deeper trees (suite.depth)",
}
NOTHING = 1e-6  # a missed mass that is rounding


@dataclass(frozen=True)
class Line:
    """One drafter at one temperature and budget; means over contexts. missed, exits: by place, see `law.gap`.

    capped_block_length: of the best tree of no more levels than the drafter's. gap = C* - C = gap_of_depth, what the
    limit costs, + gap_of_drafter, what a better drafter could win under it. rounding: what is left of gap = sum of
    missed - spare, since the target scores a prefix once for each tree.
    """

    drafter: str
    temperature: float
    budget: int
    oracle_block_length: Estimate
    capped_block_length: Estimate
    block_length: Estimate
    tree_efficiency: Estimate
    gap: Estimate
    gap_of_depth: Estimate
    gap_of_drafter: Estimate
    missed: dict[str, Estimate]
    spare: Estimate
    exits: dict[str, float]
    rounding: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def shares(self) -> dict[str, float]:
        """Each place's part of what is missed; empty when nothing is."""
        total = sum(part.value for part in self.missed.values())
        return {place: part.value / total for place, part in self.missed.items()} if total > NOTHING else {}


def lines_of(
    drafter: str, temperature: float, gaps: Mapping[int, Mapping[str, Floats]], capped: Mapping[int, Floats],
    clusters: Sequence[str], bootstrap: Bootstrap,
) -> list[Line]:  # fmt: skip
    """One line a budget. gaps: budget -> the parts of `CoverageGap` over contexts; capped: budget -> coverage of the
    best tree of the drafter's depth; clusters: each context's sequence, the bootstrap's unit."""
    lines = []
    for budget, parts in sorted(gaps.items()):
        best, within, own = parts["oracle_coverage"], capped[budget], parts["coverage"]

        def mean(values: Floats) -> Estimate:
            return bootstrap(iv.ratio, *iv.cluster_sums(values, clusters))

        efficiency = bootstrap(iv.ratio, iv.cluster_sums(own, clusters)[0], iv.cluster_sums(best, clusters)[0])
        missed = {place: mean(parts["missed"][:, i]) for i, place in enumerate(PLACES)}
        gap, spare = mean(best - own), mean(parts["spare"])
        rest = gap.value - sum(part.value for part in missed.values()) + spare.value
        exits = {place: float(parts["exits"][:, i].mean()) for i, place in enumerate(PLACES)}
        lines.append(
            Line(
                drafter, temperature, budget, mean(1 + best), mean(1 + within), mean(1 + own), efficiency, gap,
                mean(best - within), mean(within - own), missed, spare, exits, rest,
            )
        )  # fmt: skip
    return lines


def report_tables(lines: Sequence[Line], num_contexts: int, depth: int) -> list[Table]:
    """Block lengths a table a temperature, then the gap and the exits of all."""
    return [
        *(_length_table([line for line in lines if line.temperature == t], num_contexts, depth) for t in _of(lines)),
        _gap_table(lines, depth),
        _exit_table(lines),
    ]


def advice(lines: Sequence[Line], drafter: str, depth: int) -> list[str]:
    """What the depth limit and the drafter cost, and where most of the missed mass leaves, at the largest budget."""
    largest = max(line.budget for line in lines)
    sentences = []
    for line in lines:
        if line.budget != largest or line.drafter != drafter:
            continue
        head = (
            f"temperature {line.temperature:g}, {largest} nodes: {drafter} has a block length of "
            f"{line.block_length.value:.2f}, the best tree of at most {depth} levels "
            f"{line.capped_block_length.value:.2f}, the best of any depth {line.oracle_block_length.value:.2f}"
        )
        if not line.shares:
            sentences.append(f"{head}; nothing is missed.")
            continue
        place, share = _worst(line.shares)
        sentences.append(f"{head}; {100 * share:.0f} % of what it misses leaves {MEANING[place]}.")
    return sentences


def _worst(shares: Mapping[str, float]) -> tuple[str, float]:
    """Root, interior or horizon, whichever misses most, and its share; the interior goes by its larger part."""
    inside = "branch" if shares["branch"] >= shares["leaf"] else "leaf"
    areas = {"root": shares["root"], inside: shares["branch"] + shares["leaf"], "horizon": shares["horizon"]}
    place = max(areas, key=lambda name: areas[name])
    return place, areas[place]


def _of(lines: Sequence[Line], name: str = "temperature") -> list[Any]:
    return list(dict.fromkeys(getattr(line, name) for line in lines))


def _greedy_note(temperatures: Sequence[float], depth: int) -> str:
    if not any(Sampling(t).greedy for t in temperatures):
        return ""
    return (
        f" At temperature 0 the target knows one continuation: C*(N) = N, a chain as long as the budget, of which "
        f"{depth} levels are within the limit. Where the drafter's trees follow it that far, all that lies deeper is "
        "missed at the horizon, and the larger the budget the more that outweighs all else."
    )


def _length_table(lines: Sequence[Line], num_contexts: int, depth: int) -> Table:
    temperature, drafters = lines[0].temperature, _of(lines, "drafter")
    by_place = {(line.drafter, line.budget): line for line in lines}
    rows = []
    for budget in _of(lines, "budget"):
        first = by_place[drafters[0], budget]
        cells = [str(budget), _cell(first.oracle_block_length), _cell(first.capped_block_length)]
        for drafter in drafters:
            line = by_place[drafter, budget]
            cells += [_cell(line.block_length), _cell(line.tree_efficiency)]
        rows.append(tuple(cells))
    names = [text for drafter in drafters for text in (f"{drafter}: 1 + C", f"{drafter}: tree efficiency")]
    return Table(
        f"temperature {temperature:g}: expected block length of the best tree and of the drafters'",
        f"Exact: mean over {num_contexts:,} contexts, bonus token counted. C*(N) is the largest coverage a tree of N "
        f"nodes can have, of any depth or of at most {depth} levels, as the drafters' trees have; tree efficiency = "
        f"mean C / mean C* of any depth.{_greedy_note([temperature], depth)}",
        ("budget N", "oracle: 1 + C*(N)", f"oracle of depth {depth}: 1 + C*(N)", *names),
        tuple(rows),
    )


def _gap_table(lines: Sequence[Line], depth: int) -> Table:
    rows = []
    for line in lines:
        shares = line.shares
        missed = [
            number(part.value) + (f" ({100 * shares[place]:.0f} %)" if shares else "")
            for place, part in line.missed.items()
        ]
        rows.append(
            (
                line.drafter,
                f"{line.temperature:g}",
                str(line.budget),
                _cell(line.gap),
                _cell(line.gap_of_depth),
                _cell(line.gap_of_drafter),
                *missed,
                number(line.spare.value),
            )
        )
    return Table(
        "Where the gap lies: C*(N) - C = depth limit + drafter = all that is missed - spare",
        f"Depth limit: C* of any depth less C* of at most {depth} levels. Drafter: the latter less C, what a better "
        "one could win in trees of this depth. Missed: reach of the oracle's prefixes that the drafter's tree lacks, "
        "by the node of that tree at which they leave it, in tokens a block (share of all missed). Spare: reach of the "
        f"tree's prefixes that are none of the oracle's.{_greedy_note(_of(lines), depth)}",
        (
            "drafter", "temperature", "budget N", "gap C* - C", "of it depth limit", "of it drafter",
            *(f"missed: {NAMES[place]}" for place in PLACES), "spare",
        ),
        tuple(rows),
    )  # fmt: skip


def _exit_table(lines: Sequence[Line]) -> Table:
    rows = [
        (line.drafter, f"{line.temperature:g}", str(line.budget), *(number(line.exits[place]) for place in PLACES))
        for line in lines
    ]
    return Table(
        "Where the target leaves the drafters' trees",
        "Exit mass w: how likely the target's continuation leaves the tree at a node of this kind; each row sums to 1.",
        ("drafter", "temperature", "budget N", *(NAMES[place] for place in PLACES)),
        tuple(rows),
    )


def _cell(estimate: Estimate) -> str:
    return interval(Interval.of(estimate))


def curve_plot(lines: Sequence[Line], depth: int) -> str:
    """Block length by budget, of the oracle with and without the depth limit and of every drafter; a panel a
    temperature."""
    temperatures, drafters, budgets = _of(lines), _of(lines, "drafter"), _of(lines, "budget")
    with figure(min(12.0, 1.2 + 3.0 * len(temperatures)), 3.4, len(temperatures)) as (made, axes):
        for axis, temperature in zip(axes, temperatures, strict=True):
            for place, drafter in enumerate(drafters):
                here = [line for line in lines if (line.temperature, line.drafter) == (temperature, drafter)]
                if place == 0:
                    style: Any = {"color": INK, "markersize": 3.5, "linewidth": 1.2}
                    best, capped = ([getattr(x, f"{n}_block_length").value for x in here] for n in ("oracle", "capped"))
                    axis.plot(budgets, best, "--o", label="oracle, 1 + C*(N)", **style)
                    axis.plot(budgets, capped, ":s", label=f"oracle of depth {depth}", **style)
                _curve(axis, budgets, [line.block_length for line in here], PALETTE[place % len(PALETTE)], drafter)
            axis.set_xscale("log", base=2)
            axis.set_xticks(budgets, [str(budget) for budget in budgets])
            axis.set_title(f"temperature {temperature:g}")
            axis.set_xlabel("budget N, nodes")
        axes[0].set_ylabel("expected block length, 1 + C")
        handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
        made.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
        return svg(made, "oracle", "Expected block length by tree budget, drafters beside the oracle")


def _curve(axis: Any, budgets: Sequence[int], points: Sequence[Estimate], colour: str, label: str) -> None:
    axis.plot(budgets, [point.value for point in points], "-o", color=colour, markersize=3.5, label=label)
    bounds = [(point.low, point.high) for point in points]
    if all(low is not None for low, _ in bounds):
        axis.fill_between(budgets, *zip(*bounds, strict=True), color=colour, alpha=0.18, linewidth=0)


def gap_plot(lines: Sequence[Line]) -> str:
    """What is missed by place, and spare to the left of zero: a bar a drafter and budget, a panel a temperature."""
    temperatures = _of(lines)
    bars = [(line.drafter, line.budget) for line in lines if line.temperature == temperatures[0]]
    height, width = 1.5 + 0.3 * len(bars), min(12.0, 2.2 + 2.7 * len(temperatures))
    with figure(width, height, len(temperatures), share=True) as (made, axes):
        for axis, temperature in zip(axes, temperatures, strict=True):
            here = [line for line in lines if line.temperature == temperature]
            left = [0.0] * len(here)
            for colour, place in zip(PALETTE, PLACES, strict=False):
                widths = [line.missed[place].value for line in here]
                axis.barh(range(len(here)), widths, left=left, color=colour, label=NAMES[place], height=0.66)
                left = [a + b for a, b in zip(left, widths, strict=True)]
            spare = [-line.spare.value for line in here]
            axis.barh(range(len(here)), spare, color=FAINT, label="spare", height=0.66)
            axis.axvline(0, color=INK, linewidth=1)
            axis.set_title(f"temperature {temperature:g}")
            axis.set_xlabel("missed tokens a block")
            axis.grid(axis="y", visible=False)
        axes[0].set_yticks(range(len(bars)), [f"{drafter}, {budget}" for drafter, budget in bars])
        axes[0].invert_yaxis()
        made.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return svg(made, "gap", "What the drafters' trees miss of the oracle's, by the place where it leaves them")
