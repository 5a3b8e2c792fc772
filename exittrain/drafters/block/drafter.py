"""The block drafter (DFlash, arXiv 2602.06036): all places of a block are drafted in one forward, each by its marginal.

Shapes: S sequences or rows, R contexts, L context tokens, T token rows, Q node states, H hidden, D draft vocabulary,
V target vocabulary, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from exittrain.drafters.base import Drafter, Layout, TrainingInputs
from exittrain.drafters.block.blocks import block_states
from exittrain.drafters.block.layout import Blocks, lay_out_blocks
from exittrain.drafters.block.network import BlockNetwork, KeysValues
from exittrain.drafters.block.session import BlockSession, BlockState
from exittrain.drafters.calibration import Calibration
from exittrain.drafters.formats import write_head
from exittrain.drafters.heads import HeadIdentity
from exittrain.drafters.vocabulary import check_draft_ids
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.folders import atomic_folder
from exittrain.models.loading import Match, quiet_transformers
from exittrain.models.target import TargetModel


class BlockDrafter(Drafter):
    """A block network beside the target whose features, embeddings and (full vocabulary) output head it uses.

    draft_ids: [D] ascending, for a network with a head of its own; None: it drafts all V tokens. name: for messages and
    tables. Raises InputError where the network was made for another vocabulary or hidden size.
    """

    def __init__(
        self,
        network: BlockNetwork,
        target: TargetModel,
        draft_ids: Tensor | None = None,
        name: str | None = None,
        calibration: Calibration | None = None,
        match: Match | None = None,
    ) -> None:
        config = network.config
        self.kind, self.name, self.tokenizer = "block", name or f"{target.name}-block", target.tokenizer
        for what, ours, theirs in (
            ("vocabulary", config.vocab_size, target.vocab_size),
            ("hidden states", config.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise InputError(f"{self.name} is made for {what} of size {ours}; {target.name} has {theirs}")
        check_draft_ids(draft_ids, config.draft_vocab_size, config.vocab_size, self.name)
        self.network = self.module = network.to(target.device)
        self.target, self.vocab_size = target, target.vocab_size
        self.draft_ids = draft_ids.to(target.device) if draft_ids is not None and network.pruned else None
        self.feature_layers, self.max_depth = config.feature_layers, network.block_size - 1
        self.max_positions = min(config.max_positions, target.max_positions)
        self.target_fingerprint, self.calibration, self.match = target.fingerprint(), calibration, match
        self._identity = HeadIdentity(config, network, self.draft_ids)

    def fingerprint(self) -> str:
        """sha256 (hex) of config and own weights as they are now."""
        return self._identity()

    def head(self, states: Tensor) -> Tensor:
        """Raw logits [..., D] float32 of states [..., H]; differentiable."""
        if self.draft_ids is None:
            return self.target.head(states.to(self.target.dtype))
        logits: Tensor = self.network.lm_head(states)
        return logits.float()

    @torch.no_grad()
    def session(
        self, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling
    ) -> BlockSession:
        """As `Drafter.session`: one forward of R blocks."""
        features = self.target.states(self.feature_layers).batch(sequences)[1]
        context = self._context(features[:, : max(1, int(anchors.max()))])  # scaled rotations ask for some position
        pairs = zip(tree_sequence.tolist(), anchors.tolist(), strict=True)
        roots = torch.stack([sequences[s][a] for s, a in pairs])
        return self.look_ahead(
            context, tree_sequence.to(self.device), anchors.to(self.device), roots.to(self.device), sampling
        )

    @torch.no_grad()
    def look_ahead(
        self, context: Sequence[KeysValues], rows: Tensor, anchors: Tensor, roots: Tensor, sampling: Sampling
    ) -> BlockSession:
        """A session at R contexts given as keys and values; the rest as `block_states`."""
        states = self._block_states(context, rows, anchors, roots)
        return BlockSession(states[:, 1:], roots, self.logits, sampling.for_drafting())

    def start(self, prompts: Sequence[Tensor], features: Tensor | None) -> BlockState:
        """As `Drafter.start`."""
        return BlockState(self, prompts, features)

    def lay_out(self, inputs: TrainingInputs) -> Layout:
        """As `Drafter.lay_out`: blocks at drawn anchors for token rows, at the trees' anchors for node rows."""
        return lay_out_blocks(inputs, self.dials, self.network.block_size, self.device)

    def states(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """As `Drafter.states`: one forward over all blocks."""
        blocks: Blocks = layout.inputs
        states = self._block_states(self._context(blocks.features), blocks.rows, blocks.anchors, blocks.roots)
        states = states.flatten(0, 1)
        return states[blocks.token_places], states[blocks.node_places]

    def save(self, folder: str | Path) -> Path:
        """Write a speculators folder (config, weights), the tokenizer and exittrain.json, whole or not at all.

        Loading it back gives bit-equal logits.
        """
        with atomic_folder(Path(folder)) as temporary, quiet_transformers():
            write_head(temporary, self.network.config, self.network.state_dict(), self.draft_ids, self.target.name)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            self.write_note(temporary)
        return Path(folder)

    def _context(self, features: Tensor) -> list[KeysValues]:
        """Keys and values of whole sequences, from features [S, L, F]."""
        positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        return self.network.context(features, positions)

    def _block_states(self, context: Sequence[KeysValues], rows: Tensor, anchors: Tensor, roots: Tensor) -> Tensor:
        embeddings = self.target.embeddings.weight.detach()
        return block_states(self.network, embeddings, context, rows, anchors, roots)
