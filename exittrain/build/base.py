"""What a builder is: it asks a draft session for log-probabilities wave by wave and returns one tree a context.

Shapes: B contexts, W nodes of one wave, M = N+1 nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows

MAX_BUDGET = 4096  # a tree's attention mask grows with the square of it


class DraftSession(Protocol):
    """A model (the drafter; for `oracle` the target) standing at B contexts, ready to look ahead.

    Slots number what the session has seen: slot 0 is each context's root, the first wave of W nodes gets 1..W, the next
    W' nodes W+1..W+W', padding included. All log-probabilities are float32 and already processed (temperature, top-k,
    top-p).
    """

    root_tokens: Tensor  # [B] the last token of each context

    def root(self) -> Tensor:
        """[B, V] log-probabilities of the token after each context."""
        ...

    def expand(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        """Add one wave of nodes, all [B, W]; returns the log-probabilities [B, W, V] of the token after each of them.

        Rows where valid is False are padding: their output is unspecified.
        """
        ...


@dataclass(frozen=True)
class TreeShape:
    """budget: drafted nodes kept; depth: deepest level; width: children looked at per node (best_first), nodes expanded
    per level and children per node (beam). branching: `static` and the sampled builders, see `rank_paths`.

    Raises InputError unless budget, depth and width are positive and the budget is at most MAX_BUDGET.
    """

    budget: int = 16
    depth: int = 6
    width: int = 8
    branching: str | tuple[tuple[int, ...], ...] = "chain"

    def __post_init__(self) -> None:
        for name in ("budget", "depth", "width"):
            if getattr(self, name) < 1:
                raise InputError(f"tree {name} is {getattr(self, name)}; it must be at least 1")
        if self.budget > MAX_BUDGET:
            raise InputError(f"tree budget is {self.budget}; at most {MAX_BUDGET} nodes are scored in one pass")


@dataclass(frozen=True, eq=False)
class Draft:
    """trees: one a context; slots [B, M]: each node's slot in the session (root 0), -1 where it was never expanded;
    draft_rows: what the children of a sampled tree were drawn from (None for trees chosen by score)."""

    trees: TreeBatch
    slots: Tensor
    draft_rows: DraftRows | None = None

    def keep(self, chosen: Tensor) -> tuple[Draft, Tensor]:
        """The nodes of chosen [B, M] bool alone (`TreeBatch.keep`), and columns [B, M'] of where they stood.

        The draft rows are shared, not copied; a node that lost all its children may keep its row.
        """
        trees, columns = self.trees.keep(chosen)
        slots = torch.where(columns >= 0, self.slots.gather(1, columns.clamp(min=0)), -1)
        rows = self.draft_rows
        if rows is not None:
            rows = rows.select(torch.arange(len(trees), device=columns.device), columns)
        return Draft(trees, slots, rows), columns


class Builder(Protocol):
    """generators: one a context, what sampled builders draw from (a context's tree does not depend on its
    neighbours); the others never draw. Raises InputError where a sampled builder gets none."""

    def __call__(
        self, session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None
    ) -> Draft: ...
