"""What all verifiers share: a rule lists every way out of a tree with its probability, and its law follows from that.

Rows are plain tables [N+1, V] (numpy, float64 or Fractions): each rule is written once, for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from exittrain.errors import InputError
from exittrain.law.probabilities import Rows
from exittrain.tree.draft_tree import DRAWN, DraftTree
from exittrain.verify.base import BlockLaw


@dataclass(frozen=True, eq=False)
class Exit:
    """One way out: the node left at, its probability, and the bonus token's law [V] there."""

    node: int
    probability: Any
    bonus: Rows


class ExitRule(ABC):
    """A verifier told by its ways out; what it is exact on and what it reads is its own."""

    name: str

    @abstractmethod
    def ways(self, tree: DraftTree, target_probs: Any, draft_probs: Any) -> tuple[DraftTree, Iterator[Exit]]:
        """The tree as it is ruled on, and every exit of it, those of no probability included or not."""

    def check(self, drawn: str | None) -> None:
        if drawn not in DRAWN:
            raise InputError(f"drawn is {drawn!r}; it must be one of {', '.join(map(repr, DRAWN))}")

    def block_law(self, tree: DraftTree, target_probs: Any, draft_probs: Any = None) -> BlockLaw:
        ruled, ways = self.ways(tree, target_probs, draft_probs)
        tokens = ruled.token_ids.tolist()
        law: BlockLaw = {}
        for way in ways:
            accepted = tuple(tokens[node] for node in ruled.path(way.node))
            for token in np.flatnonzero(way.bonus):
                block = (*accepted, int(token))
                law[block] = law.get(block, 0) + way.probability * way.bonus[token]
        return {block: probability for block, probability in law.items() if probability > 0}

    def expected_block_length(self, tree: DraftTree, target_probs: Any, draft_probs: Any = None) -> float:
        ruled, ways = self.ways(tree, target_probs, draft_probs)
        depths = ruled.depths.tolist()
        length: float = sum(way.probability * (depths[way.node] + 1) for way in ways)
        return length


def children_of(tree: DraftTree) -> list[list[int]]:
    """Each node's children, in draft order."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes + 1)]
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        children[parent].append(node)
    return children
