"""What a verifier is: the rule that turns (tree, probabilities, randomness) into a path and one bonus token.

Shapes: B trees, N drafted nodes, M = N+1 nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from exittrain.law.sampling import Sampling
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree


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


BlockLaw = dict[tuple[int, ...], float]  # (accepted tokens..., bonus token) -> probability; impossible blocks left out
Generators = Sequence[torch.Generator]  # one a tree: its draws do not depend on its neighbours


class Verifier(Protocol):
    """target_probs and draft_probs are [N+1, V] array-likes: row i is the next token's distribution at node i.

    They are never written to or kept. Where the probabilities are Fractions, laws are exact Fractions too.
    """

    @property
    def name(self) -> str: ...

    def check(self, drawn: str | None) -> None:
        """Raises InputError where this verifier is not exact for trees drawn in that way."""
        ...

    def verify(
        self, tree: DraftTree, target_probs: Any, draft_probs: Any = None, generator: torch.Generator | None = None
    ) -> Verdict:
        """One draw. generator: a CPU generator; None takes torch's default one, as torch's own samplers do."""
        ...

    def block_law(self, tree: DraftTree, target_probs: Any, draft_probs: Any = None) -> BlockLaw:
        """The exact law of the emitted block given the tree."""
        ...

    def expected_block_length(self, tree: DraftTree, target_probs: Any, draft_probs: Any = None) -> float:
        """The mean of `block_law`'s lengths, bonus counted, without listing it."""
        ...

    def verify_batch(
        self,
        trees: TreeBatch,
        target_logits: Tensor,
        sampling: Sampling,
        generators: Generators,
        draft_rows: DraftRows | None = None,
    ) -> BatchVerdict:
        """One draw a tree from raw target_logits [B, M, V] at the serving settings; at temperature 0 none is drawn.

        draft_rows: what the children were drawn from; fixed verifiers never look at it, sampled ones need it.
        """
        ...

    def exit_probabilities(
        self, trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows | None = None
    ) -> Tensor:
        """[B, M] float64: the probability, given the tree, that the accepted path ends at each node (0 where padded).

        The batched, conditional form of `block_law`: (exits * (depths + 1)).sum(1) is the expected block length.
        """
        ...


def expected_block_lengths(exits: Tensor, trees: TreeBatch) -> Tensor:
    """[B] float64 from `Verifier.exit_probabilities`: the mean depth of the exit, and the bonus token."""
    return (exits * (trees.depths + 1)).sum(1)
