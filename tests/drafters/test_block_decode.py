"""Decoding with a block drafter: the context it keeps, and that nothing of the target's law is lost."""

from __future__ import annotations

import pytest
import torch
from tiny_block import IDS, tiny_block
from tiny_eagle import random_ids, tiny_target

from exittrain import decode
from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.decoding.batch import Batch, Plan
from exittrain.decoding.row import Row
from exittrain.drafters.block.blocks import ContextCache
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.verify.registry import get_verifier

SMALL = 8  # tokens: few enough that trees cover a good part of what the target says
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def target():
    return tiny_target(SMALL, scale=4.0)


@pytest.fixture(scope="module")
def prompts():
    return [ids.tolist() for ids in random_ids(1, 9, 5, vocab_size=SMALL)]


def along(drafter, contexts):
    """Features of contexts but for their last tokens, right-padded with what must not be read."""
    rows = [drafter.target.states(drafter.feature_layers).of(torch.tensor(context))[1][:-1] for context in contexts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1e3)


def test_rows_gain_different_counts_without_holes():
    drafter = tiny_block(num_layers=2)
    rows = [drafter.target.states((1, 3)).of(ids)[1] for ids in random_ids(9, 6, 7)]
    cache, read = ContextCache(drafter.network, 3), [0, 0, 0]
    for counts in ([4, 1, 0], [0, 0, 0], [1, 3, 5], [4, 0, 2]):
        parts = [row[start : start + count] for row, start, count in zip(rows, read, counts, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=1e3)
        cache.append(padded, torch.tensor(counts))
        read = [start + count for start, count in zip(read, counts, strict=True)]
        assert cache.lengths.tolist() == read
        assert cache.layers[0][0].shape[2] == max(read)  # no wider than the longest row
    cache.select_rows(torch.tensor([2, 1]))
    assert cache.lengths.tolist() == [7, 4] and cache.layers[0][0].shape[2] == 7
    with torch.no_grad():
        for place, row in enumerate((rows[2][:7], rows[1][:4])):
            whole = drafter.network.context(row[None], torch.arange(len(row))[None])
            for ours, theirs in zip(cache.layers, whole, strict=True):
                for mine, its in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(mine[place, :, : len(row)], its[0], **CLOSE)


@pytest.mark.parametrize("ids", [None, [0, 1, 3, 4, 6]])
def test_after_rounds_the_context_is_the_targets_features(target, prompts, ids):
    """Row 58: rows accept different paths, a row leaves; what is kept equals a context read afresh."""
    drafter = tiny_block(target, ids, num_layers=2)
    shape = TreeShape(budget=10, depth=4, width=4)
    plan = Plan(target, drafter, get_builder("best_first"), shape, get_verifier("tev"), Sampling(), 128)
    limits = [40, 9, 40]
    rows = [
        Row(list(prompt), torch.Generator().manual_seed(3 + index), limit, frozenset(), None)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    batch, lengths = Batch(plan, rows), set()
    for _ in range(9):
        batch.round()
        lengths |= {row.rounds[-1].block_length for row in batch.rows}
        contexts = [[*row.prompt, *row.token_ids] for row in batch.rows]
        fresh = drafter.start([torch.tensor(context) for context in contexts], along(drafter, contexts))
        state = batch._state
        assert state.lengths.tolist() == [len(context) - 1 for context in contexts]
        assert state._cache.layers[0][0].shape[2] == max(map(len, contexts)) - 1
        for ours, theirs in zip(state._cache.layers, fresh._cache.layers, strict=True):
            for mine, its in zip(ours, theirs, strict=True):
                for row, context in enumerate(contexts):
                    kept = len(context) - 1
                    torch.testing.assert_close(mine[row, :, :kept], its[row, :, :kept], **CLOSE)
        ours, theirs = state.session(Sampling()), fresh.session(Sampling())
        assert torch.equal(ours.root_tokens, theirs.root_tokens)
        torch.testing.assert_close(ours.root(), theirs.root(), **CLOSE)
    assert len(batch.rows) == 2 and len(lengths) > 1  # a row left, and rows gained different counts


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("builder, verifier", [("best_first", "tev"), ("sampled_wor", "traversal")])
def test_greedy_decoding_is_plain_greedy_decoding(target, prompts, pruned, builder, verifier):
    plain = decode(target, None, prompts, temperature=0, max_new_tokens=24)
    said = sorted({token for row in plain for token in row.token_ids})
    drafter = tiny_block(target, said[1:] if pruned else None)  # one of them it can never draft
    ours = decode(
        target, drafter, prompts, builder, 8, verifier, temperature=0, max_new_tokens=24, depth=4,
        branching=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)), generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert [row.token_ids for row in ours] == [row.token_ids for row in plain]
    assert max(one.block_length for row in ours for one in row.rounds) > 1


@pytest.mark.parametrize("builder, verifier", [("best_first", "tev"), ("sampled_wor", "traversal")])
def test_what_is_decoded_follows_the_target(target, builder, verifier):
    """Two tokens after one prompt, 3000 times, against the target's own law by chi-square."""
    drafter, prompt, count = tiny_block(target), [3, 1, 5], 3000
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    results = decode(
        target, drafter, [prompt] * count, builder, 6, verifier, max_new_tokens=2, depth=3, eos_token_ids=(),
        branching=((0,), (1,), (0, 0), (0, 1)), generator=generators,
    )  # fmt: skip
    seen = torch.zeros(SMALL, SMALL)
    for result in results:
        seen[tuple(result.token_ids)] += 1
    sequences = torch.tensor([[*prompt, token] for token in range(SMALL)])
    laws = target.head(target.hidden(sequences)).softmax(-1)
    expected = (laws[0, 2, :, None] * laws[:, 3]) * count
    assert expected.min() > 5
    excess = ((seen - expected) ** 2 / expected).sum() - (SMALL**2 - 1)
    assert excess < 4 * (2 * SMALL**2) ** 0.5
    assert sum(row.rounds[0].block_length > 1 for row in results) > 100  # drafts were accepted


def test_trees_deeper_than_the_block_are_refused(target, prompts):
    drafter = tiny_block(target)
    assert drafter.max_depth == 4
    decode(target, drafter, prompts[1], budget=8, depth=4, max_new_tokens=6)
    with pytest.raises(InputError, match=r"tree depth 5 is beyond the 4 tokens that .* drafts: .* at most 4"):
        decode(target, drafter, prompts[1], "static", 8, depth=5, max_new_tokens=6)


def test_an_empty_prompt_is_refused(target):
    with pytest.raises(InputError, match="a prompt is empty"):
        tiny_block(target).start([torch.tensor([3]), torch.tensor([], dtype=torch.int64)], None)


def test_blocks_may_reach_past_the_last_position():
    """A prompt that leaves room for two tokens: the block of five is cut off, the text is the target's own."""
    target = tiny_target()
    drafter = tiny_block(target, IDS)
    prompt = random_ids(126)[0].tolist()
    plain = decode(target, None, prompt, temperature=0, max_new_tokens=8)
    ours = decode(target, drafter, prompt, temperature=0, depth=4, max_new_tokens=8)
    assert ours.token_ids == plain.token_ids and len(ours.token_ids) == 2
