"""The causal drafter: any smaller causal LM with the target's tokenizer.

Shapes: S sequences, R trees or contexts, L packed columns, T token rows, Q node rows, H hidden, V target vocabulary,
D the part of it that can be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exittrain.drafters.base import Drafter, Layout, TrainingInputs
from exittrain.drafters.calibration import Calibration
from exittrain.law.sampling import Sampling
from exittrain.models.cache import TreeCache, pad_paths
from exittrain.models.causal import CausalModel
from exittrain.models.folders import atomic_folder
from exittrain.models.loading import quiet_transformers
from exittrain.models.packed import PackedBatch, pack, pack_plain
from exittrain.models.session import CacheSession, open_session


class CausalDrafter(Drafter):
    """A drafter around a CausalModel. kind: "layers" (copied from the target) or "causal_lm".

    vocab_size: the target's, by default the model's own; draft_ids: the first D ids, where further columns of either
    are padding (`vocabulary.shared_size`).
    """

    def __init__(
        self,
        model: CausalModel,
        kind: str = "causal_lm",
        target_fingerprint: str | None = None,
        calibration: Calibration | None = None,
        vocab_size: int | None = None,
        draft_ids: Tensor | None = None,
    ) -> None:
        self.model, self.module = model, model.module
        self.kind, self.name, self.tokenizer = kind, model.name, model.tokenizer
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.draft_ids, self.max_positions, self.match = draft_ids, model.max_positions, model.match
        self.target_fingerprint = target_fingerprint
        self.calibration = calibration

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def fingerprint(self) -> str:
        """sha256 (hex) of config and weights as they are now."""
        return self.model.fingerprint()

    def head(self, states: Tensor) -> Tensor:
        """Raw logits [..., D] float32 of states [..., H]; differentiable."""
        logits = self.model.head(states)
        return logits if self.draft_ids is None else logits[..., : len(self.draft_ids)]

    def session(
        self, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling
    ) -> CacheSession:
        """As `Drafter.session`."""
        return open_session(self.model, sequences, tree_sequence, anchors, sampling.for_drafting(), self.logits)

    def start(self, prompts: Sequence[Tensor], features: Tensor | None = None) -> CausalState:
        """As `Drafter.start`; a model reads tokens alone."""
        return CausalState(self, prompts)

    def lay_out(self, inputs: TrainingInputs) -> Layout:
        """As `Drafter.lay_out`: one packed row a sequence, its trees behind it (math.md section 7)."""
        if inputs.trees is None or inputs.tree_sequence is None or inputs.anchors is None or inputs.places is None:
            packed = pack_plain(inputs.sequences).to(self.device)
            node_places = torch.zeros(0, dtype=torch.int64, device=self.device)
        else:
            packed = pack(inputs.sequences, inputs.trees, inputs.tree_sequence, inputs.anchors, self.dtype)
            packed = packed.to(self.device)
            columns = packed.tree_sequence[:, None] * packed.input_ids.shape[1] + packed.columns
            node_places = columns.flatten()[inputs.places.to(self.device)]
        trained = torch.nn.utils.rnn.pad_sequence(list(inputs.trained), batch_first=True)
        target_rows = trained[:, 1:].nonzero().to(self.device)
        row, column = target_rows.unbind(1)
        token_places = row * packed.input_ids.shape[1] + column
        node_rows = torch.arange(len(node_places), device=self.device)
        forward = PackedRows(packed, token_places, node_places)
        return Layout(forward, target_rows, packed.input_ids[row, column + 1], None, node_rows)

    def states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """As `Drafter.states`."""
        rows: PackedRows = layout.inputs
        packed = rows.packed
        hidden = self.model.hidden(packed.input_ids, packed.position_ids, packed.mask).flatten(0, 1)
        return hidden[rows.token_places], hidden[rows.node_places]

    def save(self, folder: str | Path) -> Path:
        """Write a plain Hugging Face folder (weights, config, tokenizer) and exittrain.json, whole or not at all.

        Loading it back gives bit-equal logits; shared embeddings are written out, so the folder stands alone. Adapters
        are merged (`adapter.merged_state`, with its bound), and the drafter trains on as it was.
        """
        from exittrain.drafters.adapter import merged_state

        state = None if self.frozen is None else merged_state(self.module)
        with atomic_folder(Path(folder)) as temporary, quiet_transformers():
            self.model.module.save_pretrained(temporary, state_dict=state)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            self.write_note(temporary)
        return Path(folder)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A packed batch, and the flat places (row * L + column) of its token rows [T] and node rows [Q]."""

    packed: PackedBatch
    token_places: Tensor
    node_places: Tensor


class CausalState:
    """Implements DraftState: what the model has read of each row, in a cache that keeps the accepted path."""

    def __init__(self, drafter: CausalDrafter, prompts: Sequence[Tensor]) -> None:
        model = drafter.model
        self._cache, self._logits = TreeCache(model, len(prompts)), drafter.logits
        self._hidden = torch.zeros((len(prompts), model.hidden_size), dtype=model.dtype, device=model.device)
        self._last_tokens = torch.zeros(len(prompts), dtype=torch.int64, device=model.device)
        self._session: CacheSession | None = None
        self._extend([prompt[:-1] for prompt in prompts])
        self._unread = [prompt[-1:] for prompt in prompts]

    @property
    def lengths(self) -> Tensor:
        """[B] context tokens read so far."""
        return self._cache.lengths

    def session(self, sampling: Sampling) -> CacheSession:
        """Look ahead from the end of every row; greedy serving ranks by plain probabilities."""
        self._extend(self._unread)
        self._unread = [tokens[:0] for tokens in self._unread]
        rows = torch.arange(self._cache.num_rows, device=self._cache.model.device)
        self._session = CacheSession(
            self._cache, self._hidden, self._last_tokens, rows, self.lengths - 1, sampling.for_drafting(), self._logits
        )
        return self._session

    def advance(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], features: Tensor | None = None
    ) -> None:
        """As `DraftState.advance`: the path's nodes are in the cache already, but for those that were never expanded;
        they and the bonus token are read before the next session."""
        if self._session is None:
            raise RuntimeError("advance follows a session")
        columns = pad_paths(slots, self.lengths.device)
        kept = (columns >= 0).to(torch.int64).cumprod(1)
        picked = self._session.columns.gather(1, columns.clamp(min=0))
        self._cache.commit(torch.where(kept > 0, picked, -1))
        self._session = None
        read = kept.sum(1).tolist()
        self._unread = [torch.tensor(row[count:]) for row, count in zip(tokens, read, strict=True)]

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows [B'] (indices, in this order), as finished ones leave the batch."""
        self._unread = [self._unread[row] for row in rows.tolist()]
        rows = rows.to(self._hidden.device)
        self._cache.select_rows(rows)
        self._hidden, self._last_tokens, self._session = self._hidden[rows], self._last_tokens[rows], None

    def _extend(self, rows: Sequence[Tensor]) -> None:
        """Append each row's next committed tokens (1-D ids; none leaves the row as it stands)."""
        hidden = self._cache.extend(rows)
        for row, tokens in enumerate(rows):
            if len(tokens):
                self._hidden[row], self._last_tokens[row] = hidden[row, len(tokens) - 1], tokens[-1]
