"""Sequences with their trees packed behind them, one row a sequence: one forward scores them all (math.md section 7).

Shapes: S sequences, L columns of the packed row, R trees over all sequences, M nodes with the root, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exittrain.models.masks import additive_mask
from exittrain.tree.batch import TreeBatch


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows [sequence | nodes of tree 1 | nodes of tree 2 | ... | padding].

    input_ids, position_ids [S, L] int64; mask [S, 1, L, L] additive, or None where causal is right (no trees);
    columns [R, M] each node's column in its sequence's row (the root and padded nodes: the anchor's column);
    tree_sequence [R] each tree's row; lengths [S] tokens of each sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor | None
    columns: Tensor
    tree_sequence: Tensor
    lengths: Tensor

    def gather(self, hidden: Tensor) -> Tensor:
        """[R, M, H] the nodes' rows of hidden [S, L, H]; row i of a tree predicts the token after node i."""
        return hidden[self.tree_sequence[:, None], self.columns]

    def to(self, device: torch.device | str) -> PackedBatch:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in vars(self).items()
        }
        return replace(self, **moved)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """1-D id tensors as (ids [S, L] int64 right-padded with 0, lengths [S] int64), on the first row's device."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    padded = torch.nn.utils.rnn.pad_sequence([row.to(torch.int64) for row in rows], batch_first=True)
    return padded, lengths


def pack(
    sequences: Sequence[Tensor],
    trees: TreeBatch,
    tree_sequence: Tensor,
    anchors: Tensor,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """Pack R trees behind S sequences (1-D ids of any lengths); dtype is the model's, for the mask.

    tree_sequence, anchors [R]: tree r grows from position anchors[r] of sequences[tree_sequence[r]]. A node sees its
    sequence up to and including the anchor, its ancestors and itself; its position is anchor + depth. A sequence's
    own tokens never see a node, and padding sees itself, so no row of the softmax is empty.
    """
    device = trees.token_ids.device
    tokens, lengths = pad_rows([sequence.to(device) for sequence in sequences])
    rows, anchors = tree_sequence.to(device), anchors.to(device)
    drafted = trees.valid & (trees.depths > 0)  # [R, M]
    starts = _starts(drafted.sum(1), rows, len(sequences)) + lengths[rows]
    columns = torch.where(drafted, starts[:, None] + drafted.cumsum(1) - 1, anchors[:, None])
    width = max(int(columns.max()) + 1, tokens.shape[1])

    tree, node = drafted.nonzero(as_tuple=True)
    row, column = rows[tree], columns[tree, node]
    index = torch.arange(width, device=device)
    input_ids = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
    input_ids[row, column] = trees.token_ids[tree, node]
    position_ids = index.repeat(len(sequences), 1).clamp_(max=tokens.shape[1] - 1)
    position_ids[row, column] = anchors[tree] + trees.depths[tree, node]

    visible = (index[:, None] >= index).repeat(len(sequences), 1, 1)
    visible[row, column] = index <= anchors[tree][:, None]
    tree, node, above = (trees.visible() & drafted[..., None] & drafted[:, None]).nonzero(as_tuple=True)
    visible[rows[tree], columns[tree, node], columns[tree, above]] = True
    return PackedBatch(input_ids, position_ids, additive_mask(visible, dtype), columns, rows, lengths)


def pack_plain(sequences: Sequence[Tensor]) -> PackedBatch:
    """Sequences alone, right-padded: causal attention needs no mask, since padding comes after every real token."""
    tokens, lengths = pad_rows(sequences)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    nothing = torch.zeros(0, dtype=torch.int64, device=tokens.device)
    return PackedBatch(tokens, positions, None, nothing[:, None], nothing, lengths)


def _starts(counts: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[R] nodes of earlier trees in the same row, for counts [R] of each tree."""
    per_row = torch.nn.functional.one_hot(rows, num_rows) * counts[:, None]
    return (per_row.cumsum(0) - per_row).gather(1, rows[:, None])[:, 0]
