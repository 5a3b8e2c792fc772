"""Toy models whose next-token law is a plain function of the prefix, for tests of builders, verifiers and loops."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from exittrain.law.sampling import Sampling, process_logits
from exittrain.law.seeding import seed_for

Prefix = tuple[int, ...]  # tokens after the context, the root not among them
Law = Callable[[Prefix], Sequence[Fraction] | Sequence[float]]  # next-token probabilities
Logits = Callable[[Prefix], Tensor]  # next-token logits [V]


class TableSession:
    """A `DraftSession` over B contexts, each with its own law; remembers the waves it was asked for.

    TableSession(law) stands at one context, TableSession([law, law2]) at two.
    """

    def __init__(self, laws: Law | Sequence[Law], root_tokens: Sequence[int] | None = None) -> None:
        self.laws = [laws] if callable(laws) else list(laws)
        self.root_tokens = torch.tensor(list(root_tokens) if root_tokens else [0] * len(self.laws))
        self.prefixes: list[list[Prefix]] = [[()] for _ in self.laws]  # by slot
        self.waves: list[Tensor] = []  # valid, of each wave

    def root(self) -> Tensor:
        return torch.stack([_logs(law(())) for law in self.laws])

    def expand(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        self.waves.append(valid.clone())
        vocab = len(self.laws[0](()))
        out = torch.full((*token_ids.shape, vocab), torch.nan)  # padding is unspecified: poison it
        for row, prefixes in enumerate(self.prefixes):
            for column in range(token_ids.shape[1]):
                prefix: Prefix = (-1,)
                if valid[row, column]:
                    prefix = (*prefixes[int(parent_slots[row, column])], int(token_ids[row, column]))
                    out[row, column] = _logs(self.laws[row](prefix))
                prefixes.append(prefix)
        return out


def _logs(probs: Sequence[Fraction] | Sequence[float]) -> Tensor:
    return torch.tensor([math.log(p) if p > 0 else -math.inf for p in probs])


def random_logits(seed: int, vocab: int, scale: float = 1.5) -> Logits:
    """Normal float32 logits, the same for the same prefix."""

    @functools.cache
    def logits(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(seed_for("logits", seed, *prefix))
        return torch.randn(vocab, generator=generator) * scale

    return logits


def served(logits: Logits, sampling: Sampling) -> Law:
    """The float32 law that logits are served as."""

    @functools.cache
    def law(prefix: Prefix) -> list[float]:
        return process_logits(logits(prefix), sampling).exp().tolist()

    return law


def random_law(seed: int, vocab: int, grain: int = 12, zeros: float = 0.2, sure: float = 0.1) -> Law:
    """Exact random probabilities, the same for the same prefix.

    Weights are whole numbers up to `grain`, so that ties abound; a token is impossible with probability `zeros`; a
    prefix has one certain token with probability `sure`.
    """

    @functools.cache
    def law(prefix: Prefix) -> list[Fraction]:
        rng = random.Random(seed_for("law", seed, *prefix))
        weights = [0 if rng.random() < zeros else rng.randint(1, grain) for _ in range(vocab)]
        if rng.random() < sure or not any(weights):
            weights = [0] * vocab
            weights[rng.randrange(vocab)] = 1
        return [Fraction(weight, sum(weights)) for weight in weights]

    return law


def sharpened(law: Law, power: int = 2) -> Law:
    """The same law at temperature 1/power, still exact."""

    @functools.cache
    def sharp(prefix: Prefix) -> list[Fraction]:
        weights = [Fraction(p) ** power for p in law(prefix)]
        return [weight / sum(weights) for weight in weights]

    return sharp


def table_law(table: dict[Prefix, Sequence[Fraction]]) -> Law:
    """A law written down by hand."""
    return lambda prefix: table[prefix]
