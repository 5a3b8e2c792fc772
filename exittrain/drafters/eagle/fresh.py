"""An EAGLE-3 head that has learned nothing yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exittrain.drafters.eagle.drafter import EagleDrafter
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.heads import final_norm
from exittrain.models.target import TargetModel

_STD = 0.02  # of fresh matrices
_SPREAD = 0.5  # standard deviation over tokens of an untrained head's logits, at most


def make_eagle(target: TargetModel, config: HeadConfig, draft_ids: Tensor | None = None, seed: int = 0) -> EagleDrafter:
    """A fresh head in float32, the same for the same seed; the global random state is left as it was.

    Where the hidden sizes agree it begins with the target's output rows (of draft_ids) and the form of its final norm,
    so that a state which resembles the target's already speaks its tokens. Its other matrices are random, and so are
    its states: their logits are kept small through the norm's size. A random direction under the target's own norm
    would give random sharp laws, whose loss starts at ln D + spread^2 / 2 (spreads of 5 to 10 are usual) and takes long
    to be unlearned.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = EagleNetwork(config, target.embeddings)
        for module in network.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    _copy_output(network, target, draft_ids)
    _limit_spread(network)
    return EagleDrafter(network, target, draft_ids)


@torch.no_grad()
def _copy_output(network: EagleNetwork, target: TargetModel, draft_ids: Tensor | None) -> None:
    rows = target.output.weight
    if rows.shape[1] != network.hidden_size:
        return
    network.lm_head.weight.copy_(rows if draft_ids is None else rows[draft_ids.to(rows.device)])
    weight = final_norm(target)
    if weight is not None:
        network.norm.weight.copy_(weight)  # type: ignore[operator]


@torch.no_grad()
def _limit_spread(network: EagleNetwork) -> None:
    """Scale the final norm down until a state of random direction has logits of standard deviation _SPREAD."""
    norm: Any = network.norm
    spread = float((network.lm_head.weight.var(0, correction=0) * norm.weight.square()).sum().sqrt())
    norm.weight.mul_(min(1.0, _SPREAD / max(spread, 1e-9)))
