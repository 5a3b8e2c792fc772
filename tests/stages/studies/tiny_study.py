"""A tiny target, drafters near and far from it, and held-out sequences: what the paper studies are tested on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel
from exittrain.stages.conversations.store import TokenSequence
from exittrain.stages.evaluation.setup import Entrant

VOCAB = 23


def tiny_model(seed: int = 0, noise: float = 0.0, max_positions: int = 64):
    """noise: added to every weight; a drafter of seed 0 and little noise is near the target."""
    model = make_causal_lm(VOCAB, 16, 2, 2, 32, max_positions=max_positions, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.output.weight.mul_(20.0)  # peaked enough that trees catch something
        for parameter in model.module.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def tiny_target() -> TargetModel:
    return TargetModel(tiny_model().module, name="tiny")


def entrant(
    name: str, role: str = "arm", objective: str | None = None, steps: int = 9, noise: float = 0.05,
    max_positions: int = 64,
) -> Entrant:  # fmt: skip
    """A drafter of a run whose weights are the target's and some noise."""
    made = CausalDrafter(tiny_model(0, noise, max_positions))
    load: Callable[[], Drafter] = partial(lambda drafter: drafter, made)
    return Entrant(name, load, role, objective, steps)


def sequences(count: int = 10, length: int = 24, prompt: int = 6) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(5)
    mask = [0] * prompt + [1] * (length - prompt)
    return [
        TokenSequence(f"s{i}", torch.randint(1, VOCAB, (length,), generator=generator).tolist(), mask, prompt, "test")
        for i in range(count)
    ]
