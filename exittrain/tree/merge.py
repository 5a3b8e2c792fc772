"""Twins, the repeated draws of an i.i.d. tree, merged: what fixed verifiers and the exit law work on."""

from __future__ import annotations

import torch
from torch import Tensor

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
