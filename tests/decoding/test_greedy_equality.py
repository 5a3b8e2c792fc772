"""At temperature 0 every drafter, tree, verifier and budget gives the tokens of plain greedy decoding, exactly."""

import copy

import pytest
import torch
from conftest import DRAWN_PAIRS

from exittrain import TargetModel, decode
from exittrain.drafters.layers import copy_layers

NEW = 25


@pytest.fixture(scope="module")
def expected(target, prompts):
    with torch.no_grad():
        return [
            target.module.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, attention_mask=torch.ones(1, len(prompt))
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]


def greedy(target, drafter, prompts, **settings):
    return decode(target, drafter, prompts, temperature=0, max_new_tokens=NEW, eos_token_ids=(), **settings)


def test_the_reference_is_no_constant(expected):
    assert all(len(set(tokens)) > 5 for tokens in expected)


@pytest.mark.parametrize("name", ["none", "random", "layers", "near", "itself"])
@pytest.mark.parametrize("builder", ["best_first", "beam", "static"])
def test_every_drafter_and_builder(target, drafters, prompts, expected, name, builder):
    outs = greedy(target, drafters[name], prompts, builder=builder, budget=8, verifier="greedy")
    assert [out.token_ids for out in outs] == expected
    assert all(sum(r.num_emitted for r in out.rounds) == NEW for out in outs)


@pytest.mark.parametrize("verifier", ["tev", "predraw", "residual"])
def test_every_verifier(target, drafters, prompts, expected, verifier):
    outs = greedy(target, drafters["near"], prompts, verifier=verifier)
    assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize(("builder", "verifier", "branching"), DRAWN_PAIRS)
@pytest.mark.parametrize("name", ["random", "near"])
def test_sampled_trees(target, drafters, prompts, expected, name, builder, verifier, branching):
    """Drawn from the drafter's plain law, judged by the target's argmax alone."""
    outs = greedy(
        target, drafters[name], prompts, builder=builder, verifier=verifier, branching=branching, budget=6,
        record_coverage=True,
    )  # fmt: skip
    assert [out.token_ids for out in outs] == expected
    rounds = [one for out in outs for one in out.rounds]
    assert all(one.expected_block_length == one.block_length <= 1 + one.coverage for one in rounds)
    if builder == "sampled_wor" or verifier == "tev":  # of twins a sampled verifier follows one
        assert all(one.block_length == 1 + one.coverage for one in rounds)


@pytest.mark.parametrize(
    ("budget", "depth", "width"),
    [(1, 1, 1), (2, 1, 4), (3, 3, 1), (4, 2, 2), (7, 8, 3), (12, 12, 1), (16, 6, 8), (16, 10, 97), (40, 4, 8)],
)
def test_every_budget(target, drafters, prompts, expected, budget, depth, width):
    for builder in ("best_first", "beam"):
        outs = greedy(target, drafters["near"], prompts, builder=builder, budget=budget, depth=depth, width=width)
        assert [out.token_ids for out in outs] == expected
        assert all(r.num_nodes <= budget for out in outs for r in out.rounds)


@pytest.mark.parametrize("branching", ["chain", "eagle", "2-ary"])
def test_static_shapes(target, drafters, prompts, expected, branching):
    outs = greedy(target, drafters["near"], prompts, builder="static", budget=25, depth=12, branching=branching)
    assert [out.token_ids for out in outs] == expected


def test_a_perfect_drafter_is_always_accepted(target, drafters, prompts):
    for out in greedy(target, drafters["itself"], prompts, budget=4, depth=4, width=1):
        assert {r.block_length for r in out.rounds} == {5}
        assert {r.num_nodes for r in out.rounds} == {4}
        assert len(out.rounds) == NEW // 5


def test_a_hopeless_drafter_is_never_accepted(target, drafters, prompts, expected):
    """Negated logits: the drafter proposes what the target likes least."""
    worst = drafters["itself"].model
    original = worst.head
    worst.head = lambda hidden: -original(hidden)
    try:
        outs = greedy(target, drafters["itself"], prompts)
    finally:
        del worst.head
    assert [out.token_ids for out in outs] == expected
    assert all(r.block_length == 1 and r.num_nodes == 16 for out in outs for r in out.rounds)


def test_coverage_at_temperature_zero_is_the_accepted_depth(target, drafters, prompts):
    for out in greedy(target, drafters["near"], prompts[:3], record_coverage=True):
        assert [r.coverage for r in out.rounds] == [r.num_accepted for r in out.rounds]


def test_half_precision_stays_within_rounding_of_the_argmax(target, drafters, prompts):
    """bfloat16 rounds a tree's rows and a plain forward's differently, so near-ties may flip; nothing more may."""
    half = TargetModel(copy.deepcopy(target.module).to(torch.bfloat16), None, "half", verify=False)
    for prompt, out in zip(prompts, greedy(half, copy_layers(half, 2), prompts), strict=True):
        with torch.no_grad():
            logits = half.module(torch.tensor([[*prompt, *out.token_ids]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        spread = logits.amax(1) - logits.amin(1)
        assert float(((logits.amax(1) - chosen) / spread).max()) < 0.05
