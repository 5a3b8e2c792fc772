"""What a verifier is: the rule that turns (tree, probabilities, randomness) into a path and one bonus token.

Shapes: B trees, M = N+1 nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """path: indices of the accepted nodes from depth 1 down (root excluded); bonus_token: the token after the path."""

    path: tuple[int, ...]
    bonus_token: int

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def block_length(self) -> int:
        """Accepted tokens and the bonus: what every table calls block length."""
        return len(self.path) + 1


@dataclass(frozen=True, eq=False)
class BatchVerdict:
    """nodes [B]: the node each path ends at (0 = nothing accepted); bonus_tokens [B]."""

    nodes: Tensor
    bonus_tokens: Tensor


BlockLaw = dict[tuple[int, ...], float]
Generators = Sequence[torch.Generator]  # one a tree: its draws do not depend on its neighbours
