"""The cache after accepted paths equals one that never saw the tree."""

from __future__ import annotations

import torch
from tiny_models import node_probs, plain_probs, random_tree

from exittrain.models.cache import TreeCache
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


def logits_after(model, cache, tokens):
    hidden = cache.extend([torch.tensor([token]) for token in tokens])
    return model.head(hidden[:, 0]).softmax(-1)


def test_rows_of_different_lengths_extend_alike(model):
    cache = TreeCache(model, 2)
    cache.extend([torch.tensor([3, 4, 5]), torch.tensor([6])])
    hidden = cache.extend([torch.tensor([7]), torch.tensor([8, 9, 10])])
    assert cache.lengths.tolist() == [4, 4]
    torch.testing.assert_close(
        model.head(hidden[0, 0]).softmax(-1), plain_probs(model, [3, 4, 5, 7]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        model.head(hidden[1, 2]).softmax(-1), plain_probs(model, [6, 8, 9, 10]), atol=1e-5, rtol=0
    )
    assert cache.extend([torch.tensor([]), torch.tensor([])]).shape[1] == 0


def test_accepting_other_branches_in_each_row(model):
    """Nodes (0, 3) of one row and (1,) of the other: gathered, not cropped to a length."""
    contexts = [[3, 4, 5], [6]]
    trees = [DraftTree([7, 8, 9, 10, 11], [-1, 0, 0, 1, 3]), DraftTree([12, 13, 14], [-1, 0, 0])]
    cache = TreeCache(model, 2)
    cache.extend([torch.tensor(context) for context in contexts])
    hidden = cache.score(TreeBatch.from_trees(trees))
    for row, tree in enumerate(trees):
        plain = node_probs(model, torch.tensor([*contexts[row], int(tree.token_ids[0])]), tree)
        torch.testing.assert_close(model.head(hidden[row, : len(plain)]).softmax(-1), plain, atol=1e-5, rtol=0)
    cache.accept([[1, 3], [2]])
    assert cache.lengths.tolist() == [6, 3] and cache.num_columns == 6
    probs = logits_after(model, cache, [20, 21])
    torch.testing.assert_close(probs[0], plain_probs(model, [3, 4, 5, 7, 8, 10, 20]), atol=1e-5, rtol=0)
    torch.testing.assert_close(probs[1], plain_probs(model, [6, 12, 14, 21]), atol=1e-5, rtol=0)


def test_many_rounds_selection_and_crop(model):
    generator = torch.Generator().manual_seed(3)
    contexts = [torch.randint(64, (n,), generator=generator).tolist() for n in (2, 5, 9)]
    cache = TreeCache(model, 3)
    cache.extend([torch.tensor(context) for context in contexts])
    for _ in range(6):
        trees = [random_tree(1, int(torch.randint(9, (1,), generator=generator)), generator) for _ in contexts]
        cache.score(TreeBatch.from_trees(trees))
        ends = [int(torch.randint(tree.num_nodes + 1, (1,), generator=generator)) for tree in trees]
        paths = [tree.path(end) for tree, end in zip(trees, ends, strict=True)]
        cache.accept(paths)
        for context, tree, path in zip(contexts, trees, paths, strict=True):
            context += [1, *tree.token_ids[path].tolist()]
    assert cache.lengths.tolist() == [len(context) for context in contexts]
    assert cache.num_columns == max(map(len, contexts))
    cache.select_rows(torch.tensor([2, 0]))
    contexts = [contexts[2], contexts[0]]
    cache.crop(torch.tensor([len(contexts[0]) - 2, len(contexts[1])]))
    contexts[0] = contexts[0][:-2]
    probs = logits_after(model, cache, [30, 31])
    for row, last in enumerate((30, 31)):
        torch.testing.assert_close(probs[row], plain_probs(model, [*contexts[row], last]), atol=1e-5, rtol=0)


def test_rollback_leaves_no_trace(model):
    cache = TreeCache(model, 1)
    cache.extend([torch.tensor([3, 4])])
    cache.score(TreeBatch.from_trees([DraftTree([5, 6, 7], [-1, 0, 1])]))
    cache.rollback()
    assert cache.num_columns == 2
    torch.testing.assert_close(logits_after(model, cache, [8])[0], plain_probs(model, [3, 4, 8]), atol=1e-5, rtol=0)


def test_one_token_prompt_starts_from_an_empty_cache(model):
    cache = TreeCache(model, 2)
    cache.extend([torch.tensor([]), torch.tensor([3])])
    hidden = cache.score(TreeBatch.from_trees([DraftTree([5], [-1]), DraftTree([6, 7], [-1, 0])]))
    torch.testing.assert_close(model.head(hidden[0, 0]).softmax(-1), plain_probs(model, [5]), atol=1e-5, rtol=0)
    torch.testing.assert_close(model.head(hidden[1, 1]).softmax(-1), plain_probs(model, [3, 6, 7]), atol=1e-5, rtol=0)
