"""The trees of the study `verifiers`: builders, the verifiers exact for each, a shape for each budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exittrain.build.base import TreeShape
from exittrain.build.ranked import ranked_shape
from exittrain.build.registry import drawn_by
from exittrain.build.static import rank_paths
from exittrain.errors import InputError
from exittrain.stages.evaluation.contexts import ContextSet
from exittrain.stages.studies.base import Bench
from exittrain.stages.studies.choices import Family
from exittrain.stages.studies.laws import TreeSource
from exittrain.stages.studies.settings import VerifierStudy
from exittrain.verify.registry import get_verifier

RANK_RULE = {"top": "tev", "iid": "rrs", "without_replacement": "rrs_wor"}  # what a child's acceptance is measured by


@dataclass(frozen=True)
class Forest:
    """Trees of one kind at one temperature.

    name: the builder's, or `sampled_wor chain`; verifiers: those exact for its trees; shapes: by budget, ascending;
    acceptance: probability by rank that the child of that rank is the accepted one, empty where the shape is not
    made of it.
    """

    temperature: float
    name: str
    builder: str
    verifiers: tuple[str, ...]
    shapes: dict[int, TreeShape]
    acceptance: tuple[float, ...] = ()

    @property
    def family(self) -> Family:
        return "fixed" if drawn_by(self.builder) == "top" else "sampled"

    def sources(self) -> list[TreeSource]:
        """Grown once at the largest budget and read at all of them; beam's trees are not nested: one source each."""
        if self.builder == "beam":
            return [TreeSource("beam", shape, {str(budget): budget}) for budget, shape in self.shapes.items()]
        counted = self.builder == "best_first"
        parts = {str(b): b if counted else frozenset(rank_paths(shape)) for b, shape in self.shapes.items()}
        return [TreeSource(self.builder, self.shapes[max(self.shapes)], parts)]


def plant(bench: Bench, settings: VerifierStudy, drafter: str, choosing: ContextSet) -> list[Forest]:
    """Every kind of trees at every temperature. choosing: the contexts at which acceptance by rank is measured.

    `block` serves chains alone, which are trees of their own beside the others. Raises InputError where no verifier
    of the settings is exact for some builder's trees.
    """
    budgets, rules = sorted(set(settings.budgets)), [rule for rule in settings.verifiers if rule != "block"]
    chains = {b: TreeShape(b, settings.depth, settings.width) for b in budgets}
    forests = []
    for temperature in dict.fromkeys(settings.temperatures):
        for builder in dict.fromkeys(settings.builders) if rules else ():
            exact = tuple(rule for rule in rules if _exact(rule, builder))
            if not exact:
                raise InputError(f"no verifier of the study is exact for trees of {builder}: add tev to them")
            shapes, acceptance = chains, tuple[float, ...]()
            if builder not in ("best_first", "beam"):
                acceptance = acceptance_by_rank(bench, settings, drafter, choosing, builder, temperature)
                shapes = {b: _ranked(acceptance, b, settings) for b in budgets}
            forests.append(Forest(temperature, builder, builder, exact, shapes, acceptance))
        if "block" in settings.verifiers:
            forests.append(Forest(temperature, "sampled_wor chain", "sampled_wor", ("block",), chains))
    return forests


def _exact(rule: str, builder: str) -> bool:
    verifier = get_verifier(rule)
    try:
        verifier.check(drawn_by(builder))
    except InputError:
        return False
    return True


def _ranked(acceptance: Sequence[float], budget: int, settings: VerifierStudy) -> TreeShape:
    return TreeShape(budget, settings.depth, settings.width, ranked_shape(acceptance, budget, settings.depth))


def acceptance_by_rank(
    bench: Bench, settings: VerifierStudy, drafter: str, contexts: ContextSet, builder: str, temperature: float
) -> tuple[float, ...]:
    """[width] probability that the child of each rank (place in draw order) is the one accepted below the root.

    Sequoia's positional acceptance (arXiv 2402.12374), exact given the children, mean over contexts. No verifier here
    looks ahead: the first k of a node's children are accepted with the probability that a tree of them alone has, so
    its expected accepted tokens grow by acceptance[k - 1] from k - 1 children to k.
    """
    paths = tuple((rank,) for rank in range(settings.width))
    parts = {str(count): frozenset(paths[:count]) for count in range(1, settings.width + 1)}
    source = TreeSource(builder, TreeShape(settings.width, 1, settings.width, paths), parts)
    rule = RANK_RULE[drawn_by(builder)]
    law = bench.laws(drafter, contexts, source, [rule], temperature, draws=0)
    lengths = [1.0, *(float(np.mean(law.expected[part][rule])) for part in parts)]
    return tuple(np.diff(lengths).clip(min=0.0).tolist())
