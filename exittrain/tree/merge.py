"""Twins, the repeated draws of an i.i.d. tree, merged: what fixed verifiers and the exit law work on."""

from __future__ import annotations

import torch
from torch import Tensor

from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


def merge_twins(tree: DraftTree) -> tuple[DraftTree, Tensor]:
    """The tree with siblings of one token merged into the first, and kept [N'+1]: each remaining node's old index.

    Children of a later twin become children of the first, after its own. A tree without twins comes back as it is.
    """
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    first: dict[tuple[int, int], int] = {}
    new_index, kept = [0], [0]
    links = [-1]
    for node in range(1, len(tokens)):
        parent = new_index[parents[node]]
        merged = first.setdefault((parent, tokens[node]), len(kept))
        if merged == len(kept):
            kept.append(node)
            links.append(parent)
        new_index.append(merged)
    index = torch.tensor(kept)
    if len(kept) == len(tokens):
        return tree, index
    scores = None if tree.draft_logprobs is None else tree.draft_logprobs[index]
    return DraftTree(tree.token_ids[index], links, tree.drawn, scores), index


def merge_batch(trees: TreeBatch) -> tuple[TreeBatch, Tensor]:
    """`merge_twins` for each of B trees: the merged batch, and columns [B, M'] of the nodes that stay (-1: padding).

    Only trees drawn i.i.d. have twins; others come back as they are.
    """
    device = trees.parents.device
    if trees.drawn != "iid":
        index = torch.arange(trees.parents.shape[1], device=device)
        return trees, torch.where(trees.valid, index, -1)
    merged, kept = zip(*(merge_twins(tree) for tree in trees.trees()), strict=True)
    columns = torch.nn.utils.rnn.pad_sequence(list(kept), batch_first=True, padding_value=-1)
    return TreeBatch.from_trees(merged, device), columns.to(device)
