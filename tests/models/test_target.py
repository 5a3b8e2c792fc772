"""Scoring trees: equal to a plain forward per root-to-node path, whatever the batch, the padding and the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import node_probs, plain_probs, random_tree, tiny_target

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


def assert_plain(model, sequences, trees, rows, anchors, scores):
    for r, (tree, score) in enumerate(zip(trees, scores, strict=True)):
        plain = node_probs(model, sequences[rows[r]][: anchors[r] + 1], tree)
        torch.testing.assert_close(score.exp(), plain, atol=1e-5, rtol=0)


def test_many_anchors_of_one_sequence(model, forest):
    (sequence,), trees, rows, anchors = forest([20], [7, 3, 0, 12, 1])
    scores = model.score_trees(sequence.tolist(), anchors.tolist(), trees)
    assert [score.shape for score in scores] == [(tree.num_nodes + 1, model.vocab_size) for tree in trees]
    assert_plain(model, [sequence], trees, rows, anchors, scores)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_of_three_lengths(model, forest, side):
    lengths = [3, 9, 14]
    sequences, trees, rows, anchors = forest(lengths, [5, 4, 6, 2, 8, 3])
    ids, mask = torch.full((3, 14), 7), torch.zeros(3, 14, dtype=torch.int64)
    shift = [14 - length if side == "left" else 0 for length in lengths]
    for s, sequence in enumerate(sequences):
        ids[s, shift[s] : shift[s] + len(sequence)], mask[s, shift[s] : shift[s] + len(sequence)] = sequence, 1
    places = [[int(anchors[r]) + shift[s] for r in range(6) if rows[r] == s] for s in range(3)]
    grouped = [[trees[r] for r in range(6) if rows[r] == s] for s in range(3)]
    nested = model.score_trees(ids, places, grouped, attention_mask=mask)
    order = [r for s in range(3) for r in range(6) if rows[r] == s]
    flat = [score for row in nested for score in row]
    assert_plain(model, sequences, [trees[r] for r in order], rows[order], anchors[order], flat)
    one_each = model.score_trees(ids, [row[0] for row in places], [row[0] for row in grouped], attention_mask=mask)
    for alone, row in zip(one_each, nested, strict=True):
        torch.testing.assert_close(alone, row[0], atol=1e-5, rtol=1e-5)


def test_chunks_and_earlier_calls_change_nothing(model, forest):
    sequences, trees, rows, anchors = forest([12, 7, 12], [6, 5, 4, 3, 2, 1, 7])
    batch = TreeBatch.from_trees(trees)
    whole = model.tree_hidden(sequences, batch, rows, anchors)
    for max_tokens in (1, 16, 40):
        part = model.tree_hidden(sequences, batch, rows, anchors, max_tokens)
        torch.testing.assert_close(part[batch.valid], whole[batch.valid], atol=1e-5, rtol=0)
    assert torch.equal(model.tree_hidden(sequences, batch, rows, anchors), whole)


def test_sequences_come_along_in_the_same_forward(model, forest):
    sequences, trees, rows, anchors = forest([4, 9], [3, 3, 5])
    along, nodes = model.hidden_with_trees(sequences, TreeBatch.from_trees(trees), rows, anchors)
    alone = model.sequence_hidden(sequences, max_tokens=9)
    torch.testing.assert_close(along[0, :4], alone[0, :4], atol=1e-5, rtol=0)
    torch.testing.assert_close(along[1], alone[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(nodes[:, 0], along[rows, anchors], atol=0, rtol=0)


def test_a_row_without_trees_is_fine(model, forest):
    sequences, trees, rows, anchors = forest([6, 8], [4, 4])
    scores = model.score_trees(torch.stack([sequences[1]] * 2), [[], [int(anchors[1])]], [[], [trees[1]]])
    assert scores[0] == []
    assert_plain(model, sequences, [trees[1]], rows[1:], anchors[1:], scores[1])


def test_sampling_is_the_served_one(model, forest):
    (sequence,), trees, _, anchors = forest([10], [4])
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9)
    ours = model.score_trees(sequence, anchors, trees, sampling)[0]
    plain = process_logits(node_probs(model, sequence[: anchors[0] + 1], trees[0]).log(), sampling)
    torch.testing.assert_close(ours.exp(), plain.exp(), atol=1e-5, rtol=0)


def test_positions_are_anchor_plus_depth(model):
    """Siblings share a position: with two of them scored together or alone the numbers are the same."""
    both = model.score_trees([3, 4, 5], [2], [DraftTree([5, 8, 9], [-1, 0, 0])])[0]
    second = model.score_trees([3, 4, 5], [2], [DraftTree([5, 9], [-1, 0])])[0]
    torch.testing.assert_close(both[2], second[1], atol=1e-5, rtol=1e-5)


def test_array_likes_in_and_nothing_written(model):
    ids = np.array([3, 4, 5, 6])
    tree = DraftTree([4, 8], [-1, 0])
    first = model.score_trees(ids, np.array([1]), [tree])[0]
    first.zero_()
    assert ids.tolist() == [3, 4, 5, 6] and tree.token_ids.tolist() == [4, 8]
    assert model.score_trees(ids, [1], [tree])[0].abs().sum() > 0


def test_bfloat16_scores_are_float32_and_near():
    model = tiny_target(initializer_range=0.1)
    tree = random_tree(5, 6, torch.Generator().manual_seed(1))
    exact = model.score_trees([3, 4, 5], [2], [tree])[0]
    model.module.to(torch.bfloat16)
    half = model.score_trees([3, 4, 5], [2], [tree])[0]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.exp(), exact.exp(), atol=0.05, rtol=0)
    torch.testing.assert_close(half.exp().sum(-1), torch.ones(7), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("ids", "anchors", "tree", "message"),
    [
        ([3, 4], [2], DraftTree([5], [-1]), "anchor 2 lies outside"),
        ([3, 4], [1], DraftTree([5], [-1]), "root token 5; the sequence has 4"),
        ([3, 4], [1], DraftTree([4, 64], [-1, 0]), "0..63"),
        ([-1, 4], [1], DraftTree([4, 5], [-1, 0]), "0..63 for .*, found -1"),
        ([3, 4], [0, 1], DraftTree([4], [-1]), "2 anchors for 1 trees"),
        ([4] * 256, [255], DraftTree([4, 1], [-1, 0]), "passes the 256 positions"),
        ([[3, 4]], [0, 1], DraftTree([4], [-1]), "1 rows need"),
    ],
)
def test_what_does_not_fit_is_named(ids, anchors, tree, message):
    with pytest.raises(InputError, match=message):
        tiny_target().score_trees(ids, anchors, [tree])


def test_nan_weights_are_named():
    model = tiny_target()
    model.module.lm_head.weight.data[0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        model.score_trees([3, 4], [1], [DraftTree([4], [-1])])


def argmax_tokens(model, context, count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(plain_probs(model, context, tokens).argmax()))
    return tokens


def grafted(tree: DraftTree, tokens: list[int]) -> tuple[DraftTree, list[int]]:
    """The tree with a path of these tokens, and that path's nodes from the root on."""
    ids, parents, path = tree.token_ids.tolist(), tree.parents.tolist(), [0]
    for token in tokens:
        found = [i for i, parent in enumerate(parents) if parent == path[-1] and ids[i] == token]
        if not found:
            ids.append(token)
            parents.append(path[-1])
        path.append(found[0] if found else len(ids) - 1)
    return DraftTree(ids, parents), path


