"""Several trees side by side in padded tensors: what builders return and level-parallel maths reads.

Shapes: B trees, M = the largest N+1 among them (nodes with the root).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.tree.draft_tree import DraftTree


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """B trees padded to M nodes. Column 0 is the root, parents come before children in every row.

    token_ids [B, M] int64 (0 where padded); parents [B, M] int64 (-1 at the root, 0 where padded);
    depths [B, M] int64 (0 where padded); valid [B, M] bool; draft_logprobs [B, M] float32, log q of each node's token
    at its parent (0 at the root and where padded), or None.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    drawn: str | None = None
    draft_logprobs: Tensor | None = None

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> TreeBatch:
        """Pad a list of trees; they must all be drawn the same way. Raises InputError on an empty or mixed list."""
        if not trees:
            raise InputError("a batch of trees needs at least one tree")
        kinds = {tree.drawn for tree in trees}
        if len(kinds) > 1:
            raise InputError(f"trees drawn in different ways cannot share a batch: {sorted(map(str, kinds))}")
        sizes = [tree.token_ids.numel() for tree in trees]
        shape = (len(trees), max(sizes))
        tokens, parents, depths = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        scores = torch.zeros(shape) if all(t.draft_logprobs is not None for t in trees) else None
        for row, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
            tokens[row, :size], parents[row, :size], depths[row, :size] = tree.token_ids, tree.parents, tree.depths
            if scores is not None and tree.draft_logprobs is not None:
                scores[row, :size] = tree.draft_logprobs
        valid = torch.arange(shape[1]) < torch.tensor(sizes)[:, None]
        return cls(
            tokens.to(device), parents.to(device), depths.to(device), valid.to(device),
            drawn=trees[0].drawn, draft_logprobs=None if scores is None else scores.to(device),
        )  # fmt: skip

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    def trees(self) -> list[DraftTree]:
        """The rows as single trees, padding removed."""
        tokens, parents, valid = self.token_ids.cpu(), self.parents.cpu(), self.valid.cpu()
        scores = None if self.draft_logprobs is None else self.draft_logprobs.cpu()
        return [
            DraftTree(
                tokens[b, valid[b]],
                parents[b, valid[b]],
                self.drawn,
                None if scores is None else scores[b, valid[b]],
            )
            for b in range(len(self))
        ]

    def parent_index(self) -> Tensor:
        """[B, M] each node's parent column, clamped to 0 at the root: safe to gather with."""
        return self.parents.clamp(min=0)

    def child_counts(self) -> Tensor:
        """[B, M] int64: how many children each node has (0 where padded)."""
        drafted = (self.valid & (self.depths > 0)).long()
        return torch.zeros_like(self.parents).scatter_add(1, self.parent_index(), drafted)

    def has_children(self) -> Tensor:
        """[B, M] bool: nodes with at least one child."""
        return self.child_counts() > 0

    def keep(self, chosen: Tensor) -> tuple[TreeBatch, Tensor]:
        """The nodes of chosen [B, M] bool alone, moved together in their order.

        chosen must hold each root and the parent of every node it holds. Also returns columns [B, M']: where each kept
        node stood (-1 where padded).
        """
        chosen = chosen & self.valid
        size = int(chosen.sum(1).max())
        columns = chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :size]
        kept = chosen.gather(1, columns)
        new_place = chosen.cumsum(1) - 1
        links = self.parents.gather(1, columns)
        links = torch.where(links < 0, -1, new_place.gather(1, links.clamp(min=0)))
        scores = self.draft_logprobs
        trees = TreeBatch(
            torch.where(kept, self.token_ids.gather(1, columns), 0),
            torch.where(kept, links, 0),
            torch.where(kept, self.depths.gather(1, columns), 0),
            kept,
            self.drawn,
            None if scores is None else torch.where(kept, scores.gather(1, columns), 0.0),
        )
        return trees, torch.where(kept, columns, -1)

    def visible(self) -> Tensor:
        """[B, M, M] bool: row i sees column j when j is i or an ancestor of i. Padding sees itself only."""
        size = self.token_ids.shape[1]
        eye = torch.eye(size, dtype=torch.bool, device=self.parents.device).expand(len(self), size, size)
        seen = eye.clone()
        index = self.parent_index()[..., None].expand(-1, -1, size)
        for depth in range(1, self.max_depth + 1):
            at_depth = ((self.depths == depth) & self.valid)[..., None]
            seen = torch.where(at_depth, seen.gather(1, index) | eye, seen)
        return seen
