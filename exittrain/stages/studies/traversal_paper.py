"""`traversal-paper`: traversal beside token-level verification, the ablations of arXiv 2505.12398.

Both verifiers judge the same sampled trees, each by its exact expectation given the tree: a gain holds no verifier
noise, and what a tree's draws do to both cancels. The depths of one shape are nested parts of one tree.
Shapes: U sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from exittrain.build.base import TreeShape
from exittrain.build.static import EAGLE, rank_paths
from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.evaluation.measures import Floats
from exittrain.stages.evaluation.schema import Interval, Number, Part
from exittrain.stages.evaluation.summary import expected_beside_measured
from exittrain.stages.studies import traversal_tables as tables
from exittrain.stages.studies.base import StudyReport
from exittrain.stages.studies.laws import LawResult, TreeSource
from exittrain.stages.studies.published import Shape, TraversalFigures, differs_table, read_figures
from exittrain.stages.studies.settings import TraversalStudy

if TYPE_CHECKING:
    from exittrain.stages.studies.base import Bench

TOKEN_LEVEL, TRAVERSAL = "rrs_wor", "traversal"


class Side(Part):
    """One verifier: its exact expectation; the mean of its verdicts on the same trees, and whether that lies where it
    must 95 times in 100 (None: no verdicts were drawn, or too few sequences)."""

    expected: Interval
    verdicts: Number | None
    agrees: bool | None


class Point(Part):
    """Both verifiers on one shape. gain: of traversal, in percent, sequences paired; num_nodes: drafted, mean."""

    shape: Shape
    depth: int
    temperature: Number
    num_nodes: Number
    token_level: Side
    traversal: Side
    gain: Interval


class Step(Part):
    """increase: the gain at `deep` minus the gain at `shallow`, in percentage points, on the same trees."""

    shape: Shape
    shallow: int
    deep: int
    increase: Interval


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of expected block lengths over each sequence's contexts, and their counts; all [U]."""

    token_level: Floats
    traversal: Floats
    counts: Floats


def run_traversal_paper(bench: Bench) -> StudyReport:
    """Chains, binary trees and EAGLE's tree, drawn without replacement: all depths at one temperature, the paper's
    depth at the others."""
    settings = bench.settings
    assert isinstance(settings, TraversalStudy)
    figures = read_figures("traversal-paper", TraversalFigures)
    drafter, depths = bench.default_drafter(), (settings.chain_depths, settings.binary_depths)
    every, few = tree_sources(*depths), tree_sources(*([tables.paper_depth(some)] for some in depths))
    contexts = bench.contexts([drafter], max(source.shape.depth for source in every.values()))
    main = main_temperature(settings.temperatures)
    points, steps = [], []
    for temperature in dict.fromkeys(settings.temperatures):
        for shape, source in (every if temperature == main else few).items():
            draws = settings.draws if temperature == main else 0
            law = bench.laws(drafter, contexts, source, (TOKEN_LEVEL, TRAVERSAL), temperature, draws)
            points += [point_of(law, shape, part, temperature, bench.bootstrap) for part in source.parts]
            if temperature == main:
                steps += steps_of(law, shape, bench.bootstrap)
    note = (
        f"Drafter {drafter}, target {bench.target.name}: {len(contexts):,} contexts of {len(set(contexts.ids)):,} "
        "sequences, trees drawn without replacement. Block length: exact expectation given the tree, both verifiers "
        "on the same trees; intervals and gains are paired by sequence."
    )
    here = [point for point in points if point.temperature == main]
    return StudyReport(
        [
            tables.depth_table(here, figures, note, settings.draws),
            tables.step_table(steps, figures, main),
            tables.temperature_table(tables.at_paper_depth(points), figures, note),
            *([tables.pair_table(tables.at_paper_depth(here), figures)] if main == 1 else []),
            differs_table(figures),
        ],
        {"gain-by-depth": tables.gain_plot(here, figures, main)},
        {
            "drafter": drafter, "points": [point.model_dump(mode="json") for point in points],
            "steps": [step.model_dump(mode="json") for step in steps], "published": figures.model_dump(mode="json"),
        },
        tables.summary_lines(here, steps, main),
    )  # fmt: skip


