"""The EAGLE-3 drafter: a head of one or few layers over the target's own features (arXiv 2503.01840).

A context of tokens x_0 .. x_a stands in the head's cache as rows 0 .. a - 1: row t - 1 has read token x_t beside the
target's features of position t - 1, at position t - 1.

Shapes: S sequences, L tokens of the longest, R contexts, B rows of decoding, W new tokens of a row, F features of one
token, H the head's hidden size, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from exittrain.drafters.base import Drafter, Layout, TrainingInputs
from exittrain.drafters.calibration import Calibration
from exittrain.drafters.eagle import unroll
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.formats import write_head
from exittrain.drafters.heads import HeadIdentity
from exittrain.drafters.vocabulary import check_draft_ids
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.cache import TreeCache
from exittrain.models.folders import atomic_folder
from exittrain.models.loading import Match, quiet_transformers
from exittrain.models.session import CacheSession, prefixes
from exittrain.models.target import TargetModel


class EagleDrafter(Drafter):
    """A drafter around an EagleNetwork for `target`, on its device.

    draft_ids: [D] ascending; None: the head has a column for every token. name: for messages and tables.
    Raises InputError where the head was made for another vocabulary, hidden size or number of layers.
    """

    def __init__(
        self,
        network: EagleNetwork,
        target: TargetModel,
        draft_ids: Tensor | None = None,
        name: str | None = None,
        calibration: Calibration | None = None,
        match: Match | None = None,
    ) -> None:
        config = network.config
        self.kind, self.name = "eagle3", name or f"{target.name}-eagle3"
        for what, ours, theirs in (
            ("vocabulary", config.vocab_size, target.vocab_size),
            ("hidden states", config.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise InputError(f"{self.name} is made for {what} of size {ours}; {target.name} has {theirs}")
        check_draft_ids(draft_ids, config.draft_vocab_size, config.vocab_size, self.name)
        self.network = self.module = network.to(target.device)
        self.tokenizer, self.vocab_size = target.tokenizer, target.vocab_size
        self.max_positions = min(config.max_positions, target.max_positions)
        pruned = config.draft_vocab_size < config.vocab_size
        self.draft_ids = draft_ids.to(target.device) if draft_ids is not None and pruned else None
        self.feature_layers = config.feature_layers
        self.target_fingerprint = target.fingerprint()
        self.calibration, self.match = calibration, match
        self._target_name, self._target_states = target.name, target.states(config.feature_layers)
        self._identity = HeadIdentity(config, network, self.draft_ids)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def fingerprint(self) -> str:
        """As `Drafter.fingerprint`; the target's embeddings are no part of it."""
        return self._identity()

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
        features = [self._target_states.of(s)[1][:end] for s, end in zip(sequences, ends, strict=True)]
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
        """As `Drafter.lay_out`: `Dials.unroll_steps` rows for every trained token that has as many tokens before it.

        Raises InputError for a tree at anchor 0.
        """
        return unroll.lay_out(inputs, self.dials, self.device)

    def states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """As `Drafter.states`."""
        return unroll.states(self.network, layout.inputs)

    def save(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors as vLLM's speculators has them, the target's tokenizer and
        exittrain.json, whole or not at all. Loading it back gives bit-equal logits."""
        with atomic_folder(Path(folder)) as temporary, quiet_transformers():
            write_head(temporary, self.network.config, self.network.state_dict(), self.draft_ids, self._target_name)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            self.write_note(temporary)
        return Path(folder)


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
