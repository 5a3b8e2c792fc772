"""A key-value cache for rows of different lengths that trees are run behind and accepted paths are kept in.

Shapes: S rows, K cached columns, W new columns, M nodes with the root, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from exittrain.models.masks import additive_mask
from exittrain.models.packed import pad_rows
from exittrain.tree.batch import TreeBatch


class Cacheable(Protocol):
    """What can be run behind a cache: a causal LM, or a head that also takes features [S, L, F] of its tokens."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def hidden(self) -> Callable[..., Tensor]:
        """(input_ids [S, L], position_ids [S, L], mask [S, 1, L, K+L], cache[, features]) -> states [S, L, H]; what is
        run is appended to the cache."""
        ...

    def head(self, states: Tensor) -> Tensor: ...


class TreeCache:
    """Cached columns of S rows. A column is committed (part of the row's context) or not (a node, or padding).

    committed [S, K] bool; lengths [S] committed tokens of each row. Nodes are appended as uncommitted columns and see
    what their mask says; `commit` keeps the accepted ones by gathering and drops the rest, so a column's place never
    says anything about its position (math.md section 7). Nothing here is differentiable.
    """

    def __init__(self, model: Cacheable, num_rows: int) -> None:
        self.model = model
        self.committed = torch.zeros((num_rows, 0), dtype=torch.bool, device=model.device)
        self._store: Any = DynamicCache()
        self._score_start = 0

    @property
    def lengths(self) -> Tensor:
        """[S] committed tokens of each row."""
        return self.committed.sum(1)

    @property
    def num_rows(self) -> int:
        return self.committed.shape[0]

    @property
    def num_columns(self) -> int:
        """K: columns in memory, holes and nodes included."""
        return self.committed.shape[1]

    @torch.no_grad()
    def extend(self, rows: Sequence[Tensor], features: Tensor | None = None) -> Tensor:
        """Append and commit each row's next tokens (1-D ids, any lengths, none allowed); features [S, W, F] of them,
        right-padded, for a head.

        Returns hidden [S, W, H], right-padded: row s holds its tokens' states at 0..len(rows[s])-1.
        """
        tokens, counts = pad_rows([row.to(self.model.device) for row in rows])
        width = tokens.shape[1]
        if width == 0:
            return torch.zeros((len(rows), 0, self.model.hidden_size), dtype=self.model.dtype, device=tokens.device)
        index = torch.arange(width, device=tokens.device)
        visible = None
        if self.num_columns > 0:
            causal = (index[:, None] >= index).expand(self.num_rows, -1, -1)
            visible = torch.cat([self.committed[:, None].expand(-1, width, -1), causal], dim=-1)
        hidden = self._run(tokens, self.lengths[:, None] + index, visible, features)
        self.committed[:, -width:] = index < counts[:, None]
        return hidden

    @torch.no_grad()
    def append(self, token_ids: Tensor, positions: Tensor, visible: Tensor, features: Tensor | None = None) -> Tensor:
        """Run nodes [S, W] at positions [S, W] as uncommitted columns; visible [S, W, K+W] bool, each node itself;
        features [S, W, F] for a head.

        Returns hidden [S, W, H].
        """
        return self._run(token_ids, positions, visible, features)

    @torch.no_grad()
    def score(self, trees: TreeBatch) -> Tensor:
        """Run one tree a row, root included, behind the committed context (which ends before the root).

        Returns hidden [S, M, H]: row i predicts the token after node i. Follow with `accept` or `rollback`.
        """
        self._score_start = self.num_columns
        context = self.committed[:, None].expand(-1, trees.token_ids.shape[1], -1)
        visible = torch.cat([context, trees.visible()], dim=-1)
        return self._run(trees.token_ids, self.lengths[:, None] + trees.depths, visible)

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the root and the nodes of each row's path (indices of the last scored trees, from depth 1 down)."""
        nodes = pad_paths([[0, *path] for path in paths], self.committed.device)
        self.commit(torch.where(nodes >= 0, nodes + self._score_start, nodes))

    def rollback(self) -> None:
        """Drop every uncommitted column."""
        self.commit(self.committed.new_zeros((self.num_rows, 0), dtype=torch.int64))

    def commit(self, columns: Tensor) -> None:
        """Commit further columns [S, D] in the given order (-1 is padding) and drop all other uncommitted ones."""
        index = torch.arange(self.num_columns, device=columns.device)
        kept = torch.cat([torch.where(self.committed, index, -1), columns], dim=1)
        order = (kept < 0).to(torch.uint8).argsort(dim=1, stable=True)
        self.keep(kept.gather(1, order)[:, : int((kept >= 0).sum(1).max())])

    @torch.no_grad()
    def keep(self, columns: Tensor) -> None:
        """Keep just these columns [S, C], in this order, as each row's committed context; -1 pads on the right."""
        valid, width = columns >= 0, columns.shape[1]
        # Few columns move, mostly those of the accepted path: the rest already lies in place.
        row, place = (valid & (columns != torch.arange(width, device=columns.device))).nonzero(as_tuple=True)
        source = columns[row, place]
        for layer in self._store.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)  # on its layer's device
                to_row, to_place, from_place = (part.to(states.device) for part in (row, place, source))
                states[to_row, :, to_place] = states[to_row, :, from_place]
                setattr(layer, name, states[:, :, :width])
        self.committed = valid

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows [S'] (indices, in this order)."""
        rows = rows.to(self.committed.device)
        for layer in self._store.layers:
            own = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(0, own), layer.values.index_select(0, own)
        self.committed = self.committed[rows]
        self.rollback()

    def crop(self, lengths: Tensor) -> None:
        """Shorten each row's context to lengths [S] (no more than it has)."""
        self.committed = self.committed & (self.committed.cumsum(1) <= lengths.to(self.committed.device)[:, None])
        self.rollback()

    def _run(self, tokens: Tensor, positions: Tensor, visible: Tensor | None, features: Tensor | None = None) -> Tensor:
        mask = None if visible is None else additive_mask(visible, self.model.dtype)
        # Padding, and drafts that will be cut, may lie past the last position: their output is read by nobody.
        positions = positions.clamp(max=self.model.max_positions - 1)
        extra = () if features is None else (features,)
        hidden = self.model.hidden(tokens, positions, mask, self._store, *extra)
        added = self.committed.new_zeros(tokens.shape)
        self.committed = torch.cat([self.committed, added], dim=1)
        return hidden


def pad_paths(paths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Lists of indices as one tensor [S, D], padded with -1 on the right."""
    width = max((len(path) for path in paths), default=0)
    return torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths], device=device, dtype=torch.int64)
