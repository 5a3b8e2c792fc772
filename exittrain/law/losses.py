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


def tv_rows(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """TV(p, q) = 1 - sum_x min(p(x), q(x)) [R] of raw logits, both [R, V]: the chance that a token drawn from q is
    refused (Leviathan et al., arXiv 2211.17192; DistillSpec's TVD, arXiv 2310.08461).

    Summed as max(p - q, 0): nothing cancels where the two agree, and the gradient is 0 where they are equal.
    """
    probs = process_logits(target_logits.detach(), sampling).exp()
    return (probs - draft_logprobs(draft_logits, sampling).exp()).relu().sum(-1)


def lk_rows(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """-log sum_x min(p(x), q(x)) [R] of raw logits, both [R, V] (LK losses, arXiv 2602.23881): its gradient is that of
    `tv_rows` over the acceptance, so that rows which hardly ever accept still learn.

    In logs: finite where the acceptance underflows. A row without a token that both may say costs 0: only masks make
    one, and no drafter's weights can change it.
    """
    target_logprobs, logprobs = process_logits(target_logits.detach(), sampling), draft_logprobs(draft_logits, sampling)
    least = torch.where(logprobs < target_logprobs, logprobs, target_logprobs)
    apart = least.amax(-1, keepdim=True) == -torch.inf
    return -least.masked_fill(apart, 0.0).logsumexp(-1).masked_fill(apart.squeeze(-1), 0.0)


# What a row objective may minimise at each row; an objective names its own (see `law.objectives`).
ROW_LOSSES: dict[str, RowLoss] = {"kl": kl_rows, "tv": tv_rows, "lk": lk_rows}
