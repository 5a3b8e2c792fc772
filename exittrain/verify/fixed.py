"""What the fixed verifiers share: they never look at draft probabilities, so they are exact on every tree.

A verifier is told apart by two functions on plain rows [N+1, V] (numpy, float64 or Fractions: each is written once):
`exits` lists every way out of the tree with its probability, `draw` takes one at random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.probabilities import Rows, checked_rows
from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DRAWN, DraftTree
from exittrain.tree.merge import merge_twins
from exittrain.verify.base import BatchVerdict, BlockLaw, Generators, Verdict

Uniform = Callable[[], float]  # the next draw from [0, 1)


class RowReader(Protocol):
    """Rows read one at a time: an array of them, or `ServedRows`."""

    def __getitem__(self, node: int, /) -> Rows: ...


@dataclass(frozen=True)
class ServedRows:
    """The served distribution [V] float64 of a node, made of raw logits [M, V] when it is read."""

    logits: Tensor
    kept: list[int]
    sampling: Sampling

    def __getitem__(self, node: int, /) -> Rows:
        probs = process_logits(self.logits[self.kept[node]], self.sampling).double().exp()
        row: Rows = (probs / probs.sum()).cpu().numpy()
        return row


@dataclass(frozen=True, eq=False)
class Exit:
    """One way out: the node left at, its probability, and the bonus token's law [V] there."""

    node: int
    probability: Any
    bonus: Rows


class FixedVerifier(ABC):
    """Exact on any tree, however drawn; the twins of an i.i.d. tree are merged first."""

    name: str

    @abstractmethod
    def exits(self, tree: DraftTree, rows: Rows) -> Iterator[Exit]:
        """Every exit of the merged tree, those of no probability included or not. May write to rows."""

    @abstractmethod
    def draw(self, tree: DraftTree, rows: RowReader, uniform: Uniform) -> tuple[int, int]:
        """(node, bonus token) at random, from float64 rows. May write to a row it has read."""

    def check(self, drawn: str | None) -> None:
        if drawn not in DRAWN:
            raise InputError(f"drawn is {drawn!r}; it must be one of {', '.join(map(repr, DRAWN))}")

    def check_rows(self, rows: Rows) -> None:
        """Raises InputError on rows this rule is not made for."""
        return None

    def verify(
        self, tree: DraftTree, target_probs: Any, draft_probs: Any = None, generator: torch.Generator | None = None
    ) -> Verdict:
        merged, kept, rows = self._prepare(tree, target_probs)
        node, bonus = self.draw(merged, rows.astype(np.float64), uniform_from(generator))
        return Verdict(tuple(tree.path(kept[node])), bonus)

    def block_law(self, tree: DraftTree, target_probs: Any, draft_probs: Any = None) -> BlockLaw:
        merged, _, rows = self._prepare(tree, target_probs)
        tokens = merged.token_ids.tolist()
        law: BlockLaw = {}
        for way in self.exits(merged, rows):
            accepted = tuple(tokens[node] for node in merged.path(way.node))
            for token in np.flatnonzero(way.bonus):
                block = (*accepted, int(token))
                law[block] = law.get(block, 0) + way.probability * way.bonus[token]
        return {block: probability for block, probability in law.items() if probability > 0}

    def expected_block_length(self, tree: DraftTree, target_probs: Any, draft_probs: Any = None) -> float:
        merged, _, rows = self._prepare(tree, target_probs)
        depths = merged.depths.tolist()
        length: float = sum(way.probability * (depths[way.node] + 1) for way in self.exits(merged, rows))
        return length

    def verify_batch(
        self,
        trees: TreeBatch,
        target_logits: Tensor,
        sampling: Sampling,
        generators: Generators,
        draft_rows: DraftRows | None = None,
    ) -> BatchVerdict:
        """Tree by tree, only the rows on the way: `tev` and `greedy` have a level-parallel form of their own."""
        self.check(trees.drawn)
        ends = []
        for row, tree in enumerate(trees.trees()):
            merged, kept = merge_twins(tree)
            uniform = (lambda: 0.5) if sampling.greedy else uniform_from(generators[row])
            node, bonus = self.draw(merged, ServedRows(target_logits[row], kept.tolist(), sampling), uniform)
            ends.append((int(kept[node]), bonus))
        nodes, bonus_tokens = torch.tensor(ends, device=target_logits.device).unbind(1)
        return BatchVerdict(nodes, bonus_tokens)

    def _prepare(self, tree: DraftTree, target_probs: Any) -> tuple[DraftTree, list[int], Rows]:
        self.check(tree.drawn)
        merged, kept = merge_twins(tree)
        rows = checked_rows(tree, target_probs)[kept.numpy()]
        self.check_rows(rows)
        return merged, kept.tolist(), rows


def uniform_from(generator: torch.Generator | None) -> Uniform:
    """Draws in float64, so that rare tokens keep their probability."""
    device = "cpu" if generator is None else generator.device
    return lambda: float(torch.rand((), dtype=torch.float64, generator=generator, device=device))


def pick(weights: Rows, uniform: float) -> int:
    """Inverse CDF: an index of weights [n] (not negative, not all zero) by one uniform draw; never one of weight 0."""
    total = np.cumsum(weights)
    index = int(np.searchsorted(total, uniform * total[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))


def children_of(tree: DraftTree) -> list[list[int]]:
    """Each node's children, in draft order."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes + 1)]
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        children[parent].append(node)
    return children
