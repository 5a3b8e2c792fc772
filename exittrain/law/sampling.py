"""Logits to the distribution that is served: one function for drafter, verifier, bonus and exit-law targets alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.ranking import top_tokens

FIRST_LOOK = 512  # tokens looked at before the whole vocabulary is ranked


@dataclass(frozen=True)
class Sampling:
    """The serving settings. temperature 0 means argmax; top_k 0 and top_p 1 mean no truncation.

    Raises InputError on a negative or NaN temperature, a negative top_k, a top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; it must be 0 (argmax) or a positive number")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it must be 0 (off) or a positive count of tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must lie in (0, 1], 1 meaning off")

    @property
    def greedy(self) -> bool:
        """Temperatures below 1e-5 are argmax: dividing by them would only overflow."""
        return self.temperature < 1e-5

    def for_drafting(self) -> Sampling:
        """What a drafter ranks its tokens by: the serving settings, or plain probabilities when serving is greedy."""
        return Sampling() if self.greedy else self


def training_samplings(serving: Sampling, temperature: float | list[float] | None) -> tuple[Sampling, ...]:
    """What training steps take turns in: the serving settings, at other temperatures where the recipe gives some."""
    several = temperature if isinstance(temperature, list) else [temperature]
    return tuple(serving if one is None else replace(serving, temperature=one) for one in several)


def log_weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """`process_logits` before its renormalisation: log-weights [..., V] whose largest is 0; tokens cut off have -inf.

    Float32 (float64 where the logits are). For callers that need one sum of their own over a row.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        return torch.full_like(scores, -torch.inf).scatter(-1, first_tokens(scores)[..., None], 0.0)
    scores = scores - _best(scores)
    if sampling.temperature != 1:
        scores /= sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1:
        scores = _nucleus(scores, sampling.top_p)
    return scores


def first_tokens(logits: Tensor) -> Tensor:
    """[...] int64: the token of the largest logit of each row [..., V], the first of equals; served at temperature 0.

    Raises InputError as `process_logits` does.
    """
    _best(logits)
    return logits.argmax(dim=-1)


def _best(scores: Tensor) -> Tensor:
    """[..., 1] the largest of each row; InputError unless it is finite."""
    best = scores.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(best).all()):
        raise InputError("logits hold NaN or infinity (or a row with no token left): the model's output is unusable")
    return best


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """scores [..., V] with -inf outside the smallest set of best tokens (ties: smaller id) whose mass reaches top_p."""
    vocab, probs = scores.shape[-1], scores.softmax(-1)
    # A nucleus seldom outgrows its first few hundred tokens, and those cost a tenth of a sort of the vocabulary.
    for size in (min(FIRST_LOOK, vocab), vocab):
        values, ids = top_tokens(scores, size)
        mass = torch.where(values > -torch.inf, probs.gather(-1, ids), 0.0)
        reached = mass.cumsum(-1)
        if bool((reached[..., -1] >= top_p).all()):
            break
    kept = values.masked_fill(reached - mass >= top_p, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_reduce(-1, ids, kept, "amax")


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Processed log-probabilities [..., V] of raw logits [..., V]; tokens cut off have -inf.

    Float32, float64 where the logits are. Order: temperature, top-k (ties with the last are kept), top-p, renormalise.
    Greedy: 0 at the first argmax, -inf elsewhere. The input is not written to. NaN or +inf logits, or a row with no
    finite logit, raise InputError.
    """
    weights = log_weights(logits, sampling)
    return weights if sampling.greedy else weights.log_softmax(dim=-1)
