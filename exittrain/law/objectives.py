"""The node objectives of math.md section 8, each reduced to weights on rows or on edges.

    loss_node = (sum row_weights * row_loss(p_v, q_v)  +  sum edge_weights * -log q_par(v)(x_v)) / denominator

Exit and KL forms are for trees verified as fixed sets. `accept_*` are for sampled trees: recursive rejection sampling
accepts the first draw at v with probability alpha(v) = sum_x min(p_v(x), q_v(x)) (SpecInfer, arXiv 2305.09781, and
Leviathan et al., arXiv 2211.17192, for one draw): along a sampled chain P(at least d accepted) is the expected product
of d such terms, and the expected block length 1 + their sum over d. The output passes v with probability P(v) whatever
the verifier, so reach weighs refusals as often as they happen. As losses: LK losses, arXiv 2602.23881; DistillSpec's
TVD, arXiv 2310.08461.

A new objective is one entry of OBJECTIVES (and, where it is no KL, one row loss in `law.losses.ROW_LOSSES`).
Shapes: B trees, M = N+1 nodes with the root (padded). Weights are float64, detached, 0 where padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from exittrain.errors import InputError, nearest
from exittrain.law.exit_law import ExitLaw
from exittrain.tree.batch import TreeBatch

Normaliser = Literal["nodes", "weights", "anchors"]
Weight = Callable[[TreeBatch, ExitLaw], Tensor]  # [B, M]


@dataclass(frozen=True)
class Objective:
    """on: "rows" compares distributions at nodes (root included), "edges" raises drafted tokens; weight: each one's."""

    on: Literal["rows", "edges", "nothing"]
    weight: Weight
    row_loss: str = "kl"
    source: str = ""


@dataclass(frozen=True, eq=False)
class NodeTerms:
    """row_weights, edge_weights [B, M] (edge v is read at v's parent); row_loss: a name in `losses.ROW_LOSSES`, None
    where the weights are on edges.

    denominator is this batch's share: sum it over micro-batches and ranks, then divide once.
    """

    row_weights: Tensor
    edge_weights: Tensor
    denominator: float
    row_loss: str | None = "kl"


OBJECTIVES: dict[str, Objective] = {
    "token": Objective("nothing", lambda trees, law: torch.zeros_like(law.exit), source="the control: token loss only"),
    "exit": Objective("edges", lambda trees, law: law.exit, source="L_exit as published"),
    "exit_depth": Objective("edges", lambda trees, law: law.exit * trees.depths, source='the official code\'s "exit"'),
    "reach": Objective("edges", lambda trees, law: law.reach, source="every officially shipped recipe"),
    "exit_kl": Objective("rows", lambda trees, law: law.exit, source="math.md section 8"),
    "reach_kl": Objective("rows", lambda trees, law: law.reach, source="math.md section 8"),
    "accept_tv": Objective("rows", lambda trees, law: law.reach, "tv", source="1 - alpha, arXiv 2310.08461"),
    "accept_lk": Objective("rows", lambda trees, law: law.reach, "lk", source="-log alpha, arXiv 2602.23881"),
}


def get_objective(name: str) -> Objective:
    """The objective of that name; InputError with the nearest one otherwise."""
    if name not in OBJECTIVES:
        raise InputError(f"no objective {name!r}{nearest(name, list(OBJECTIVES))} (known: {', '.join(OBJECTIVES)})")
    return OBJECTIVES[name]


def node_terms(
    name: str, trees: TreeBatch, law: ExitLaw, normaliser: str = "anchors", depth_limit: int | None = None,
    num_nodes: int | None = None,
) -> NodeTerms:  # fmt: skip
    """The weights of one objective on a batch of trees and their exit law [B, M].

    normaliser: "nodes" (number of drafted nodes, as published), "weights" (sum of the weights), "anchors" (number of
    trees). depth_limit: the deepest level the builder may reach; leaves there mean "reached the end", not "missing",
    and row objectives skip them. num_nodes: drafted nodes, where the trees given have lost those without a weight.
    Raises InputError on an unknown name or normaliser.
    """
    objective = get_objective(name)
    weights = objective.weight(trees, law).detach().double()
    nothing = torch.zeros_like(weights)
    drafted = trees.valid & (trees.depths > 0)
    if objective.on == "edges":
        edges, rows = torch.where(drafted, weights, 0.0), nothing
    else:
        counted = trees.valid if depth_limit is None else trees.valid & (trees.depths < depth_limit)
        edges, rows = nothing, torch.where(counted, weights, 0.0)
    denominators: dict[str, Callable[[], float]] = {
        "nodes": lambda: float(drafted.sum() if num_nodes is None else num_nodes),
        "weights": lambda: float((rows + edges).sum()),
        "anchors": lambda: float(len(trees)),
    }
    if normaliser not in denominators:
        known = list(denominators)
        raise InputError(f"no normaliser {normaliser!r}{nearest(normaliser, known)} (known: {', '.join(known)})")
    return NodeTerms(rows, edges, denominators[normaliser](), objective.row_loss if objective.on == "rows" else None)


def weight_at(step: int, steps: int, weight: float, warmup_ratio: float = 0.0) -> float:
    """lambda at optimiser step `step` (0-based) of `steps`: rises linearly over the first warmup_ratio, then stays."""
    rising = warmup_ratio * steps
    return weight if rising < 1 else weight * min(1.0, (step + 1) / rising)
