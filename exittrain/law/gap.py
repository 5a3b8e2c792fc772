"""What a tree lacks of the oracle's tree, by the place at which the target leaves it (math.md sections 2 and 6).

Let O be the oracle's drafted nodes and T the tree's, both read as prefixes behind the same context. A prefix of O that
T does not hold leaves T at one node: its deepest ancestor in T, the root at worst. So, with reach P,

    C*(N) - C = sum of P over O without T - sum of P over T without O = missed at all places of T - spare

Shapes: B trees, M and M' = nodes of the oracle's and of the drafter's trees with the root, padded. Float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.law.exit_law import batch_exit_law
from exittrain.tree.batch import TreeBatch

# What a node of a tree is to what leaves there: the root; a node with children; a leaf above the depth limit; a node at
# the limit. The two in the middle are the tree's interior.
PLACES = ("root", "branch", "leaf", "horizon")


@dataclass(frozen=True, eq=False)
class CoverageGap:
    """oracle_coverage C*, coverage C, spare [B]; missed, exits [B, 4], columns as in PLACES.

    missed: reach of the oracle's prefixes that the tree lacks, by the node at which they leave it; spare: reach of the
    tree's prefixes that the oracle's lacks. C* - C = sum of missed - spare, up to the rounding in which two scorings of
    one prefix differ. exits: w of the tree's own nodes, each row sums to 1.
    """

    oracle_coverage: Tensor
    coverage: Tensor
    missed: Tensor
    spare: Tensor
    exits: Tensor


def coverage_gap(
    oracle: TreeBatch, oracle_edges: Tensor, trees: TreeBatch, edge_logprobs: Tensor, depth: int
) -> CoverageGap:
    """Splits the gap between each tree and the oracle's tree at the same context; neither may hold twins.

    oracle_edges [B, M], edge_logprobs [B, M']: the target's log p_par(v)(x_v) on each tree's edges, 0 at the root and
    where padded; depth: the deepest level the drafter's trees may have. Raises InputError as `batch_exit_law`.
    """
    best, law = batch_exit_law(oracle, oracle_edges), batch_exit_law(trees, edge_logprobs)
    kind = node_places(trees, depth)
    nearest, held = deepest_shared(oracle, trees)
    lacking = torch.where(oracle.valid & ~held, best.reach, 0.0)
    shared = torch.zeros_like(trees.parents).scatter_add(1, nearest, held.long()) > 0
    return CoverageGap(
        best.coverage,
        law.coverage,
        _by_place(kind.gather(1, nearest), lacking),
        torch.where(trees.valid & ~shared, law.reach, 0.0).sum(1),
        _by_place(kind, law.exit),
    )


def node_places(trees: TreeBatch, depth: int) -> Tensor:
    """[B, M] index into PLACES of every node (0 where padded); a root is a root even without children."""
    inner = torch.where(trees.has_children(), PLACES.index("branch"), PLACES.index("leaf"))
    kind = torch.where(trees.depths >= depth, PLACES.index("horizon"), inner)
    return torch.where(trees.valid & (trees.depths > 0), kind, PLACES.index("root"))


def deepest_shared(trees: TreeBatch, others: TreeBatch) -> tuple[Tensor, Tensor]:
    """nearest [B, M]: for each node of `trees` the column, in `others`, of its deepest prefix that `others` holds too,
    itself included; held [B, M] bool: that is the node itself. Roots count as equal; padding is 0 and not held."""
    base = 1 + max(int(trees.token_ids.max()), int(others.token_ids.max()))
    # A child is found by (its parent's column, its token) among the sorted pairs; what is no drafted node has none.
    pairs = torch.where(others.valid & (others.depths > 0), others.parents * base + others.token_ids, -1)
    pairs, columns = pairs.sort(dim=1)
    parents = trees.parent_index()
    held, nearest = trees.valid & (trees.depths == 0), torch.zeros_like(parents)
    for level in range(1, trees.max_depth + 1):
        above = nearest.gather(1, parents)
        wanted = above * base + trees.token_ids
        place = torch.searchsorted(pairs, wanted).clamp(max=pairs.shape[1] - 1)
        found = held.gather(1, parents) & (pairs.gather(1, place) == wanted)
        here = trees.valid & (trees.depths == level)
        nearest = torch.where(here, torch.where(found, columns.gather(1, place), above), nearest)
        held = held | (here & found)
    return nearest, held


def first_nodes(trees: TreeBatch, edge_logprobs: Tensor, budget: int) -> tuple[TreeBatch, Tensor]:
    """The first `budget` drafted nodes of each tree with their edges: of a best-first or oracle tree the tree of that
    budget (see `build.grow`)."""
    order = torch.arange(trees.parents.shape[1], device=trees.parents.device)
    kept, columns = trees.keep((order <= budget).expand_as(trees.parents))
    return kept, torch.where(kept.valid, edge_logprobs.gather(1, columns.clamp(min=0)), 0.0)


def _by_place(places: Tensor, mass: Tensor) -> Tensor:
    """[B, 4] sum of mass [B, M] over the nodes of each place; padding must have no mass."""
    return mass.new_zeros((len(mass), len(PLACES))).scatter_add(1, places, mass)
