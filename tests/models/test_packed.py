"""Packed rows: layout, masks, positions, gradients, and equality with plain forwards."""

from __future__ import annotations

import torch
from tiny_models import node_probs, tiny_target

from exittrain.models.packed import pack, pack_plain
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


def test_layout_of_a_small_row():
    sequences = [torch.tensor([10, 11, 12, 13]), torch.tensor([20, 21])]
    trees = [DraftTree([11, 1, 2, 3], [-1, 0, 0, 2]), DraftTree([21, 4], [-1, 0]), DraftTree([12], [-1])]
    packed = pack(sequences, TreeBatch.from_trees(trees), torch.tensor([0, 1, 0]), torch.tensor([1, 1, 2]))
    assert packed.input_ids.tolist() == [[10, 11, 12, 13, 1, 2, 3], [20, 21, 4, 0, 0, 0, 0]]
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 2, 2, 3]  # anchor + depth, not the column
    assert packed.position_ids[1, :3].tolist() == [0, 1, 2]
    assert packed.columns.tolist() == [[1, 4, 5, 6], [1, 2, 1, 1], [2, 2, 2, 2]]
    seen = packed.mask[:, 0] == 0
    assert seen[0, 6].nonzero().flatten().tolist() == [0, 1, 5, 6]  # up to the anchor, its parent, itself
    assert seen[0, 3].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert seen.any(-1).all()  # no row is empty: a softmax over nothing is NaN
    assert torch.isfinite(packed.mask).all()


def test_rows_equal_plain_forwards(model, forest):
    sequences, trees, rows, anchors = forest([5, 9, 14], [7, 3, 6, 0, 5, 1, 4])
    packed = pack(sequences, TreeBatch.from_trees(trees), rows, anchors)
    hidden = model.hidden(packed.input_ids, packed.position_ids, packed.mask)
    probs = model.head(packed.gather(hidden)).softmax(-1)
    for r, tree in enumerate(trees):
        plain = node_probs(model, sequences[rows[r]][: anchors[r] + 1], tree)
        torch.testing.assert_close(probs[r, : tree.num_nodes + 1], plain, atol=1e-5, rtol=0)
    # The sequences' own rows know nothing of the trees behind them.
    alone = model.hidden(pack_plain(sequences).input_ids)
    for s, sequence in enumerate(sequences):
        torch.testing.assert_close(hidden[s, : len(sequence)], alone[s, : len(sequence)], atol=1e-5, rtol=0)


def test_tree_batch_size_does_not_matter(model, forest):
    """Two samples packed together give what each gives alone."""
    sequences, trees, rows, anchors = forest([6, 11], [4, 2])
    together = pack(sequences, TreeBatch.from_trees(trees), rows, anchors)
    states = together.gather(model.hidden(together.input_ids, together.position_ids, together.mask))
    for r, tree in enumerate(trees):
        alone = pack([sequences[rows[r]]], TreeBatch.from_trees([tree]), torch.tensor([0]), anchors[r : r + 1])
        single = alone.gather(model.hidden(alone.input_ids, alone.position_ids, alone.mask))[0]
        torch.testing.assert_close(states[r, : tree.num_nodes + 1], single, atol=1e-5, rtol=0)


def test_gradient_reaches_the_path_and_nothing_else(forest):
    model = tiny_target()
    sequences, (tree,), rows, anchors = forest([8], [6])
    packed = pack(sequences, TreeBatch.from_trees([tree]), rows, anchors)
    embedded = []
    hook = model.embeddings.register_forward_hook(lambda _, __, out: embedded.append(out.requires_grad_()) or out)
    leaf = int(tree.depths.argmax())
    model.head(
        packed.gather(model.hidden(packed.input_ids, packed.position_ids, packed.mask))[0, leaf]
    ).sum().backward()
    hook.remove()
    touched = embedded[0].grad[0].abs().sum(-1).nonzero().flatten().tolist()
    path = [int(packed.columns[0, node]) for node in tree.path(leaf)]
    assert touched == sorted([*range(int(anchors[0]) + 1), *path])
