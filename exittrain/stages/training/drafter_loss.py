"""The drafter's loss on one micro-batch: token loss on response tokens plus a weighted node loss on draft trees.

Shapes: T token rows, U target rows, P node rows, Q node states, E edges, H hidden, Ht the target's, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from exittrain.build.base import TreeShape
from exittrain.build.registry import deepest_level
from exittrain.drafters.base import Drafter, Layout
from exittrain.law.objectives import get_objective
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.stages.training.loop import Sums
from exittrain.stages.training.losses import (
    Logits,
    RowHead,
    edge_loss_sum,
    label_loss_sum,
    mixed_kl_sum,
    pair_loss_sum,
)


@dataclass(frozen=True)
class LossSettings:
    """What an arm minimises: token_weight * L_tok + weight * L_node (math.md section 8).

    samplings: what the law and both losses are taken at, blocks of `refresh_every` steps taking turns; refresh_every:
    steps whose trees are drawn together, by the drafter as it is before the first of them; unroll_from: part of the
    steps before which an EAGLE head's token loss is of its first step alone.
    """

    objective: str = "token"
    weight: float = 1.0
    weight_warmup_ratio: float = 0.0
    token_weight: float = 1.0
    token_loss: str = "kl"
    normaliser: str = "anchors"
    anchors_per_sequence: int = 8
    refresh_every: int = 1
    unroll_from: float = 0.0
    samplings: tuple[Sampling, ...] = (Sampling(),)
    shape: TreeShape = field(default_factory=TreeShape)
    builder: str = "best_first"

    def sampling_at(self, step: int) -> Sampling:
        """What step `step` is trained at."""
        return self.samplings[step // self.refresh_every % len(self.samplings)]

    @property
    def uses_trees(self) -> bool:
        return get_objective(self.objective).on != "nothing"

    @property
    def depth_limit(self) -> int:
        """The deepest level a tree may have: leaves there reached the end, they miss nothing (math.md section 8)."""
        return deepest_level(self.builder, self.shape)


@dataclass(frozen=True, eq=False)
class NodeTargets:
    """What tree nodes are compared with; what an objective does not use is None.

    Rows: weights [P] of the nodes in `Layout.node_rows`' order, row_loss, and of the target its states hidden [P, Ht],
    or its raw logits [P, V] where they were small enough. Edges: state_of, tokens, weights [E], which node state each
    leaves.
    """

    weights: Tensor
    row_loss: str | None = None
    hidden: Tensor | None = None
    logits: Tensor | None = None
    state_of: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward's share of a step.

    num_tokens: trained tokens of its sequences, of which a head may make more or fewer weighted rows; sampling: what it
    is trained at; layout: the drafter's forward; target_of [T]: the row of token_hidden [U, Ht] that
    each token row is compared with, the target's states (None: not needed); nodes: None without trees.
    """

    sample_ids: list[str]
    num_tokens: int
    counts: Sums
    sampling: Sampling
    layout: Layout
    target_of: Tensor
    token_hidden: Tensor | None
    nodes: NodeTargets | None


class DrafterLoss(nn.Module):
    """The drafter's network with its loss on top, as DeepSpeed wants it: `forward(batch, scales)` -> (loss, sums)."""

    def __init__(self, drafter: Drafter, target: TargetModel, settings: LossSettings) -> None:
        super().__init__()
        self.network = drafter.module
        self._drafter, self._target, self._settings = drafter, target, settings

    def forward(self, batch: MicroBatch, scales: Sums) -> tuple[Tensor, dict[str, Tensor | float]]:
        """scales: what the token sum and the node sum are multiplied by.

        sums: both losses, and the squared norms of their gradients at the drafter's last hidden states, which the
        backward pass fills in.
        """
        token_states, node_states = self._drafter.states(batch.layout)
        # A zero on the whole network: a rank without any row must still reduce a gradient for every parameter.
        loss = token_states.new_zeros(()) if len(token_states) else self._drafter.head(token_states).sum() * 0.0
        sums: dict[str, Tensor | float] = {}
        parts = [("token", self._token_sum, token_states)]
        if self._settings.uses_trees:
            parts.append(("node", self._node_sum, node_states if batch.nodes else node_states[:0]))
        for name, sum_of, states in parts:
            sums[f"{name}_loss"] = sums[f"{name}_gradient"] = 0.0
            if len(states):
                if states.requires_grad:
                    states.register_hook(_keep_square(sums, f"{name}_gradient"))  # type: ignore[no-untyped-call]
                value = sum_of(batch, states)
                sums[f"{name}_loss"] = value.detach()
                loss = loss + value * scales[name]
        return loss, sums

    def _token_sum(self, batch: MicroBatch, states: Tensor) -> Tensor:
        head, layout = self._head(), batch.layout
        if batch.token_hidden is None:
            return label_loss_sum(head, states, layout.labels, Sampling(), layout.weights)
        of_target = self._target_logits(batch.token_hidden)
        return pair_loss_sum(head, states, of_target, batch.target_of, batch.sampling, layout.weights)

    def _node_sum(self, batch: MicroBatch, states: Tensor) -> Tensor:
        nodes, head, sampling, rows = batch.nodes, self._head(), batch.sampling, batch.layout.node_rows
        assert nodes is not None  # there are states
        if nodes.state_of is not None and nodes.tokens is not None:
            return edge_loss_sum(head, states, nodes.state_of, nodes.tokens, nodes.weights, sampling)
        logits, hidden = nodes.logits, nodes.hidden
        if logits is not None:
            of_target: Logits = lambda a, b: logits[a:b]  # noqa: E731
        else:
            assert hidden is not None  # one of the two is there
            of_target = self._target_logits(hidden)
        index = torch.arange(len(rows), device=rows.device)
        if nodes.row_loss == "kl" and not (len(states) == len(rows) and torch.equal(rows, index)):
            return mixed_kl_sum(head, states, of_target, rows, nodes.weights, sampling)
        assert nodes.row_loss is not None  # rows have one
        return pair_loss_sum(head, states[rows], of_target, index, sampling, nodes.weights, nodes.row_loss)

    def _head(self) -> RowHead:
        return RowHead(self._drafter.head, self._drafter.vocab_size, self._drafter.draft_ids)

    def _target_logits(self, hidden: Tensor) -> Callable[[int, int], Tensor]:
        # Autocast is for what is trained: labels are the target's in its own precision, or close calls would be ties.
        def rows(start: int, stop: int) -> Tensor:
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                return self._target.head(hidden[start:stop])

        return rows


def _keep_square(sums: dict[str, Tensor | float], name: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        sums[name] = gradient.double().square().sum()

    return hook
