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
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_batch, merge_twins


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


def test_kept_nodes_move_together_under_their_own_parents() -> None:
    rng = random.Random(1)
    trees = [random_tree(rng, 5, 4, rng.randrange(1, 12)) for _ in range(20)]
    batch = TreeBatch.from_trees(trees)
    chosen = batch.valid & (torch.rand(batch.parents.shape, generator=torch.Generator().manual_seed(0)) < 0.7)
    chosen[:, 0] = True
    for node in range(1, chosen.shape[1]):  # parents come first
        chosen[:, node] &= chosen.gather(1, batch.parent_index())[:, node]
    kept, columns = batch.keep(chosen)
    assert kept.token_ids.shape[1] == int(chosen.sum(1).max()) and torch.equal(columns >= 0, kept.valid)
    for row, (tree, small) in enumerate(zip(trees, kept.trees(), strict=True)):
        index = columns[row, : small.num_nodes + 1].tolist()
        assert index == chosen[row].nonzero().flatten().tolist()
        assert small.token_ids.tolist() == tree.token_ids[index].tolist()
        assert [index[p] for p in small.parents.tolist()[1:]] == tree.parents[index].tolist()[1:]
    whole, places = batch.keep(batch.valid)
    assert torch.equal(whole.parents, batch.parents) and torch.equal(places >= 0, batch.valid)


def test_a_batch_of_twins_merges_row_by_row() -> None:
    rng = random.Random(2)
    trees = [random_tree(rng, 2, 3, 9, "iid") for _ in range(12)]
    merged, columns = merge_batch(TreeBatch.from_trees(trees))
    assert merged.drawn == "iid" and torch.equal(columns >= 0, merged.valid)
    for row, (tree, ours) in enumerate(zip(trees, merged.trees(), strict=True)):
        single, kept = merge_twins(tree)
        assert torch.equal(ours.token_ids, single.token_ids) and torch.equal(ours.parents, single.parents)
        assert columns[row, : len(kept)].tolist() == kept.tolist()
    fixed = TreeBatch.from_trees([DraftTree([0, 1], [-1, 0], "top"), DraftTree([0], [-1], "top")])
    same, columns = merge_batch(fixed)
    assert same is fixed and columns.tolist() == [[0, 1], [0, -1]]


def test_draft_rows_are_found_and_scaled() -> None:
    probs = torch.tensor([[0.2, 0.2], [0.0, 0.3], [0.5, 0.25]])
    rows = DraftRows(probs, torch.tensor([[1, -1, 0], [2, -1, -1]]))
    assert rows.of_tree(0, 2).tolist() == [[0.0, 1.0], [0.0, 0.0], [0.5, 0.5]]
    assert rows.of_tree(1, 1)[0].tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-12)
    picked = rows.select(torch.tensor([1, 0]), torch.tensor([[0, -1], [2, 0]]))
    assert picked.row_of.tolist() == [[2, -1], [0, 1]] and picked.probs is probs
    with pytest.raises(InputError, match="names row 3; probs has 3"):
        DraftRows(probs, torch.tensor([[3]]))
    with pytest.raises(InputError, match=r"need probs \[R, V\]"):
        DraftRows(probs, torch.tensor([[0.0]]))
