"""`verifier="auto"`: tree and verifier by the drafter's calibration, and one line where there is none that holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exittrain import decode
from exittrain.build.base import TreeShape
from exittrain.decoding import auto, loop
from exittrain.decoding.auto import choose_auto
from exittrain.drafters.base import Drafter
from exittrain.drafters.calibration import Calibration, Choice
from exittrain.drafters.causal import CausalDrafter
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling

TEV = Choice(1.0, 6, "best_first", 3, 4, "chain", "tev", 2.0, None, None, None)
DRAWN = replace(
    TEV, budget=7, builder="sampled_wor", branching="2-ary", verifier="traversal", expected_block_length=2.5
)
LIST = replace(TEV, temperature=0.5, budget=3, builder="static", branching=((0,), (1,), (0, 0)), verifier="residual")


@pytest.fixture
def calibrated(target, drafters) -> Drafter:
    model = drafters["near"].model
    known = Calibration(target.fingerprint(), model.fingerprint(), 0, 1.0, "here", (TEV, DRAWN, LIST))
    return CausalDrafter(model, calibration=known)


def run(target, drafter, prompt, **settings):
    return decode(
        target, drafter, prompt, max_new_tokens=20, generator=torch.Generator().manual_seed(1), eos_token_ids=(),
        record_coverage=True, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("temperature", "budget", "choice"), [(1.0, 6, TEV), (1.2, 40, DRAWN), (0.4, 5, LIST)])
def test_it_is_the_named_choice(target, calibrated, prompts, temperature, budget, choice) -> None:
    """What is given for the shape does not matter, but for the budget: the most nodes allowed."""
    found = run(
        target, calibrated, prompts[3], temperature=temperature, budget=budget, verifier="auto", builder="beam",
        depth=1, width=1, branching="eagle",
    )  # fmt: skip
    named = run(
        target, calibrated, prompts[3], temperature=temperature, builder=choice.builder, verifier=choice.verifier,
        **vars(choice.shape),
    )  # fmt: skip
    assert found.token_ids == named.token_ids
    numbers = [[(r.block_length, r.num_nodes, r.expected_block_length) for r in out.rounds] for out in (found, named)]
    assert numbers[0] == numbers[1]
    assert choose_auto(target, calibrated, Sampling(temperature), budget) == choice


def test_it_hashes_once_a_call(target, calibrated, prompts, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(loop, "choose_auto", lambda *arguments: asked.append(1) or auto.choose_auto(*arguments))
    assert len(decode(target, calibrated, prompts, verifier="auto", max_new_tokens=8)) == len(prompts)
    assert asked == [1]


def test_refusals_are_one_line_with_the_remedy(target, drafters, calibrated, prompts) -> None:
    known = calibrated.calibration
    assert known is not None
    remedy = "--suite verifiers"

    def refused(drafter, **settings) -> str:
        with pytest.raises(InputError) as caught:
            decode(target, drafter, prompts[0], verifier="auto", **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no drafter: name a verifier" in refused(None)
    line = refused(drafters["near"])
    assert "has no calibration" in line and remedy in line and "name a verifier" in line
    for changed, expected in (
        ({"drafter_fingerprint": "x"}, "is of other weights"),
        ({"target_fingerprint": "x"}, "is of another target"),
        ({"top_k": 5}, "is of top_k 5 and top_p 1, not 0 and 1"),
    ):
        line = refused(CausalDrafter(calibrated.model, calibration=replace(known, **changed)))
        assert expected in line and remedy in line
    line = refused(calibrated, top_p=0.5)
    assert "is of top_k 0 and top_p 1, not 0 and 0.5" in line and remedy in line
    assert "at most 5 nodes: the smallest budget is 6" in refused(calibrated, budget=5)


def test_trained_weights_are_other_weights(target, drafters, calibrated) -> None:
    drafter = CausalDrafter(calibrated.model, calibration=calibrated.calibration)
    weight = next(drafter.trainable_parameters())  # not the embeddings, which are the target's own
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.add_(1e-3)
        with pytest.raises(InputError, match="other weights"):
            choose_auto(target, drafter, Sampling(), 16)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert choose_auto(target, drafter, Sampling(), 16) == DRAWN
    assert DRAWN.shape == TreeShape(7, 3, 4, "2-ary")
