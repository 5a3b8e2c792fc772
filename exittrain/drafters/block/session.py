"""A block drafter at work: one forward a round, and every tree is built from the places' marginals (DDTree, arXiv
2604.12989).

Shapes: R contexts, S rows of decoding, W nodes of a wave, P places a block can draft, H hidden, V vocabulary, F
features of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exittrain.drafters.block.blocks import ContextCache
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits

if TYPE_CHECKING:
    from exittrain.drafters.block.drafter import BlockDrafter

LOGIT_BYTES = 64 << 20  # of float32 logits computed at once, or those of one place


class BlockSession:
    """Implements DraftSession: after a node of depth d comes the marginal of place d + 1, whatever its tokens.

    states [R, P, H]: of places 1..P; logits: states [..., H] to raw logits [..., V]. Marginals are computed when they
    are first asked for, several places at once: reading the output head costs more than a few rows of it. Raises
    InputError where a tree grows deeper than P.
    """

    def __init__(
        self, states: Tensor, root_tokens: Tensor, logits: Callable[[Tensor], Tensor], sampling: Sampling
    ) -> None:
        self.root_tokens = root_tokens
        self._states, self._logits, self._sampling = states, logits, sampling
        self._depths = torch.zeros_like(root_tokens)[:, None]  # [R, slots]
        self._marginals: list[Tensor] = []  # [R, V] each, of the first places

    def root(self) -> Tensor:
        """[R, V] processed log-probabilities of the token after each context."""
        return self._after(0)

    def expand(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        """Add a wave [R, W]; processed log-probabilities [R, W, V] of the token after each node.

        All nodes of one depth share memory (a builder's waves are of one depth): the result is to be read only.
        """
        depths = self._depths.gather(1, parent_slots) + 1
        self._depths = torch.cat([self._depths, depths], dim=1)
        used = torch.unique(depths[valid])
        if len(used) <= 1:
            only = int(used) if len(used) else 0
            return self._after(only)[:, None].expand(-1, depths.shape[1], -1)
        marginals = torch.stack([self._after(depth) for depth in used.tolist()], dim=1)
        index = torch.searchsorted(used, depths).clamp(max=len(used) - 1)
        return marginals[torch.arange(len(index), device=index.device)[:, None], index]

    @torch.no_grad()
    def _after(self, depth: int) -> Tensor:
        num_places = self._states.shape[1]
        if depth >= num_places:
            raise InputError(
                f"tree depth {depth + 1} is beyond the block drafter's {num_places} places: "
                f"set the tree depth to at most {num_places}"
            )
        while depth >= len(self._marginals):
            known = len(self._marginals)
            step = 1 if not known else max(1, LOGIT_BYTES // self._marginals[0].nbytes)
            logits = self._logits(self._states[:, known : known + step])
            self._marginals += process_logits(logits, self._sampling).unbind(1)
        return self._marginals[depth]


class BlockState:
    """Implements DraftState: the context of each row up to its root, as keys and values, and the root's token."""

    _roots: Tensor

    def __init__(self, drafter: BlockDrafter, prompts: Sequence[Tensor], features: Tensor | None) -> None:
        if not all(len(prompt) for prompt in prompts):
            raise InputError("a prompt is empty: a block drafter starts from a prompt's last token")
        self._drafter = drafter
        self._cache = ContextCache(drafter.network, len(prompts))
        self._read(features, [len(prompt) - 1 for prompt in prompts], [int(prompt[-1]) for prompt in prompts])

    @property
    def lengths(self) -> Tensor:
        """[S] tokens before each row's root."""
        return self._cache.lengths

    def session(self, sampling: Sampling) -> BlockSession:
        """As `DraftState.session`: one forward of S blocks."""
        rows = torch.arange(len(self._roots), device=self._roots.device)
        return self._drafter.look_ahead(self._cache.layers, rows, self.lengths, self._roots, sampling)

    def advance(self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """As `DraftState.advance`; of the session nothing is kept, so slots do not matter."""
        self._read(features, [len(row) for row in tokens], [row[-1] for row in tokens])

    def select_rows(self, rows: Tensor) -> None:
        """As `DraftState.select_rows`."""
        self._cache.select_rows(rows)
        self._roots = self._roots[rows.to(self._roots.device)]

    def _read(self, features: Tensor | None, counts: Sequence[int], roots: Sequence[int]) -> None:
        device = self._cache.lengths.device
        if features is None:
            assert not any(counts), "a block drafter reads the target's features"
        else:
            self._cache.append(features.to(device), torch.tensor(counts, device=device))
        self._roots = torch.tensor(roots, device=device)
