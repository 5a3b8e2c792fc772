"""At temperature 1 decoding has the target's own law, whatever drafts and verifies; a broken bonus is found out."""

import itertools

import pytest
import torch
from conftest import as_target, random_model
from scipy.stats import chisquare

from exittrain import decode
from exittrain.drafters.base import Drafter
from exittrain.verify.base import BatchVerdict
from exittrain.verify.registry import VERIFIERS
from exittrain.verify.tev import Tev

VOCAB, PROMPT, DRAWS, TEMPERATURE = 5, [1, 3, 0], 2000, 1.5


def flattened(model):
    """A softer head: every token has a chance, none is likely enough to hide a fault."""
    with torch.no_grad():
        model.module.lm_head.weight.mul_(0.1)
    return model


@pytest.fixture(scope="module")
def pair():
    target = as_target(flattened(random_model(VOCAB, seed=1)))
    return target, Drafter(flattened(random_model(VOCAB, seed=2, layers=1)))


def joint_law(target, length, top_p=1.0):
    """{tokens: probability} of the next `length` tokens, by plain forwards."""
    law = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, mass in law.items():
            with torch.no_grad():
                logits = target.module(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].double()
            probs = (logits / TEMPERATURE).softmax(-1)
            order = probs.argsort(descending=True)
            before = probs[order].cumsum(0) - probs[order]
            probs[order[before >= top_p]] = 0
            for token, probability in enumerate((probs / probs.sum()).tolist()):
                if probability > 0:
                    longer[(*tokens, token)] = mass * probability
        law = longer
    return law


def p_value(target, drafter, length, top_p=1.0, **settings):
    generators = [torch.Generator().manual_seed(seed) for seed in range(DRAWS)]
    outs = decode(
        target, drafter, [PROMPT] * DRAWS, temperature=TEMPERATURE, top_p=top_p, max_new_tokens=length,
        eos_token_ids=(), generator=generators, **settings,
    )  # fmt: skip
    law = joint_law(target, length, top_p)
    counts = dict.fromkeys(law, 0)
    for out in outs:
        counts[tuple(out.token_ids)] += 1  # a token outside the nucleus is a KeyError
    # Rare outcomes share one cell, as the test asks for five expected in each.
    common = [tokens for tokens, mass in law.items() if mass * DRAWS >= 5]
    observed = [counts[tokens] for tokens in common]
    expected = [law[tokens] * DRAWS for tokens in common]
    if len(common) < len(law):
        observed.append(DRAWS - sum(observed))
        expected.append(DRAWS - sum(expected))
    return chisquare(observed, expected, sum_check=False).pvalue


@pytest.mark.parametrize("name", [None, "tev", "predraw", "residual"])
def test_every_verifier_keeps_the_target_law(pair, name):
    target, drafter = pair
    plain = name is None
    assert p_value(target, None if plain else drafter, 3, verifier=name or "tev", budget=4, width=3) > 0.001


def test_the_law_with_top_p(pair):
    target, drafter = pair
    assert len(joint_law(target, 2, 0.7)) < VOCAB**2
    assert p_value(target, drafter, 2, top_p=0.7, budget=5, depth=2) > 0.001


@pytest.mark.parametrize("builder", ["beam", "static"])
def test_the_law_does_not_depend_on_the_builder(pair, builder):
    target, drafter = pair
    assert p_value(target, drafter, 2, builder=builder, budget=4, width=2) > 0.001


class BonusFromUnscaledLogits(Tev):
    """Known wrong: the exit is right, the bonus forgets the temperature and the children."""

    name = "broken"

    def verify_batch(self, trees, target_logits, sampling, generators):
        verdict = super().verify_batch(trees, target_logits, sampling, generators)
        probs = target_logits[torch.arange(len(trees)), verdict.nodes].softmax(-1)
        drawn = [int(torch.multinomial(row, 1, generator=g)) for row, g in zip(probs, generators, strict=True)]
        return BatchVerdict(verdict.nodes, torch.tensor(drawn))


def test_a_broken_bonus_is_found_out(pair, monkeypatch):
    monkeypatch.setitem(VERIFIERS, "broken", BonusFromUnscaledLogits())
    target, drafter = pair
    assert p_value(target, drafter, 3, verifier="broken", budget=4, width=3) < 1e-6


def test_block_length_is_one_plus_coverage_at_the_same_rounds(pair):
    """Martingale differences: their mean is zero within its standard error."""
    target, drafter = pair
    prompts = [list(p) for p in itertools.product(range(VOCAB), repeat=3)]
    outs = decode(
        target, drafter, prompts, max_new_tokens=16, eos_token_ids=(), record_coverage=True, budget=6,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    gaps = torch.tensor([r.block_length - 1 - r.coverage for out in outs for r in out.rounds], dtype=torch.float64)
    assert len(gaps) > 800
    assert abs(float(gaps.mean())) < 3 * float(gaps.std()) / len(gaps) ** 0.5
