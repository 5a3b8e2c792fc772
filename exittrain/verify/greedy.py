"""`greedy`: temperature 0, follow the target's argmax (math.md section 3; there every exact verifier is this one)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.probabilities import Rows
from exittrain.law.sampling import Sampling
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.verify.base import BatchVerdict, Generators
from exittrain.verify.predraw import Predraw
from exittrain.verify.tev import Tev


class Greedy(Predraw):
    """Predraw where every draw is certain. Raises InputError when a target row is not one token at probability 1."""

    name = "greedy"

    def check_rows(self, rows: Rows) -> None:
        open_rows = np.flatnonzero((rows > 0).sum(axis=1) != 1)
        if open_rows.size:
            raise InputError(
                f"greedy needs one-hot target_probs (temperature 0), and node {open_rows[0]} has more than one likely "
                "token; use tev, predraw or residual"
            )

    def verify_batch(
        self,
        trees: TreeBatch,
        target_logits: Tensor,
        sampling: Sampling,
        generators: Generators,
        draft_rows: DraftRows | None = None,
    ) -> BatchVerdict:
        """Raises InputError unless sampling.temperature is 0."""
        _check_greedy(sampling)
        return Tev().verify_batch(trees, target_logits, sampling, generators)

    def exit_probabilities(
        self, trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows | None = None
    ) -> Tensor:
        """Raises InputError unless sampling.temperature is 0."""
        _check_greedy(sampling)
        return super().exit_probabilities(trees, target_logits, sampling)


def _check_greedy(sampling: Sampling) -> None:
    if not sampling.greedy:
        raise InputError(f"greedy needs temperature 0, not {sampling.temperature}; use tev, predraw or residual")
