"""What a drafter is to the decode loop, the training loop, collect and eval: three kinds, one interface.

`causal.py`: a smaller causal LM; `eagle/`: an EAGLE-3 head; `block/`: a block drafter (DFlash form). The last two read
features, outputs of some of the target's layers, and may know a part of the target's vocabulary only.

Shapes: S sequences, L tokens of the longest, R trees, P rows of tree nodes, T token rows, Q node rows, D draft
vocabulary, V target vocabulary, H the drafter's hidden size, F features of one token (layers x the target's hidden).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from exittrain.build.base import DraftSession
from exittrain.drafters.calibration import Calibration
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.loading import Match
from exittrain.tree.batch import TreeBatch

SCHEMA_VERSION = 1
DRAFTER_FILE = "exittrain.json"


@dataclass(frozen=True)
class Dials:
    """How heads lay out their token rows in training.

    EAGLE: unroll_steps of training-time test, the k-th weighted unroll_decay^k (EAGLE-3, arXiv 2503.01840). Block:
    block_anchors blocks a sequence, position k of a block weighted exp(-(k - 1) / block_decay) (DFlash, 2602.06036).
    """

    unroll_steps: int = 3
    unroll_decay: float = 0.8
    block_anchors: int = 16
    block_decay: float = 4.0


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """One micro-batch as the drafter gets it.

    sequences: S 1-D ids; trained: as long each, bool, True where the token is a trained response token; features
    [S, L, F] of the target along the sequences (None where `Drafter.feature_layers` is empty); tree r grows from
    anchors[r] of sequences[tree_sequence[r]]; places [P]: flat index (tree * M + node), ascending, of the nodes of
    `trees` whose distributions are wanted (trees None: none are). generators: one a sequence, for drafters that choose
    places to train at (so that a sequence's places depend on no neighbour and no rank). first_step: along the text an
    EAGLE head takes the first of its steps alone, whatever its dials say.
    """

    sequences: Sequence[Tensor]
    trained: Sequence[Tensor]
    features: Tensor | None = None
    trees: TreeBatch | None = None
    tree_sequence: Tensor | None = None
    anchors: Tensor | None = None
    places: Tensor | None = None
    generators: Sequence[torch.Generator] | None = None
    first_step: bool = False


@dataclass(frozen=True, eq=False)
class Layout:
    """What one training forward runs, and what its rows are for. Everything on the drafter's device.

    inputs: the drafter's own; target_rows [T]: sequence and position [T, 2] of the token after which the target's next
    token is what the token row shall predict, in ascending order; labels [T]: the text's token there; weights [T]
    float32 or None (all one); node_rows [P]: which node state predicts after each wanted node (a block drafter predicts
    all nodes of one depth by one state).
    """

    inputs: Any
    target_rows: Tensor
    labels: Tensor
    weights: Tensor | None
    node_rows: Tensor


class DraftState(Protocol):
    """The drafter's side of decoding for B rows. A round: `session`, build a tree, verify, `advance`."""

    def session(self, sampling: Sampling) -> DraftSession:
        """Look ahead from the end of every row; greedy serving ranks by plain probabilities."""
        ...

    def advance(self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """What each row committed: tokens[b] are the accepted path's and the bonus token; slots[b] the session's slots
        of the path's nodes (-1: never expanded); features [B, W, F] of the target at the old root and at the path's
        nodes, the row's first len(tokens[b]) count: features[b, i] is that of the token before tokens[b][i]."""
        ...

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows [B'] (indices, in this order), as finished ones leave the batch."""
        ...


class Drafter(ABC):
    """kind: "layers", "causal_lm", "eagle3" or "block"; name: for messages and tables.

    module: what is trained and saved; tokenizer: or None. calibration: what its folder says about trees and verifiers,
    read when loaded, not written by `save`. match: how the weights it was loaded from fitted, or None. frozen: with an
    adapter (adapter.py) the parameters that stay frozen without it, else None.
    vocab_size: V, the target's; draft_ids: [D] int64 ascending, the ids it can draft (None: all); feature_layers: the
    target's layers it reads, as indices of Hugging Face's `hidden_states` (0 would be the embeddings); max_depth: the
    deepest level its trees may have (None: any).
    Parameters that require no gradient (embeddings shared with the target) stay as they are in training.
    """

    kind: str
    name: str
    module: nn.Module
    tokenizer: Any
    vocab_size: int
    max_positions: int
    draft_ids: Tensor | None = None
    feature_layers: tuple[int, ...] = ()
    max_depth: int | None = None
    target_fingerprint: str | None = None
    calibration: Calibration | None = None
    match: Match | None = None
    frozen: tuple[str, ...] | None = None
    dials: Dials = Dials()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def frozen_names(self) -> tuple[str, ...]:
        """Names of the parameters that training of the whole drafter would leave as they are."""
        if self.frozen is not None:
            return self.frozen
        return tuple(sorted(name for name, p in self.module.named_parameters() if not p.requires_grad))

    def logits(self, states: Tensor) -> Tensor:
        """Raw logits [..., V] float32 of states [..., H]; -inf for tokens it cannot draft."""
        logits = self.head(states)
        if self.draft_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return full.index_copy(-1, self.draft_ids, logits)

    def check_depth(self, depth: int) -> None:
        """Raise InputError where trees of this many levels are deeper than it can draft."""
        if self.max_depth is not None and depth > self.max_depth:
            raise InputError(
                f"tree depth {depth} is beyond the {self.max_depth} tokens that {self.name} drafts: "
                f"set the tree depth to at most {self.max_depth}"
            )

    def write_note(self, folder: Path) -> None:
        """exittrain.json: what no server reads, and `load_drafter` needs."""
        note = {
            "schema_version": SCHEMA_VERSION, "kind": self.kind, "target_fingerprint": self.target_fingerprint,
            "frozen": list(self.frozen_names()),
        }  # fmt: skip
        (folder / DRAFTER_FILE).write_text(json.dumps(note, indent=2, sort_keys=True) + "\n")

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 (hex) of config and weights as they are now."""

    @abstractmethod
    def head(self, states: Tensor) -> Tensor:
        """Raw logits [..., D] float32 of states [..., H], column i for token draft_ids[i]; differentiable."""

    @abstractmethod
    def session(
        self, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling
    ) -> DraftSession:
        """Look ahead from R contexts: position anchors[r] of sequences[tree_sequence[r]]. No gradient.

        Greedy serving ranks by plain probabilities (`Sampling.for_drafting`).
        """

    @abstractmethod
    def start(self, prompts: Sequence[Tensor], features: Tensor | None) -> DraftState:
        """Read B prompts. features [B, W, F]: the target's along each prompt's tokens, the last one's left out,
        right-padded; None where `feature_layers` is empty.

        Raises InputError for a prompt that is too short to draft from.
        """

    @abstractmethod
    def lay_out(self, inputs: TrainingInputs) -> Layout:
        """Arrange one micro-batch. Nothing is run; sequences without a trained token give no token rows."""

    @abstractmethod
    def states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """(token states [T, H], node states [Q, H]), differentiable; every trained parameter takes part, if by zero."""

    @abstractmethod
    def save(self, folder: str | Path) -> Path:
        """Write the drafter's folder, whole or not at all. Loading it back gives bit-equal logits."""
