"""Decoding with an EAGLE head: what it remembers of a round, and that nothing of the target's law is lost."""

from __future__ import annotations

import pytest
import torch
from tiny_eagle import random_ids, tiny_head, tiny_target

from exittrain import decode
from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.decoding.batch import Batch, Plan
from exittrain.decoding.row import Row
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.verify.registry import get_verifier

SMALL = 8  # tokens: few enough that trees cover a good part of what the target says


@pytest.fixture(scope="module")
def target():
    return tiny_target(SMALL, scale=4.0)


@pytest.fixture(scope="module")
def prompts():
    return [ids.tolist() for ids in random_ids(2, 9, 5, vocab_size=SMALL)]


def rebuilt(target, drafter, contexts):
    """A state that has read nothing but contexts, beside the features of a plain forward of the target."""
    rows = [torch.tensor(context) for context in contexts]
    features = [target.states(drafter.feature_layers).of(row)[1][:-1] for row in rows]
    return drafter.start(rows, torch.nn.utils.rnn.pad_sequence(features, batch_first=True))


def cached(state):
    """Keys and values of every layer, a list of [2, n, K, d] a row, holes left out."""
    cache = state._cache
    return [
        [torch.stack([layer.keys[row][:, kept], layer.values[row][:, kept]]) for layer in cache._store.layers]
        for row, kept in enumerate(cache.committed)
    ]


def look_ahead(session):
    """Probabilities at the roots, at two children of each, and at two children of those."""
    rows = len(session.root_tokens)
    tokens, valid = torch.tensor([[1, 5]]).expand(rows, -1), torch.ones(rows, 2, dtype=torch.bool)
    waves = [session.expand(torch.tensor([slots]).expand(rows, -1), tokens, valid) for slots in ([0, 0], [2, 1])]
    return torch.cat([session.root()[:, None], *waves], 1).exp()


@pytest.mark.parametrize(("style", "num_layers"), [("llama", 1), ("qwen3", 2)])
@pytest.mark.parametrize("builder", ["best_first", "sampled_wor"])
def test_memory_after_rounds_is_that_of_true_features(target, prompts, style, num_layers, builder):
    """Row 58: whatever was accepted in either row, the cache is one built from the committed tokens alone."""
    drafter = tiny_head(target, [0, 1, 3, 4, 5, 7], style=style, num_layers=num_layers, norm_output=True)
    verifier = get_verifier("tev" if builder == "best_first" else "traversal")
    shape = TreeShape(budget=24, depth=3, width=6, branching="2-ary")
    plan = Plan(target, drafter, get_builder(builder), shape, verifier, Sampling(), 128)
    rows = [
        Row(prompt, torch.Generator().manual_seed(seed), 40, frozenset(), None) for seed, prompt in enumerate(prompts)
    ]
    batch, lengths = Batch(plan, rows), []
    for _ in range(6):
        batch.round()
        lengths.append([row.rounds[-1].block_length for row in batch.rows])
        contexts = [[*row.prompt, *row.token_ids] for row in batch.rows]
        ours, fresh = batch._state, rebuilt(target, drafter, contexts)
        assert ours._cache.num_columns == int(ours.lengths.max())  # nothing drafted is left
        sequences = [torch.tensor(context) for context in contexts]
        ends = torch.tensor([len(context) - 1 for context in contexts])
        expected = look_ahead(drafter.session(sequences, torch.arange(len(ends)), ends, Sampling()))
        for state in (ours, fresh):
            torch.testing.assert_close(look_ahead(state.session(Sampling())), expected, atol=1e-5, rtol=0)
        assert ours.lengths.tolist() == [len(context) - 1 for context in contexts]
        for mine, theirs in zip(cached(ours), cached(fresh), strict=True):
            for part, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(part, other, atol=1e-5, rtol=0)
        if len(batch.rows) == 3 and len(lengths) == 4:  # a row leaves, its neighbours stay as they are
            batch._select([2, 0])
            batch.rows = [batch.rows[2], batch.rows[0]]
    assert any(len(set(row)) > 1 for row in lengths) and max(map(max, lengths)) > 2


def test_a_row_that_leaves_right_after_a_round(target, prompts):
    """Selection before the committed tokens were read."""
    drafter = tiny_head(target)
    sequences = [torch.tensor(prompt) for prompt in prompts]
    state = rebuilt(target, drafter, prompts)
    state.session(Sampling()).root()
    blocks = [[3, 4, 5], [6], [7, 1]]
    longer = [[*prompt, *block] for prompt, block in zip(prompts, blocks, strict=True)]
    along = [target.states(drafter.feature_layers).of(torch.tensor(context))[1] for context in longer]
    features = [part[len(s) - 1 : -1] for part, s in zip(along, sequences, strict=True)]
    state.advance([[], [], []], blocks, torch.nn.utils.rnn.pad_sequence(features, batch_first=True))
    state.select_rows(torch.tensor([2, 1]))
    fresh = rebuilt(target, drafter, [longer[2], longer[1]])
    expected = look_ahead(fresh.session(Sampling()))
    torch.testing.assert_close(look_ahead(state.session(Sampling())), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("builder", ["best_first", "beam", "static", "sampled_wor"])
@pytest.mark.parametrize("pruned", [True, False])
def test_greedy_decoding_is_plain_greedy_decoding(target, prompts, builder, pruned):
    drafter = tiny_head(target, [0, 1, 3, 4, 5, 7] if pruned else None, num_layers=2, fc_norm=True)
    settings = {"temperature": 0, "max_new_tokens": 30, "eos_token_ids": (6,)}
    plain = decode(target, None, prompts, **settings)
    ours = decode(target, drafter, prompts, builder=builder, budget=12, depth=3, branching="2-ary", **settings)
    assert [out.token_ids for out in ours] == [out.token_ids for out in plain]
    assert sum(r.num_accepted for out in ours for r in out.rounds) > 0


@pytest.mark.parametrize(("builder", "verifier"), [("best_first", "tev"), ("sampled_wor", "traversal")])
def test_sampling_keeps_the_targets_law(target, builder, verifier):
    """The first two tokens after a prompt, over runs of fixed seeds, against the target's joint law: chi-square"""
    drafter, prompt, runs = tiny_head(target, [0, 1, 3, 4, 5, 7]), [3, 4, 1], 1200
    first = target.head(target.hidden(torch.tensor([prompt])))[0, -1].softmax(-1)
    nexts = target.hidden(torch.tensor([[*prompt, token] for token in range(SMALL)]))
    joint = (first[:, None] * target.head(nexts)[:, -1].softmax(-1)).flatten().double()
    outs = decode(
        target, drafter, [prompt] * runs, builder=builder, verifier=verifier, budget=4, depth=2, branching="2-ary",
        max_new_tokens=2, eos_token_ids=(), generator=[torch.Generator().manual_seed(seed) for seed in range(runs)],
    )  # fmt: skip
    counts = torch.bincount(torch.tensor([a * SMALL + b for a, b in (out.token_ids for out in outs)]), minlength=64)
    expected = joint * runs
    assert expected.min() > 5 and expected.max() > 20
    assert ((counts - expected).square() / expected).sum() < 63 + 3 * (2 * 63) ** 0.5
    assert sum(r.num_accepted for out in outs for r in out.rounds) > runs / 4


def test_a_prompt_of_one_token_is_refused(target):
    with pytest.raises(InputError, match="prompt 1 has 1 token: an EAGLE head needs at least two"):
        decode(target, tiny_head(target), [[3, 4], [5]], max_new_tokens=4)
