"""The block drafter (DFlash, arXiv 2602.06036): all places of a block are drafted in one forward, each by its marginal.

Shapes: S sequences or rows, R contexts, L context tokens, T token rows, Q node states, H hidden, D draft vocabulary,
V target vocabulary, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exittrain.drafters.base import Layout, TrainingInputs
from exittrain.drafters.block.blocks import block_states
from exittrain.drafters.block.layout import Blocks, lay_out_blocks
from exittrain.drafters.block.network import BlockNetwork, KeysValues
from exittrain.drafters.block.session import BlockSession, BlockState
from exittrain.drafters.heads import HeadDrafter
from exittrain.law.sampling import Sampling


class BlockDrafter(HeadDrafter):
    """A block network (`HeadDrafter`); one that drafts the full vocabulary uses the target's output head too."""

    network: BlockNetwork

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

    def _context(self, features: Tensor) -> list[KeysValues]:
        """Keys and values of whole sequences, from features [S, L, F]."""
        positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        return self.network.context(features, positions)

    def _block_states(self, context: Sequence[KeysValues], rows: Tensor, anchors: Tensor, roots: Tensor) -> Tensor:
        embeddings = self.target.embeddings.weight.detach()
        return block_states(self.network, embeddings, context, rows, anchors, roots)