@pytest.mark.parametrize("max_tokens", [4096, 12])
def test_the_argmax_path_alone_is_run(model, forest, max_tokens):
    """Paths of 0 to 4 nodes in trees of other nodes, trees that end early, a path whose last node is not wanted."""
    sequences, trees, rows, anchors = forest([12, 7, 12], [6, 5, 4, 3, 2, 1, 7, 0])
    contexts = [sequences[row][: anchor + 1] for row, anchor in zip(rows, anchors, strict=True)]
    made = [
        grafted(tree, argmax_tokens(model, context, length))
        for tree, context, length in zip(trees, contexts, [4, 0, 3, 1, 2, 0, 4, 0], strict=True)
    ]
    batch = TreeBatch.from_trees([tree for tree, _ in made])
    wanted = batch.valid.clone()
    wanted[0, made[0][1][-1]] = False
    along, states, path = model.greedy_hidden(sequences, batch, rows, anchors, wanted, max_tokens)
    expected_along, expected = model.hidden_with_trees(sequences, batch, rows, anchors)
    for row, sequence in enumerate(sequences):
        ours, theirs = along[row, : len(sequence)], expected_along[row, : len(sequence)]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for r, (_, nodes) in enumerate(made):
        assert path[r].nonzero().flatten().tolist() == sorted(nodes)
    run = path & wanted
    torch.testing.assert_close(states[run], expected[run], atol=1e-5, rtol=0)
    assert not states[~run].any()


def test_siblings_that_repeat_the_path_s_token_are_refused(model):
    context = torch.tensor([3, 4, 5])
    (first,) = argmax_tokens(model, context, 1)
    tree = TreeBatch.from_trees([DraftTree([5, first, first, 7], [-1, 0, 0, 2], "iid")])
    with pytest.raises(InputError, match="siblings of a tree repeat a token"):
        model.greedy_hidden([context], tree, torch.tensor([0]), torch.tensor([2]), tree.valid)


def test_no_node_off_the_path_is_run(model, monkeypatch):
    """Sixty nodes, two of them on the path: three tokens of the sequence, then one token a level."""
    seen, forward = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: seen.append(tuple(ids.shape)) or forward(ids, *rest))
    context = torch.tensor([3, 4, 5])
    tree, _ = grafted(random_tree(5, 60, torch.Generator().manual_seed(1)), argmax_tokens(model, context, 2))
    batch, nothing = TreeBatch.from_trees([tree]), torch.tensor([0])
    seen.clear()
    _, _, path = model.greedy_hidden([context], batch, nothing, torch.tensor([2]), batch.valid)
    assert seen == [(1, 3)] + [(1, 1)] * (int(path.sum()) - 1)
    assert int(path.sum()) >= 3
