"""Trees are checked at birth; batches pad and unpad; twins merge."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import random_tree

from exittrain.errors import InputError
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([], [], "at least a root"),
        ([1, 2], [-1], "as many parents as tokens"),
        ([1, 2], [0, 0], r"parents\[0\] is 0"),
        ([1, 2, 3], [-1, 2, 0], "node 1 has parent 2; parents come before"),
        ([1, 2, 3], [-1, 0, 2], "node 2 has parent 2"),
        ([1, 2, 3], [-1, 0, -1], "node 2 has parent -1"),
        ([1, -2], [-1, 0], "node 1 has token -2"),
        ([1, 5, 6, 5], [-1, 0, 0, 0], "node 3 repeats token 5 among the children of node 0"),
        ([1.0, 2.0], [-1, 0], "whole numbers"),
        ([[1, 2]], [-1, 0], "1-D"),
        ([[1], [2, 3]], [-1, 0], "token_ids must be a 1-D list"),
        (["a", "b"], [-1, 0], "token_ids must be a 1-D list"),
    ],
)
def test_malformed_trees_name_the_node(tokens: Any, parents: Any, words: str) -> None:
    """cases.md 55: a cycle is an error, not a hang."""
    with pytest.raises(InputError, match=words):
        DraftTree(tokens, parents)


def test_inputs_are_copied() -> None:
    for tokens, parents in [
        (torch.tensor([1, 2]), torch.tensor([-1, 0])),
        (np.array([1, 2]), np.array([-1, 0])),
    ]:
        tree = DraftTree(tokens, parents)
        tokens[1], parents[1] = 9, 7
        assert (tree.token_ids.tolist(), tree.parents.tolist()) == ([1, 2], [-1, 0])


def test_unknown_way_of_drawing() -> None:
    with pytest.raises(InputError, match="drawn is 'sampled'"):
        DraftTree([1], [-1], "sampled")


def test_paths_and_children() -> None:
    tree = DraftTree([7, 1, 2, 3, 4], [-1, 0, 0, 1, 3])
    assert (tree.num_nodes, tree.children(0), tree.path(4), tree.path(0)) == (4, [1, 2], [1, 3, 4], [])
    assert tree.depths.tolist() == [0, 1, 1, 2, 3]


def test_batch_round_trip_and_visibility() -> None:
    rng = random.Random(0)
    trees = [random_tree(rng, 5, 4, rng.randrange(10)) for _ in range(20)]
    batch = TreeBatch.from_trees(trees)
    visible, has_children = batch.visible(), batch.has_children()
    for row, (tree, back) in enumerate(zip(trees, batch.trees(), strict=True)):
        assert torch.equal(tree.token_ids, back.token_ids) and torch.equal(tree.parents, back.parents)
        for node in range(tree.num_nodes + 1):
            assert visible[row, node].nonzero().flatten().tolist() == sorted({0, *tree.path(node)})
            assert bool(has_children[row, node]) == bool(tree.children(node))
        for node in range(tree.num_nodes + 1, visible.shape[1]):
            assert visible[row, node].nonzero().flatten().tolist() == [node] and not has_children[row, node]


def test_mixed_batches_are_refused() -> None:
    with pytest.raises(InputError, match="different ways"):
        TreeBatch.from_trees([DraftTree([1], [-1], "top"), DraftTree([1], [-1], "iid")])
    with pytest.raises(InputError, match="at least one tree"):
        TreeBatch.from_trees([])


def test_twins_merge_into_the_first_with_their_children() -> None:
    tree = DraftTree([0, 1, 1, 2, 2, 3, 2], [-1, 0, 0, 1, 2, 4, 2], "iid", [0.0, 1, 1, 2, 2, 3, 2])
    merged, kept = merge_twins(tree)
    assert kept.tolist() == [0, 1, 3, 5]
    assert (merged.token_ids.tolist(), merged.parents.tolist()) == ([0, 1, 2, 3], [-1, 0, 1, 2])
    assert merged.draft_logprobs is not None and merged.draft_logprobs.tolist() == [0, 1, 2, 3]
    assert merge_twins(merged)[0] is merged
