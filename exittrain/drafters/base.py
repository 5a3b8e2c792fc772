"""The causal drafter: any smaller causal LM with the target's vocabulary.

Shapes: S sequences, R trees or contexts, L packed columns, W nodes of a wave, D path, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from exittrain.drafters.calibration import Calibration
from exittrain.law.sampling import Sampling
from exittrain.models.cache import TreeCache, pad_paths
from exittrain.models.causal import CausalModel
from exittrain.models.folders import atomic_folder
from exittrain.models.loading import quiet_transformers
from exittrain.models.packed import PackedBatch
from exittrain.models.session import CacheSession, open_session

SCHEMA_VERSION = 1
DRAFTER_FILE = "exittrain.json"


class Drafter:
    """A drafter around a CausalModel. kind: "layers" (copied from the target) or "causal_lm".

    Parameters that require no gradient (embeddings shared with the target) stay as they are in training.
    calibration: what its folder says about trees and verifiers; read when loaded, not written by `save`.
    frozen: with an adapter (adapter.py) the parameters that stay frozen without it, else None.
    """

    def __init__(
        self,
        model: CausalModel,
        kind: str = "causal_lm",
        target_fingerprint: str | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.model = model
        self.kind = kind
        self.target_fingerprint = target_fingerprint
        self.calibration = calibration
        self.frozen: tuple[str, ...] | None = None

    def fingerprint(self) -> str:
        """sha256 (hex) of config and weights as they are now."""
        return self.model.fingerprint()

    def trainable_parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for parameter in self.model.module.parameters() if parameter.requires_grad)

    def frozen_names(self) -> tuple[str, ...]:
        """Names of the parameters that training of the whole drafter would leave as they are."""
        if self.frozen is not None:
            return self.frozen
        return tuple(sorted(name for name, p in self.model.module.named_parameters() if not p.requires_grad))

    def tree_hidden(self, packed: PackedBatch) -> Tensor:
        """Hidden states [S, L, H] of a packed batch; differentiable. `packed.gather` picks the nodes' [R, M, H]."""
        return self.model.hidden(packed.input_ids, packed.position_ids, packed.mask)

    def head(self, hidden: Tensor) -> Tensor:
        """Raw logits [..., V] float32 of hidden states [..., H]; differentiable."""
        return self.model.head(hidden)

    def session(
        self, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling
    ) -> CacheSession:
        """Look ahead from R contexts: position anchors[r] of sequences[tree_sequence[r]]. No gradient.

        Greedy serving ranks by plain probabilities (`Sampling.for_drafting`).
        """
        return open_session(self.model, sequences, tree_sequence, anchors, sampling.for_drafting())

    def start(self, num_rows: int) -> DraftState:
        """An empty decoding state of B rows."""
        return DraftState(self.model, num_rows)

    def save(self, folder: str | Path) -> Path:
        """Write a plain Hugging Face folder (weights, config, tokenizer) and exittrain.json, whole or not at all.

        Loading it back gives bit-equal logits; shared embeddings are written out, so the folder stands alone. Adapters
        are merged (`adapter.merged_state`, with its bound), and the drafter trains on as it was.
        """
        note = {"schema_version": SCHEMA_VERSION, "kind": self.kind, "target_fingerprint": self.target_fingerprint}
        from exittrain.drafters.adapter import merged_state

        frozen = list(self.frozen_names())
        state = None if self.frozen is None else merged_state(self.model.module)
        with atomic_folder(Path(folder)) as temporary, quiet_transformers():
            self.model.module.save_pretrained(temporary, state_dict=state)
            if self.model.tokenizer is not None:
                self.model.tokenizer.save_pretrained(temporary)
            text = json.dumps({**note, "frozen": frozen}, indent=2, sort_keys=True)
            (temporary / DRAFTER_FILE).write_text(text + "\n")
        return Path(folder)


class DraftState:
    """The drafter's side of decoding for B rows: feed what was committed, look ahead, keep the accepted path.

    A round: `extend` each row by the committed tokens it has not seen (`lengths` says how many it has), `session`,
    build a tree, verify, `commit` the accepted path.
    """

    def __init__(self, model: CausalModel, num_rows: int) -> None:
        self._cache = TreeCache(model, num_rows)
        self._hidden = torch.zeros((num_rows, model.hidden_size), dtype=model.dtype, device=model.device)
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
        self._session: CacheSession | None = None

    @property
    def lengths(self) -> Tensor:
        """[B] context tokens seen so far."""
        return self._cache.lengths

    def extend(self, rows: Sequence[Tensor]) -> None:
        """Append each row's next committed tokens (1-D ids; none leaves the row as it stands)."""
        hidden = self._cache.extend(rows)
        for row, tokens in enumerate(rows):
            if len(tokens):
                self._hidden[row], self._last_tokens[row] = hidden[row, len(tokens) - 1], tokens[-1]

    def session(self, sampling: Sampling) -> CacheSession:
        """Look ahead from the end of every row; greedy serving ranks by plain probabilities."""
        rows = torch.arange(self._cache.num_rows, device=self._cache.model.device)
        self._session = CacheSession(
            self._cache, self._hidden, self._last_tokens, rows, self.lengths - 1, sampling.for_drafting()
        )
        return self._session

    def commit(self, slots: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Keep the accepted path: the session's slots of its nodes, depth 1 first, per row (or [B, D], -1 padded).

        A node that was never expanded (slot -1) is not in the cache: the path is kept up to it. Returns how many of
        each row's nodes were kept [B]; the other tokens go through `extend`.
        """
        columns = torch.as_tensor(slots) if isinstance(slots, Tensor) else pad_paths(slots, self.lengths.device)
        columns = columns.to(self.lengths.device)
        kept = (columns >= 0).to(torch.int64).cumprod(1)
        if self._session is None:
            raise RuntimeError("commit follows a session")
        picked = self._session.columns.gather(1, columns.clamp(min=0))
        self._cache.commit(torch.where(kept > 0, picked, -1))
        self._session = None
        return kept.sum(1)

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows [B'] (indices, in this order), as finished ones leave the batch."""
        rows = rows.to(self._hidden.device)
        self._cache.select_rows(rows)
        self._hidden, self._last_tokens, self._session = self._hidden[rows], self._last_tokens[rows], None
