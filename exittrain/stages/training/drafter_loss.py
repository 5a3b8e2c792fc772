"""The drafter's loss on one micro-batch: token loss on response tokens plus a weighted node loss on draft trees.

Shapes: S sequences, L packed columns, T token rows, P node rows, E edges, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from exittrain.build.base import TreeShape
from exittrain.build.static import rank_paths
from exittrain.drafters.base import Drafter
from exittrain.law.objectives import get_objective
from exittrain.law.sampling import Sampling
from exittrain.models.packed import PackedBatch
from exittrain.models.target import TargetModel
from exittrain.stages.training.loop import Sums
from exittrain.stages.training.losses import edge_loss_sum, label_loss_sum, row_loss_sum
from exittrain.stages.training.scoring import Edges


@dataclass(frozen=True)
class LossSettings:
    """What an arm minimises: token_weight * L_tok + weight * L_node (math.md section 8).

    samplings: what the law and both losses are taken at, blocks of `refresh_every` steps taking turns; refresh_every:
    steps whose trees are drawn together, by the drafter as it is before the first of them.
    """

    objective: str = "token"
    weight: float = 1.0
    weight_warmup_ratio: float = 0.0
    token_weight: float = 1.0
    token_loss: str = "kl"
    normaliser: str = "anchors"
    anchors_per_sequence: int = 8
    refresh_every: int = 1
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
        if self.builder in ("best_first", "beam"):
            return self.shape.depth
        return max(map(len, rank_paths(self.shape)))


@dataclass(frozen=True, eq=False)
class NodeTargets:
    """places [P]: each node row's place among the packed columns; row_weights [P] or edge_weights [E], the other is
    None; hidden [P, Ht]: the target's states at the rows, or its raw logits [P, V] where they were small enough."""

    places: Tensor
    edges: Edges
    row_weights: Tensor | None
    row_loss: str
    edge_weights: Tensor | None
    hidden: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward's share of a step.

    sampling: what it is trained at; token_places, token_labels [T]: rows among the packed columns and the tokens they
    predict; token_hidden [T, Ht]: the target's states there (None: not needed); nodes: None without trees.
    """

    sample_ids: list[str]
    counts: Sums
    sampling: Sampling
    packed: PackedBatch
    token_places: Tensor
    token_labels: Tensor
    token_hidden: Tensor | None
    nodes: NodeTargets | None


class DrafterLoss(nn.Module):
    """The drafter's network with its loss on top, as DeepSpeed wants it: `forward(batch, scales)` -> (loss, sums)."""

    def __init__(self, drafter: Drafter, target: TargetModel, settings: LossSettings) -> None:
        super().__init__()
        self.network = drafter.module
        self._drafter, self._target, self._settings = drafter, target, settings
        self._vocab_size = drafter.vocab_size

    def forward(self, batch: MicroBatch, scales: Sums) -> tuple[Tensor, dict[str, Tensor | float]]:
        """scales: what the token sum and the node sum are multiplied by.

        sums: both losses, and the squared norms of their gradients at the drafter's last hidden states, which the
        backward pass fills in.
        """
        states = self._drafter.tree_hidden(batch.packed).flatten(0, 1)
        # A zero on the whole network: a rank without any row must still reduce a gradient for every parameter.
        loss = states.new_zeros(()) if len(batch.token_places) else self._drafter.head(states[:1]).sum() * 0.0
        sums: dict[str, Tensor | float] = {}
        parts = [("token", self._token_sum, batch.token_places)]
        if self._settings.uses_trees:
            parts.append(("node", self._node_sum, batch.nodes.places if batch.nodes else batch.token_places[:0]))
        for name, sum_of, places in parts:
            sums[f"{name}_loss"] = sums[f"{name}_gradient"] = 0.0
            if len(places):
                rows = states[places]
                if rows.requires_grad:
                    rows.register_hook(_keep_square(sums, f"{name}_gradient"))  # type: ignore[no-untyped-call]
                value = sum_of(batch, rows)
                sums[f"{name}_loss"] = value.detach()
                loss = loss + value * scales[name]
        return loss, sums

    def _token_sum(self, batch: MicroBatch, rows: Tensor) -> Tensor:
        hidden = batch.token_hidden
        if hidden is None:
            return label_loss_sum(self._drafter.head, rows, batch.token_labels, Sampling(), self._vocab_size)
        return row_loss_sum(self._drafter.head, rows, self._target_logits(hidden), batch.sampling, self._vocab_size)

    def _node_sum(self, batch: MicroBatch, rows: Tensor) -> Tensor:
        nodes, head, sampling = batch.nodes, self._drafter.head, batch.sampling
        assert nodes is not None  # there are rows
        if nodes.edge_weights is not None:
            return edge_loss_sum(head, rows, nodes.edges, nodes.edge_weights, sampling, self._vocab_size)
        logits = nodes.logits
        if logits is not None:
            return row_loss_sum(
                head, rows, lambda a, b: logits[a:b], sampling, self._vocab_size, nodes.row_weights, nodes.row_loss
            )
        assert nodes.hidden is not None  # one of the two is there
        of_target = self._target_logits(nodes.hidden)
        return row_loss_sum(head, rows, of_target, sampling, self._vocab_size, nodes.row_weights, nodes.row_loss)

    def _target_logits(self, hidden: Tensor) -> Callable[[int, int], Tensor]:
        def rows(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                return self._target.head(hidden[start:stop])

        return rows


def _keep_square(sums: dict[str, Tensor | float], name: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        sums[name] = gradient.double().square().sum()

    return hook