def main_temperature(temperatures: Sequence[float]) -> float:
    """Where the study goes into depth: 1, as the paper does, else the highest asked for."""
    return 1.0 if 1.0 in temperatures else max(temperatures)


def tree_sources(chain_depths: Collection[int], binary_depths: Collection[int]) -> dict[Shape, TreeSource]:
    """The deepest tree of each shape, its parts labelled by depth."""
    eagle = TreeShape(len(EAGLE), max(map(len, EAGLE)), branching="eagle")
    return {
        "chain": _nested("chain", 1, chain_depths),
        "binary": _nested("2-ary", 2, binary_depths),
        "eagle": TreeSource("sampled_wor", eagle, {str(eagle.depth): frozenset(EAGLE)}),
    }


def _nested(branching: str, arity: int, depths: Collection[int]) -> TreeSource:
    def shape(depth: int) -> TreeShape:
        return TreeShape(sum(arity**level for level in range(1, depth + 1)), depth, branching=branching)

    deepest = shape(max(depths))  # raises where there are too many nodes
    return TreeSource("sampled_wor", deepest, {str(d): frozenset(rank_paths(shape(d))) for d in sorted(set(depths))})


def point_of(law: LawResult, shape: Shape, part: str, temperature: float, bootstrap: iv.Bootstrap) -> Point:
    sums = sums_of(law, part)
    pair = (sums.traversal, sums.counts, sums.token_level, sums.counts)
    return Point(
        shape=shape, depth=int(part), temperature=temperature, num_nodes=law.num_nodes[part],
        token_level=_side(law, part, TOKEN_LEVEL, bootstrap), traversal=_side(law, part, TRAVERSAL, bootstrap),
        gain=Interval.of(bootstrap(iv.gain_of_ratios, *pair)),
    )  # fmt: skip


def steps_of(law: LawResult, shape: Shape, bootstrap: iv.Bootstrap) -> list[Step]:
    """What each step to the next depth adds to the gain, and all of them together where there are several."""
    depths = sorted(map(int, law.expected))
    pairs = list(pairwise(depths)) + ([(depths[0], depths[-1])] if len(depths) > 2 else [])
    steps = []
    for shallow, deep in pairs:
        new, old = sums_of(law, str(deep)), sums_of(law, str(shallow))
        columns = (new.traversal, new.token_level, old.traversal, old.token_level)
        increase = Interval.of(bootstrap(increase_of_gain, *columns))
        steps.append(Step(shape=shape, shallow=shallow, deep=deep, increase=increase))
    return steps


def increase_of_gain(
    deep_tops: Floats, deep_controls: Floats, shallow_tops: Floats, shallow_controls: Floats, axis: int = -1
) -> Floats:
    """Gain in percent at one depth minus the gain at another; every column sums over the same contexts."""
    deep, shallow = iv.ratio(deep_tops, deep_controls, axis), iv.ratio(shallow_tops, shallow_controls, axis)
    return np.asarray(100.0 * (deep - shallow))


def sums_of(law: LawResult, part: str) -> Sums:
    token_level, counts = iv.cluster_sums(law.expected[part][TOKEN_LEVEL], law.sequence_ids)
    return Sums(token_level, iv.cluster_sums(law.expected[part][TRAVERSAL], law.sequence_ids)[0], counts)


def _side(law: LawResult, part: str, rule: str, bootstrap: iv.Bootstrap) -> Side:
    sums, counts = iv.cluster_sums(law.expected[part][rule], law.sequence_ids)
    expected = Interval.of(bootstrap(iv.ratio, sums, counts))
    if not law.measured:
        return Side(expected=expected, verdicts=None, agrees=None)
    values = law.measured[part][rule]
    _, agrees = expected_beside_measured(iv.cluster_sums(values, law.sequence_ids)[0], sums, counts, bootstrap)
    return Side(expected=expected, verdicts=float(values.mean()), agrees=agrees)
