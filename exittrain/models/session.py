"""A model looking ahead from R contexts over S cached sequences, wave by wave: the builders' DraftSession.

Shapes: R contexts, S cache rows, A contexts a row, W nodes of one wave, K cached columns, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.cache import TreeCache
from exittrain.models.causal import CausalModel
from exittrain.models.grid import Grid

Logits = Callable[[Tensor], Tensor]


class CacheSession:
    """Implements DraftSession. Waves are appended behind the sequence's one cached prefix, which is never copied.

    root_hidden [R, H]: the state at each context's last token; root_tokens [R]; rows [R]: the cache row of each
    context; anchors [R]: the position of its last token, which the row's committed columns must reach. logits: states
    [..., H] to raw logits [..., V] (default: the model's head). recurrent: a node is run with its parent's state, which
    takes the place of the target's feature there (EAGLE).
    columns [R, slots]: the cache column of each slot so far (-1 for the root), what `TreeCache.commit` takes.
    """

    def __init__(
        self, cache: TreeCache, root_hidden: Tensor, root_tokens: Tensor, rows: Tensor, anchors: Tensor,
        sampling: Sampling, logits: Logits | None = None, recurrent: bool = False,
    ) -> None:  # fmt: skip
        device = cache.model.device
        self.root_tokens = root_tokens.to(device)
        self._cache, self._sampling, self._recurrent = cache, sampling, recurrent
        self._logits = cache.model.head if logits is None else logits
        self._states = root_hidden[:, None]  # [R, slots, H]; of the root alone where nothing recurs
        self._grid = Grid(rows.to(device), cache.num_rows)
        self._anchors = anchors.to(device)
        self._depths = torch.zeros((len(rows), 1), dtype=torch.int64, device=device)
        self.columns = torch.full((len(rows), 1), -1, dtype=torch.int64, device=device)
        committed = cache.committed[self._grid.rows]
        reached = committed & (committed.cumsum(1) - 1 <= self._anchors[:, None])
        self._seen = reached[:, None]  # [R, slots, K]: what a child of each slot sees, itself apart

    @torch.no_grad()
    def root(self) -> Tensor:
        """[R, V] processed log-probabilities of the token after each context."""
        return process_logits(self._logits(self._states[:, 0]), self._sampling)

    @torch.no_grad()
    def expand(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        """Run one wave [R, W]; processed log-probabilities [R, W, V] of the token after each node (0 where padded)."""
        rows = self.advance(parent_slots, token_ids, valid)
        processed = process_logits(self._logits(rows[valid]), self._sampling)
        logprobs = processed.new_zeros((*token_ids.shape, processed.shape[-1]))
        logprobs[valid] = processed
        return logprobs

    @torch.no_grad()
    def advance(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        """Run one wave [R, W]; the states [R, W, H] at its nodes (those of padding say nothing)."""
        grid, cache = self._grid, self._cache
        width = token_ids.shape[1]
        start, added = cache.num_columns, grid.width * width
        depths = self._depths.gather(1, parent_slots) + 1
        own = grid.place[:, None] * width + torch.arange(width, device=token_ids.device)  # [R, W] column in the wave
        seen = self._seen.gather(1, parent_slots[..., None].expand(-1, -1, start))
        seen = torch.cat([seen, torch.nn.functional.one_hot(own, added).bool()], dim=-1)

        visible = grid.scatter(seen).reshape(cache.num_rows, added, start + added)
        visible[:, :, start:] |= torch.eye(added, dtype=torch.bool, device=visible.device)
        tokens = grid.scatter(token_ids * valid).reshape(cache.num_rows, added)
        positions = grid.scatter(self._anchors[:, None] + depths).reshape(cache.num_rows, added)
        features = None
        if self._recurrent:
            above = self._states.gather(1, parent_slots[..., None].expand(-1, -1, self._states.shape[-1]))
            features = grid.scatter(above).reshape(cache.num_rows, added, -1)
        hidden = cache.append(tokens, positions, visible, features)

        self._depths = torch.cat([self._depths, depths], dim=1)
        self.columns = torch.cat([self.columns, start + own], dim=1)
        self._seen = torch.cat([torch.nn.functional.pad(self._seen, (0, added)), seen], dim=1)
        rows = grid.gather(hidden.reshape(cache.num_rows, grid.width, width, -1))
        if self._recurrent:
            self._states = torch.cat([self._states, rows], dim=1)
        return rows

    def keep(self, contexts: Tensor) -> None:
        """Go on with these contexts [R] (bool) alone; the cache stays as it is."""
        self._grid = Grid(self._grid.rows[contexts], self._cache.num_rows)
        self.root_tokens, self._anchors = self.root_tokens[contexts], self._anchors[contexts]
        self._states, self._depths = self._states[contexts], self._depths[contexts]
        self.columns, self._seen = self.columns[contexts], self._seen[contexts]


def open_session(
    model: CausalModel, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling,
    logits: Logits | None = None,
) -> CacheSession:  # fmt: skip
    """Prefill S sequences (1-D ids) once, up to their last anchor, and stand at R contexts: position anchors[r] of
    sequences[tree_sequence[r]]."""
    cut = prefixes(sequences, tree_sequence, anchors)
    cache = TreeCache(model, len(sequences))
    hidden = cache.extend(cut)
    rows, places = tree_sequence.to(model.device), anchors.to(model.device)
    tokens = torch.stack([cut[s][a] for s, a in zip(tree_sequence.tolist(), anchors.tolist(), strict=True)])
    return CacheSession(cache, hidden[rows, places], tokens, rows, places, sampling, logits)


def prefixes(sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor) -> list[Tensor]:
    """Each sequence up to and including its last anchor: what lies behind it no tree ever sees."""
    ends = torch.zeros(len(sequences), dtype=torch.int64)
    ends.scatter_reduce_(0, tree_sequence.cpu(), anchors.cpu() + 1, "amax")
    return [sequence[:end] for sequence, end in zip(sequences, ends.tolist(), strict=True)]
