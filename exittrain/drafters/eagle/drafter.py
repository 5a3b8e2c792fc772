"""The EAGLE-3 drafter: a head of one or few layers over the target's own features (arXiv 2503.01840).

A context of tokens x_0 .. x_a stands in the head's cache as rows 0 .. a - 1: row t - 1 has read token x_t beside the
target's features of position t - 1, at position t - 1.

Shapes: S sequences, L tokens of the longest, R contexts, B rows of decoding, W new tokens of a row, F features of one
token, H the head's hidden size, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exittrain.drafters.base import Layout, TrainingInputs
from exittrain.drafters.eagle import unroll
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.heads import HeadDrafter
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.cache import TreeCache
from exittrain.models.session import CacheSession, prefixes


class EagleDrafter(HeadDrafter):
    """A drafter around an EagleNetwork (`HeadDrafter`)."""

    network: EagleNetwork

    def head(self, states: Tensor) -> Tensor:
        """As `Drafter.head`."""
        return self.network.head(states)

    @torch.no_grad()
    def session(
        self, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling
    ) -> CacheSession:
        """As `Drafter.session`. Raises InputError for a context of one token."""
        if bool((anchors < 1).any()):
            raise InputError(f"a context of one token: {unroll.TOO_SHORT}")
        cut = prefixes(sequences, tree_sequence, anchors)
        ends = [max(len(prefix) - 1, 0) for prefix in cut]
        along = self.target.states(self.feature_layers)
        features = [along.of(s)[1][:end] for s, end in zip(sequences, ends, strict=True)]
        cache = TreeCache(self.network, len(sequences))
        padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        states = cache.extend([prefix[1:] for prefix in cut], self.network.fuse(padded))
        rows, places = tree_sequence.to(self.device), anchors.to(self.device) - 1
        tokens = torch.stack([cut[s][a] for s, a in zip(tree_sequence.tolist(), anchors.tolist(), strict=True)])
        return CacheSession(
            cache, states[rows, places], tokens, rows, places, sampling.for_drafting(), self.logits, recurrent=True
        )

    def start(self, prompts: Sequence[Tensor], features: Tensor | None) -> EagleState:
        """As `Drafter.start`."""
        if features is None:
            raise InputError(f"a prompt of one token: {unroll.TOO_SHORT}")  # before its last token there is nothing
        return EagleState(self, prompts, features)

    def lay_out(self, inputs: TrainingInputs) -> Layout:
        """As `Drafter.lay_out`: `Dials.unroll_steps` rows (one with `first_step`) for every trained token that has as
        many tokens before it.

        Raises InputError for a tree at anchor 0.
        """
        return unroll.lay_out(inputs, self.dials, self.device)

    def states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """As `Drafter.states`."""
        return unroll.states(self.network, layout.inputs)


class EagleState:
    """Implements DraftState: a cache of rows that were all read beside true features.

    What a round drafted was read beside the head's own states, so all of it is dropped, accepted or not; the committed
    tokens are read again beside the features that the target's scoring of the tree has brought.
    """

    def __init__(self, drafter: EagleDrafter, prompts: Sequence[Tensor], features: Tensor) -> None:
        """features [B, W, F] of each prompt's tokens but the last. Raises InputError for a prompt of one token."""
        shortest = min(range(len(prompts)), key=lambda row: len(prompts[row]))
        if len(prompts[shortest]) < 2:
            raise InputError(f"prompt {shortest} has {len(prompts[shortest])} token: {unroll.TOO_SHORT}")
        network = drafter.network
        self._network, self._logits = network, drafter.logits
        self._cache = TreeCache(network, len(prompts))
        self._states = torch.zeros((len(prompts), network.hidden_size), dtype=network.dtype, device=network.device)
        self._last_tokens = torch.zeros(len(prompts), dtype=torch.int64, device=network.device)
        self._pending, self._features = [prompt[1:] for prompt in prompts], features
        self._read()

    @property
    def lengths(self) -> Tensor:
        """[B] rows of the cache: one less than the tokens of each context that were read."""
        return self._cache.lengths

    def session(self, sampling: Sampling) -> CacheSession:
        """Look ahead from the end of every row; greedy serving ranks by plain probabilities."""
        self._read()
        rows = torch.arange(self._cache.num_rows, device=self._network.device)
        return CacheSession(
            self._cache, self._states, self._last_tokens, rows, self.lengths - 1, sampling.for_drafting(),
            self._logits, recurrent=True,
        )  # fmt: skip

    def advance(self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """As `DraftState.advance`: the features of the token before each are what the head reads beside it."""
        if features is None:
            raise ValueError("an EAGLE head reads the target's features of what was committed")
        self._cache.rollback()
        self._pending, self._features = [torch.tensor(row) for row in tokens], features

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows [B'] (indices, in this order), as finished ones leave the batch."""
        self._pending = [self._pending[row] for row in rows.tolist()]
        self._features = self._features[rows.to(self._features.device)]
        rows = rows.to(self._network.device)
        self._cache.select_rows(rows)
        self._states, self._last_tokens = self._states[rows], self._last_tokens[rows]

    @torch.no_grad()
    def _read(self) -> None:
        """Read the pending tokens beside their features; a row without any stays as it stands."""
        counts = [len(tokens) for tokens in self._pending]
        states = self._cache.extend(self._pending, self._network.fuse(self._features[:, : max(counts)]))
        for row, (tokens, count) in enumerate(zip(self._pending, counts, strict=True)):
            if count:
                self._states[row], self._last_tokens[row] = states[row, count - 1], tokens[-1]
        self._pending = [tokens[:0] for tokens in self._pending]
