"""A block drafter that has learned nothing yet."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from exittrain.drafters.base import TrainingInputs
from exittrain.drafters.block.drafter import BlockDrafter
from exittrain.drafters.block.network import BlockNetwork
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.heads import final_norm
from exittrain.models.target import TargetModel

_EXCESS = 0.1  # nats by which an untrained drafter's loss may pass ln D, over all tokens alike
_PROBE_TOKENS = 32  # of the text that this is measured on


def make_block(target: TargetModel, config: HeadConfig, draft_ids: Tensor | None = None, seed: int = 0) -> BlockDrafter:
    """A fresh drafter in float32, the same for the same seed; the global random state is left as it was.

    Where there is an output head of its own, it begins with the target's rows (of draft_ids). Matrices have standard
    deviation 1 / sqrt(inputs): that is 0.02 at the sizes DFlash is trained at, and lets the context be heard beside the
    masks' embeddings at smaller ones. The final norm has the form of the target's, but is smaller: see `_calm`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BlockNetwork(config)
        for module in network.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    drafter, weight = BlockDrafter(network, target, draft_ids), network.norm.get_parameter("weight")
    with torch.no_grad():
        if drafter.draft_ids is not None:
            network.lm_head.weight.copy_(target.output.weight[drafter.draft_ids])
        if (form := final_norm(target)) is not None:
            weight.copy_(form)
        weight.mul_(_calm(drafter))
    return drafter


def _calm(drafter: BlockDrafter) -> float:
    """What to scale the final norm by, so that a text of random tokens loses at most ln D + _EXCESS nats a token.

    Random states under the target's own norm have random sharp laws, and where embeddings are tied, the state at a mask
    names the mask itself: without this the loss may begin at ten times ln D.
    """
    generator, target = torch.Generator().manual_seed(0), drafter.target
    ids = torch.randint(drafter.vocab_size, (_PROBE_TOKENS,), generator=generator)
    features = target.states(drafter.feature_layers).of(ids)[1][None]
    text = TrainingInputs([ids], [torch.ones_like(ids, dtype=torch.bool)], features, generators=[generator])
    states, scale = drafter.states(drafter.lay_out(text))[0], 1.0
    while scale > 2**-10:
        logits = drafter.head(states * scale)
        loss = float((logits.logsumexp(-1) - logits.mean(-1)).mean())
        if loss <= math.log(logits.shape[-1]) + _EXCESS:
            break
        scale *= 0.8
    return scale
