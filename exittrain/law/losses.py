"""Losses of drafter logits against the target, one number a row, in nats (math.md section 8).

Shapes: R rows, V vocabulary. Float32 (float64 where the logits are); gradients reach the draft logits only.
The target's side is processed as it is served (temperature, top-k, top-p). The drafter's side is scaled by the same
temperature only: a drafter cut by top-p would have zeros under the target's mass, and the loss would be infinite.
At temperature 0 the target is its argmax and the drafter keeps its plain probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exittrain.law.sampling import Sampling, process_logits

RowLoss = Callable[[Tensor, Tensor, Sampling], Tensor]
PLAIN = Sampling()


def draft_logprobs(draft_logits: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """log q [R, V] of raw draft logits [R, V]: temperature only, differentiable."""
    scores = draft_logits if draft_logits.dtype == torch.float64 else draft_logits.float()
    return (scores if sampling.greedy else scores / sampling.temperature).log_softmax(-1)


def kl_rows(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """KL(p || q) [R] of raw logits, both [R, V]. Tokens the target never emits cost nothing."""
    target_logprobs = process_logits(target_logits.detach(), sampling)
    probs = target_logprobs.exp()
    log_ratio = target_logprobs - draft_logprobs(draft_logits, sampling)
    return (probs * log_ratio.masked_fill(probs == 0, 0.0)).sum(-1)


def cross_entropy_rows(draft_logits: Tensor, token_ids: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """-log q(x) [R] of the tokens token_ids [R] under raw draft logits [R, V]."""
    return -draft_logprobs(draft_logits, sampling).gather(-1, token_ids[..., None]).squeeze(-1)


# What a row objective may minimise at each row; an objective names its own (see `law.objectives`).
ROW_LOSSES: dict[str, RowLoss] = {"kl": kl_rows}
