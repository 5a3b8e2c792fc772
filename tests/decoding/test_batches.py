"""A row's tokens depend on its own prompt and generator, never on its neighbours (cases.md 61, 53)."""

import pytest
import torch
from conftest import SAMPLED_PAIRS

from exittrain import Sampling, decode
from exittrain.build.base import TreeShape
from exittrain.decoding.batch import Batch
from exittrain.decoding.loop import generate, make_plan
from exittrain.decoding.row import Row


def seeds(count, first=10):
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


@pytest.mark.parametrize(
    ("name", "verifier"),
    [("none", "tev"), ("layers", "tev"), ("near", "tev"), ("near", "predraw"), ("near", "residual")],
)
def test_a_batch_equals_each_alone(target, drafters, prompts, name, verifier):
    settings = {"temperature": 1.0, "max_new_tokens": 14, "verifier": verifier, "budget": 8, "record_coverage": True}
    together = decode(target, drafters[name], prompts, generator=seeds(len(prompts)), **settings)
    for out, prompt, one in zip(together, prompts, seeds(len(prompts)), strict=True):
        alone = decode(target, drafters[name], prompt, generator=one, **settings)
        assert alone.token_ids == out.token_ids
        assert [r.block_length for r in alone.rounds] == [r.block_length for r in out.rounds]
        assert [r.coverage for r in alone.rounds] == pytest.approx([r.coverage for r in out.rounds], abs=1e-4)


@pytest.mark.parametrize(("builder", "verifier", "branching"), SAMPLED_PAIRS)
def test_a_sampled_batch_equals_each_alone(target, drafters, prompts, builder, verifier, branching):
    settings = {
        "builder": builder, "verifier": verifier, "branching": branching, "budget": 6, "top_p": 0.9,
        "max_new_tokens": 14, "eos_token_ids": (), "record_coverage": True,
    }  # fmt: skip
    together = decode(target, drafters["near"], prompts, generator=seeds(len(prompts)), **settings)
    if (builder, branching) == ("sampled_wor", "2-ary"):  # a nucleus of one token leaves no second child
        assert len({one.num_nodes for out in together for one in out.rounds}) > 1
    for out, prompt, one in zip(together, prompts, seeds(len(prompts)), strict=True):
        alone = decode(target, drafters["near"], prompt, generator=one, **settings)
        assert alone.token_ids == out.token_ids
        assert [r.block_length for r in alone.rounds] == [r.block_length for r in out.rounds]
        expected = [r.expected_block_length for r in out.rounds]
        assert [r.expected_block_length for r in alone.rounds] == pytest.approx(expected, abs=1e-4)


def test_rows_that_end_early_leave_the_others_alone(target, drafters, prompts):
    """Ends at different rounds: every token is an end token for some row sooner or later."""
    ends = tuple(range(0, 97, 9))
    together = decode(target, drafters["near"], prompts, generator=seeds(len(prompts)), eos_token_ids=ends, depth=4)
    assert len({len(out.rounds) for out in together}) > 2
    for out, prompt, one in zip(together, prompts, seeds(len(prompts)), strict=True):
        alone = decode(target, drafters["near"], prompt, generator=one, eos_token_ids=ends, depth=4)
        assert alone.token_ids == out.token_ids and alone.finish_reason == out.finish_reason


def test_same_seed_same_tokens_and_another_seed_others(target, drafters, prompts):
    def run(seed):
        outs = decode(
            target, drafters["near"], prompts, max_new_tokens=12, generator=torch.Generator().manual_seed(seed)
        )
        return [out.token_ids for out in outs]

    runs = [run(1), run(1), run(2)]
    assert runs[0] == runs[1] and runs[0] != runs[2]


def test_without_a_generator_the_global_seed_governs(target, prompts):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        first = decode(target, None, prompts[2], max_new_tokens=8).token_ids
        torch.manual_seed(4)
        assert decode(target, None, prompts[2], max_new_tokens=8).token_ids == first


def test_generate_keeps_the_order_and_equals_decode(target, prompts):
    shuffled = [prompts[i] for i in (3, 0, 5, 1, 4, 2)]
    counted = []
    outs = generate(
        target, shuffled, Sampling(temperature=0.9), 12, seeds(6), progress=counted.append, batch_size=4,
        eos_token_ids=(),
    )  # fmt: skip
    assert sum(counted) == 6 * 12 == sum(len(out.token_ids) for out in outs)
    for out, prompt, one in zip(outs, shuffled, seeds(6), strict=True):
        alone = decode(target, None, prompt, temperature=0.9, max_new_tokens=12, generator=one, eos_token_ids=())
        assert alone.token_ids == out.token_ids and out.num_prompt_tokens == len(prompt)


def test_generate_of_nothing(target):
    assert generate(target, [], Sampling(), 4, []) == []


def test_caches_after_rounds_hold_the_committed_tokens_alone(target, drafters, prompts):
    """Gathering, not cropping: rows that took different paths still score as a plain forward does (cases.md 53)."""
    outs = decode(target, drafters["layers"], prompts, temperature=0, max_new_tokens=30, eos_token_ids=())
    assert len({tuple(r.block_length for r in out.rounds) for out in outs}) > 2
    for prompt, out in zip(prompts, outs, strict=True):
        with torch.no_grad():
            logits = target.module(torch.tensor([[*prompt, *out.token_ids]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == out.token_ids


def test_logits_after_rounds_equal_a_plain_forward(target, drafters, prompts):
    """The same in numbers, for both caches: target and drafter after three rounds against their full forwards."""
    plan = make_plan(target, drafters["near"], "best_first", TreeShape(depth=3), "tev", Sampling())
    rows = [Row(prompt, one, 100, frozenset(), None) for prompt, one in zip(prompts, seeds(6), strict=True)]
    batch = Batch(plan, rows)
    with torch.no_grad():
        for _ in range(4):
            batch.round()
        draft = batch._draft()
        ours = target.head(batch._cache.score(draft.trees))[:, 0]
        theirs = batch._state.session(Sampling()).root()
        for b, row in enumerate(rows):
            ids = torch.tensor([[*row.prompt, *row.token_ids]])
            assert row.length > len(row.prompt) + 3
            plain = target.module(ids).logits[0, -1]
            assert torch.allclose(ours[b].softmax(-1), plain.softmax(-1), atol=1e-5)
            plain = drafters["near"].model.module(ids).logits[0, -1]
            assert torch.allclose(theirs[b].exp(), plain.softmax(-1), atol=1e-5)
