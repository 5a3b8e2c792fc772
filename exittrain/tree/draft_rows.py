"""The drafter's own distributions at the nodes of sampled trees: what their children were drawn from.

Shapes: B trees, M = N+1 nodes with the root (padded), R recorded rows over all trees, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.errors import InputError


@dataclass(frozen=True, eq=False)
class DraftRows:
    """probs [R, V] float32: the very tensor the children were drawn from (a row over its float64 sum is q);
    row_of [B, M] int64: each node's row, -1 where none was recorded (leaves and padding).

    Only nodes with children have a row: a tree of 64 nodes over 152k tokens would hold 40 MB otherwise.
    Raises InputError on shapes that do not fit together or a row that is named and not there.
    """

    probs: Tensor
    row_of: Tensor

    def __post_init__(self) -> None:
        if self.probs.dim() != 2 or self.row_of.dim() != 2 or self.row_of.is_floating_point():
            raise InputError(
                f"draft rows need probs [R, V] and row_of [B, M] of indices, got {tuple(self.probs.shape)} and "
                f"{tuple(self.row_of.shape)} {self.row_of.dtype}"
            )
        if self.row_of.numel() and int(self.row_of.max()) >= len(self.probs):
            raise InputError(f"row_of names row {int(self.row_of.max())}; probs has {len(self.probs)}")

    def of_tree(self, tree: int, num_nodes: int) -> Tensor:
        """[num_nodes + 1, V] float64 rows of one tree, each summing to one; zeros where none was recorded."""
        rows = torch.zeros((num_nodes + 1, self.probs.shape[1]), dtype=torch.float64, device=self.probs.device)
        index = self.row_of[tree, : num_nodes + 1]
        known = index >= 0
        rows[known] = self.probs[index[known]].double()
        return rows / rows.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    def select(self, trees: Tensor, nodes: Tensor) -> DraftRows:
        """The rows of some nodes [B', M'] (columns of the trees [B'], -1 where padded); probs are shared."""
        picked = self.row_of[trees[:, None], nodes.clamp(min=0)]
        return DraftRows(self.probs, torch.where(nodes >= 0, picked, -1))
