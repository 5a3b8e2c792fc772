"""Losses of drafter logits against the target, one number a row, in nats (math.md section 8).

Shapes: R rows, V vocabulary, D the tokens the drafter can draft. Float32 (float64 where the logits are); gradients
reach the draft logits only.
The target's side is processed as it is served (temperature, top-k, top-p). The drafter's side is scaled by the same
temperature only: a drafter cut by top-p would have zeros under the target's mass, and the loss would be infinite.
At temperature 0 the target is its argmax and the drafter keeps its plain probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exittrain.law.sampling import Sampling, process_logits

RowLoss = Callable[[Tensor, Tensor], Tensor]
PLAIN = Sampling()


def draft_logprobs(draft_logits: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """log q [R, D] of raw draft logits [R, D]: temperature only, differentiable."""
    scores = draft_logits if draft_logits.dtype == torch.float64 else draft_logits.float()
    return (scores if sampling.greedy else scores / sampling.temperature).log_softmax(-1)


def target_logprobs(target_logits: Tensor, sampling: Sampling, draft_ids: Tensor | None = None) -> Tensor:
    """log p [R, D] of raw target logits [R, V], as served, at the tokens a drafter can draft (None: all).

    Not renormalised: what the target says outside of them is missed, and no drafter's weights can change it.
    """
    logprobs = process_logits(target_logits.detach(), sampling)
    return logprobs if draft_ids is None else logprobs[..., draft_ids]


def kl(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(p || q) [R] of log p and log q, both [R, D]. Tokens the target never emits cost nothing."""
    probs = target_logprobs.exp()
    log_ratio = target_logprobs - logprobs
    return (probs * log_ratio.masked_fill(probs == 0, 0.0)).sum(-1)


def cross_entropy_rows(draft_logits: Tensor, columns: Tensor, sampling: Sampling = PLAIN) -> Tensor:
    """-log q(x) [R] of the tokens at columns [R] of raw draft logits [R, D]."""
    return -draft_logprobs(draft_logits, sampling).gather(-1, columns[..., None]).squeeze(-1)


def tv(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """TV(p, q) = 1 - sum_x min(p(x), q(x)) [R] of log p and log q, both [R, D]: the chance that a token drawn from q is
    refused (Leviathan et al., arXiv 2211.17192; DistillSpec's TVD, arXiv 2310.08461), less the target's mass outside.

    Summed as max(p - q, 0): nothing cancels where the two agree, and the gradient is 0 where they are equal.
    """
    return (target_logprobs.exp() - logprobs.exp()).relu().sum(-1)


def lk(target_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """-log sum_x min(p(x), q(x)) [R] of log p and log q, both [R, D] (LK losses, arXiv 2602.23881): its gradient is
    that of `tv` over the acceptance, so that rows which hardly ever accept still learn.

    In logs: finite where the acceptance underflows. A row without a token that both may say costs 0: only masks make
    one, and no drafter's weights can change it.
    """
    least = torch.where(logprobs < target_logprobs, logprobs, target_logprobs)
    apart = least.amax(-1, keepdim=True) == -torch.inf
    return -least.masked_fill(apart, 0.0).logsumexp(-1).masked_fill(apart.squeeze(-1), 0.0)


# What a row objective may minimise at each row; an objective names its own (see `law.objectives`).
ROW_LOSSES: dict[str, RowLoss] = {"kl": kl, "tv": tv, "lk": lk}
