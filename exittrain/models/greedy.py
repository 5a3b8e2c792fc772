"""The target's argmax path through draft trees, level by level behind the cached sequences.

At temperature 0 a node is reached with probability 1 or 0 (math.md section 2): whatever is weighted by reach or exit
needs the target's state at the few nodes on its own path, and at no other.

Shapes: R trees, M nodes with the root, S cache rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, first_tokens
from exittrain.models.cache import TreeCache
from exittrain.models.causal import HEAD_ROWS
from exittrain.models.session import CacheSession
from exittrain.tree.batch import TreeBatch


class Walk(Protocol):
    """Fills in the states of some trees' nodes, behind a cache of their sequences."""

    def __call__(
        self, cache: TreeCache, trees: TreeBatch, members: Tensor, rows: Tensor, anchors: Tensor, out: Tensor
    ) -> None: ...


def walk_greedily(
    cache: TreeCache, trees: TreeBatch, members: Tensor, rows: Tensor, anchors: Tensor, out: Tensor,
    wanted: Tensor, path: Tensor,
) -> None:  # fmt: skip
    """Mark the nodes on the argmax path of trees `members` [R'] in path [R, M], and write the states of those that are
    `wanted` [R, M] into out [R, M, H], which holds the roots' already. rows [R']: their cache rows; anchors [R].

    A path is followed as far as its nodes are wanted. Raises InputError on logits that hold NaN or infinity, and on
    siblings that repeat the path's token.
    """
    if not len(members):
        return
    trees_left, nodes, states = members, torch.zeros_like(members), out[members, 0]
    session = CacheSession(cache, states, trees.token_ids[members, 0], rows, anchors[members], Sampling(0.0))
    for depth in range(trees.max_depth):
        child, found = _argmax_child(cache, trees, trees_left, nodes, states)
        path[trees_left[found], child[found]] = True
        on = found & wanted[trees_left, child]
        if not bool(on.any()):
            break
        session.keep(on)
        trees_left, nodes = trees_left[on], child[on]
        slots = torch.full_like(nodes, depth)[:, None]  # a wave is one node a tree, so its slot is its depth
        tokens = trees.token_ids[trees_left, nodes][:, None]
        states = session.advance(slots, tokens, torch.ones_like(tokens, dtype=torch.bool))[:, 0]
        out[trees_left, nodes] = states


def _argmax_child(
    cache: TreeCache, trees: TreeBatch, members: Tensor, nodes: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """(the child [R'] of each tree's node that bears the target's first token, whether there is one)."""
    first = torch.cat([first_tokens(cache.model.head(part)) for part in torch.split(states, HEAD_ROWS)])
    drafted = trees.depths[members] > 0
    bears = drafted & (trees.parents[members] == nodes[:, None]) & (trees.token_ids[members] == first[:, None])
    if bool((bears.sum(1) > 1).any()):
        raise InputError("siblings of a tree repeat a token: its exits would not sum to 1")
    return bears.to(torch.uint8).argmax(1), bears.any(1)
