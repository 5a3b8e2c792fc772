"""Blocks behind their contexts: one forward for all of them, in training and in drafting alike.

Shapes: S rows of context, L context tokens, R blocks, B tokens of a block, H hidden, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exittrain.drafters.block.network import BlockNetwork, KeysValues
from exittrain.models.grid import Grid


def block_states(
    network: BlockNetwork, embeddings: Tensor, context: Sequence[KeysValues], rows: Tensor, anchors: Tensor,
    roots: Tensor,
) -> Tensor:  # fmt: skip
    """States [R, B, H] of R blocks: place k >= 1 predicts the token at anchor + k, whatever lies between.

    Block r starts with token roots[r] at position anchors[r] of context row rows[r], all [R]; it sees the row's first
    anchors[r] columns, which are its tokens before the anchor, and all of itself. embeddings [V, H]: the target's, as
    they are (no scale, as DFlash's servers look them up).
    """
    grid, size = Grid(rows, len(context[0][0])), network.block_size
    width, limit = context[0][0].shape[2], network.config.max_positions - 1
    places = torch.arange(size, device=rows.device)
    tokens = torch.where(places == 0, roots[:, None], network.mask_token_id)
    # Blocks may reach past the last position: what is drafted there is cut off by whoever uses it.
    positions = (anchors[:, None] + places).clamp(max=limit)
    before = torch.arange(width, device=rows.device) < anchors[:, None]

    seen = grid.scatter(before)[:, :, None].expand(-1, -1, size, -1).flatten(1, 2)
    own = torch.arange(grid.width * size, device=rows.device) // size
    visible = torch.cat([seen, (own[:, None] == own).expand(len(seen), -1, -1)], dim=-1)
    embedded = nn.functional.embedding(grid.scatter(tokens).flatten(1), embeddings)
    states: Tensor = network(embedded, grid.scatter(positions).flatten(1), context, visible)
    return grid.gather(states.view(len(seen), grid.width, size, -1))


class ContextCache:
    """The context of S rows as keys and values, a layer each: row s's tokens lie in its first lengths[s] columns."""

    def __init__(self, network: BlockNetwork, num_rows: int) -> None:
        config, like = network.config, network.fc.weight
        empty = like.detach().new_zeros((num_rows, config.num_kv_heads, 0, config.head_dim))
        self._network = network
        self.layers: list[KeysValues] = [(empty, empty)] * config.num_layers
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=like.device)

    @torch.no_grad()
    def append(self, features: Tensor, counts: Tensor) -> None:
        """Add each row's next counts[s] tokens by their features [S, W, F], right-padded; counts [S].

        Written where the row ends, so that rows of different counts leave no holes and the widest row is the width.
        """
        index = torch.arange(features.shape[1], device=self.lengths.device)
        positions = self.lengths[:, None] + index
        row, column = (index < counts[:, None]).nonzero(as_tuple=True)
        place = positions[row, column]
        self.lengths = self.lengths + counts
        if not len(row):
            return
        more = max(0, int(self.lengths.max()) - self.layers[0][0].shape[2])
        limit = self._network.config.max_positions - 1  # beyond it is padding alone
        new = self._network.context(features, positions.clamp(max=limit))
        for layer, pair in enumerate(new):
            keys, values = (nn.functional.pad(kept, (0, 0, 0, more)) for kept in self.layers[layer])
            keys[row, :, place], values[row, :, place] = pair[0][row, :, column], pair[1][row, :, column]
            self.layers[layer] = keys, values

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows [S'] (indices, in this order), as wide as the longest of them."""
        rows = rows.to(self.lengths.device)
        self.lengths = self.lengths[rows]
        width = int(self.lengths.max()) if len(rows) else 0
        self.layers = [(keys[rows, :, :width], values[rows, :, :width]) for keys, values in self.layers]
