"""How good a tree could be, how near the drafter's trees come, and where the rest is lost (suite `oracle`).

One oracle tree of the largest budget at each context, one of the target's best trees of the drafters' depth, and one
best-first tree of each drafter give every budget: the builders put nodes in order of worth, so the first n nodes are
the tree of budget n. The target's trees grow in waves, all contexts of a group and all prefixes of a level that may
still be among the best N in one forward of the target.

Shapes: A contexts, B trees of a group, M nodes with the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.law.exit_law import batch_exit_law
from exittrain.law.gap import CoverageGap, coverage_gap, first_nodes
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.runtime.progress import progress_bar
from exittrain.runtime.signals import StopFlag
from exittrain.stages.coverage import draw_and_score
from exittrain.stages.evaluate import WARM_START
from exittrain.stages.evaluation.contexts import ContextSet, grow_oracles
from exittrain.stages.evaluation.measures import Floats
from exittrain.stages.studies.base import Bench, StudyReport, contexts_hash
from exittrain.stages.studies.oracle_tables import advice, curve_plot, gap_plot, lines_of, report_tables
from exittrain.stages.studies.settings import OracleStudy
from exittrain.stages.training.trees import anchor_groups, max_trees, move_trees, take_trees
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter


@dataclass(frozen=True, eq=False)
class OracleTrees:
    """The target's own trees [A, M], nodes in the builder's order; draft_logprobs are the target's edges."""

    trees: TreeBatch

    def to_json(self) -> dict[str, Any]:
        singles = self.trees.trees()
        return {
            name: [getattr(tree, name).tolist() for tree in singles]
            for name in ("token_ids", "parents", "draft_logprobs")
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OracleTrees:
        columns = zip(data["token_ids"], data["parents"], data["draft_logprobs"], strict=True)
        return cls(
            TreeBatch.from_trees([DraftTree(tokens, parents, "top", scores) for tokens, parents, scores in columns])
        )


@dataclass(frozen=True, eq=False)
class GapResult:
    """One drafter at one temperature. gaps: budget -> the parts of `CoverageGap`, each [A] or [A, 4]."""

    sequence_ids: tuple[str, ...]
    gaps: dict[int, dict[str, Floats]]

    def to_json(self) -> dict[str, Any]:
        gaps = {
            str(budget): {name: part.tolist() for name, part in parts.items()} for budget, parts in self.gaps.items()
        }
        return {"sequence_ids": self.sequence_ids, "gaps": gaps}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GapResult:
        gaps = {
            int(budget): {name: np.asarray(part, dtype=np.float64) for name, part in parts.items()}
            for budget, parts in data["gaps"].items()
        }
        return cls(tuple(data["sequence_ids"]), gaps)


def run_oracle(bench: Bench) -> StudyReport:
    """The study: every drafter at every temperature and budget, beside the oracle.

    Raises InputError on an unknown drafter and where no context leaves room for the trees, the target's with a chain of
    the largest budget.
    """
    settings = bench.settings
    assert isinstance(settings, OracleStudy)
    budgets, temperatures = sorted(set(settings.budgets)), list(dict.fromkeys(settings.temperatures))
    drafters = drafters_of(bench)
    contexts = bench.contexts(drafters, settings.depth, chain=budgets[-1])
    capped = {t: capped_coverage(bench, contexts, budgets, t) for t in temperatures}
    results = {
        (name, temperature): gap_cell(bench, name, contexts, budgets, temperature)
        for name in drafters
        for temperature in temperatures
    }
    lines = [
        line
        for temperature in temperatures
        for (name, other), result in results.items()
        if other == temperature
        for line in lines_of(name, temperature, result.gaps, capped[temperature], result.sequence_ids, bench.bootstrap)
    ]
    return StudyReport(
        report_tables(lines, len(contexts), settings.depth),
        {"block-length": curve_plot(lines, settings.depth), "gap": gap_plot(lines)},
        {"contexts": len(contexts), "sequences": len(set(contexts.ids)), "lines": [line.to_json() for line in lines]},
        advice(lines, bench.default_drafter(), settings.depth),
    )


def drafters_of(bench: Bench) -> list[str]:
    """The settings' drafters, else the warm start (where there is one) and the default drafter."""
    warm = [entrant.name for entrant in bench.entrants if entrant.role == WARM_START]
    names = dict.fromkeys(bench.settings.drafters or [*warm, bench.default_drafter()])
    return [bench.entrant(name).name for name in names]


def gap_cell(bench: Bench, name: str, contexts: ContextSet, budgets: Sequence[int], temperature: float) -> GapResult:
    """A stored cell; the oracle's trees are another, shared by all drafters of one temperature."""
    settings, subject, sampling = bench.settings, bench.subject(name), bench.at(temperature)
    shape = TreeShape(budgets[-1], settings.depth, settings.width)

    def make() -> GapResult:
        return measure_gaps(
            bench.target, subject.drafter, contexts, target_trees(bench, contexts, shape.budget, temperature), shape,
            budgets, sampling, bench.stop, f"{settings.name}: temperature {temperature:g}, {name}",
        )  # fmt: skip

    key = {
        "contexts": contexts_hash(contexts), "temperature": temperature, "drafter": subject.fingerprint,
        "shape": vars(shape), "budgets": list(budgets),
    }  # fmt: skip
    return bench.get(GapResult, key, make)


def target_trees(
    bench: Bench, contexts: ContextSet, budget: int, temperature: float, depth: int | None = None
) -> TreeBatch:
    """A stored cell: the best trees of `budget` nodes, of at most `depth` levels where one is given, by the target."""
    shape, limit = TreeShape(budget, depth or budget, budget), {} if depth is None else {"depth": depth}
    name = "oracle" if depth is None else f"oracle of depth {depth}"
    found = bench.get(
        OracleTrees, {"contexts": contexts_hash(contexts), "temperature": temperature, "budget": budget, **limit},
        lambda: OracleTrees(
            grow_oracles(
                bench.target, contexts, shape, bench.at(temperature), bench.stop,
                f"{bench.settings.name}: temperature {temperature:g}, {name}",
                "oracle" if depth is None else "best_first",
            )
        ),
    )  # fmt: skip
    return found.trees


def capped_coverage(
    bench: Bench, contexts: ContextSet, budgets: Sequence[int], temperature: float
) -> dict[int, Floats]:
    """budget -> [A] coverage of the best tree of at most the settings' depth: what a perfect drafter would reach."""
    trees = target_trees(bench, contexts, budgets[-1], temperature, bench.settings.depth)
    assert trees.draft_logprobs is not None  # builders always set them
    edges = trees.draft_logprobs.double()
    return {budget: batch_exit_law(*first_nodes(trees, edges, budget)).coverage.numpy() for budget in budgets}


@torch.no_grad()
def measure_gaps(
    target: TargetModel, drafter: Drafter, contexts: ContextSet, oracle: TreeBatch, shape: TreeShape,
    budgets: Sequence[int], sampling: Sampling, stop: StopFlag, description: str,
) -> GapResult:  # fmt: skip
    """The drafter's best-first trees of shape.budget nodes, drawn and scored once, beside the oracle's at every budget.

    oracle: one tree a context, at least shape.budget nodes where the target has them.
    """
    groups, found = [], []
    with progress_bar(len(contexts), description, "contexts") as bar:
        most = max_trees(target.vocab_size, shape)
        for rows in anchor_groups([len(s) for s in contexts.sequences], contexts.tree_sequence, most):
            scored = draw_and_score(
                target, drafter, contexts.sequences, contexts.tree_sequence, contexts.anchors, rows, shape, sampling
            )
            trees = move_trees(scored.trees, torch.device("cpu"))
            groups.append(rows)
            found.append(nested_gaps(take_trees(oracle, rows), trees, scored.edge_logprobs.cpu(), budgets, shape.depth))
            stop.raise_if_set()
            bar.advance(rows.numel())
    order = torch.cat(groups).argsort()
    gaps = {
        budget: {
            name: torch.cat([getattr(part[budget], name) for part in found])[order].numpy()
            for name in CoverageGap.__dataclass_fields__
        }
        for budget in budgets
    }
    return GapResult(contexts.ids, gaps)


def nested_gaps(
    oracle: TreeBatch, trees: TreeBatch, edge_logprobs: Tensor, budgets: Sequence[int], depth: int
) -> dict[int, CoverageGap]:
    """The gap at each budget from two trees of the largest. edge_logprobs [B, M]: the target's, of `trees`."""
    assert oracle.draft_logprobs is not None  # builders always set them
    edges = oracle.draft_logprobs.double()
    return {
        budget: coverage_gap(*first_nodes(oracle, edges, budget), *first_nodes(trees, edge_logprobs, budget), depth)
        for budget in budgets
    }
