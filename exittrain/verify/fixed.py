"""What the fixed verifiers share: they never look at draft probabilities, so they are exact on every tree.

A verifier is told apart by two functions on plain rows [N+1, V] (numpy, float64 or Fractions: each is written once):
`exits` lists every way out of the tree with its probability, `draw` takes one at random.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exittrain.law.probabilities import Rows, checked_rows
from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins
from exittrain.verify.base import BatchVerdict, Generators, Verdict
from exittrain.verify.draws import Uniform, uniform_from
from exittrain.verify.exits import Exit, ExitRule
from exittrain.verify.fixed_batch import fixed_exits


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


class FixedVerifier(ExitRule):
    """Exact on any tree, however drawn; the twins of an i.i.d. tree are merged first."""

    @abstractmethod
    def exits(self, tree: DraftTree, rows: Rows) -> Iterator[Exit]:
        """Every exit of the merged tree, those of no probability included or not. May write to rows."""

    @abstractmethod
    def draw(self, tree: DraftTree, rows: RowReader, uniform: Uniform) -> tuple[int, int]:
        """(node, bonus token) at random, from float64 rows. May write to a row it has read."""

    def check_rows(self, rows: Rows) -> None:
        """Raises InputError on rows this rule is not made for."""
        return None

    def ways(self, tree: DraftTree, target_probs: Any, draft_probs: Any) -> tuple[DraftTree, Iterator[Exit]]:
        merged, _, rows = self._prepare(tree, target_probs)
        return merged, self.exits(merged, rows)

    def verify(
        self, tree: DraftTree, target_probs: Any, draft_probs: Any = None, generator: torch.Generator | None = None
    ) -> Verdict:
        merged, kept, rows = self._prepare(tree, target_probs)
        node, bonus = self.draw(merged, rows.astype(np.float64), uniform_from(generator))
        return Verdict(tuple(tree.path(kept[node])), bonus)

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

    def exit_probabilities(
        self, trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows | None = None
    ) -> Tensor:
        """One law for all fixed verifiers (math.md section 2). Twins count at the first, the later ones get 0."""
        self.check(trees.drawn)
        law = fixed_exits(trees, target_logits, sampling)
        nothing = torch.zeros(trees.parents.shape, dtype=torch.float64, device=law.exits.device)
        return nothing.scatter_add(1, law.kept, law.exits)

    def _prepare(self, tree: DraftTree, target_probs: Any) -> tuple[DraftTree, list[int], Rows]:
        self.check(tree.drawn)
        merged, kept = merge_twins(tree)
        rows = checked_rows(tree, target_probs)[kept.numpy()]
        self.check_rows(rows)
        return merged, kept.tolist(), rows
