"""R contexts laid out as S rows of at most A contexts each, so that contexts of one sequence share its cache row."""

from __future__ import annotations

import torch
from torch import Tensor


class Grid:
    """rows [R]: each context's row; place [R]: its place within the row; width A: the most contexts in a row."""

    def __init__(self, rows: Tensor, num_rows: int) -> None:
        self.rows, self.num_rows = rows, num_rows
        member = torch.nn.functional.one_hot(rows, num_rows)
        self.place = (member.cumsum(0) - 1).gather(1, rows[:, None])[:, 0]
        self.width = int(member.sum(0).max()) if rows.numel() else 0

    def scatter(self, values: Tensor) -> Tensor:
        """[R, ...] to [S, A, ...]; places without a context hold 0."""
        out = values.new_zeros((self.num_rows, self.width, *values.shape[1:]))
        out[self.rows, self.place] = values
        return out

    def gather(self, values: Tensor) -> Tensor:
        """[S, A, ...] back to [R, ...]."""
        return values[self.rows, self.place]


def block_diagonal(blocks: Tensor) -> Tensor:
    """[S, A, W, X] bool to [S, A*W, A*X]: a context's nodes see only its own columns."""
    rows, places, width, columns = blocks.shape
    full = blocks.new_zeros((rows, places, width, places, columns))
    index = torch.arange(places, device=blocks.device)
    full[:, index, :, index] = blocks.transpose(0, 1)
    return full.reshape(rows, places * width, places * columns)
