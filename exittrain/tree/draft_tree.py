"""One draft tree: tokens and parents, checked once, at birth.

Shapes: N drafted nodes, so N+1 nodes with the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exittrain.errors import InputError

# How a tree's children came to be; a verifier asks this before it accepts a tree.
DRAWN = ("top", "iid", "without_replacement", None)


def as_ids(values: Any, name: str) -> Tensor:
    """Any 1-D array-like of whole numbers as a fresh int64 CPU tensor."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be a 1-D list of whole numbers, got {type(values).__name__}") from None
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != 1 or not (whole or tensor.numel() == 0):
        raise InputError(f"{name} must be a 1-D list of whole numbers, got shape {tuple(tensor.shape)} {tensor.dtype}")
    return tensor.detach().to("cpu", torch.int64, copy=True)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A root and N drafted nodes; parents come before children (math.md section 1).

    token_ids: [N+1] the root first (the context's last token); parents: [N+1] with parents[0] == -1.
    drawn: "top" (chosen by score), "iid" or "without_replacement" (children drawn from the drafter, kept in draw
    order), or None (made by hand: the caller answers for it).
    draft_logprobs: [N+1] log q of each node's token at its parent (root 0), where the builder knew it.
    Raises InputError, naming the node, on: wrong lengths, a parent that does not come first, a negative token,
    two siblings with one token (except in an i.i.d. tree, where draws may repeat).
    """

    token_ids: Tensor
    parents: Tensor
    drawn: str | None = None
    draft_logprobs: Tensor | None = None
    depths: Tensor = field(init=False, repr=False)

    def __init__(
        self,
        token_ids: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        drawn: str | None = None,
        draft_logprobs: Sequence[float] | Tensor | None = None,
    ) -> None:
        tokens, links = as_ids(token_ids, "token_ids"), as_ids(parents, "parents")
        if drawn not in DRAWN:
            raise InputError(f"drawn is {drawn!r}; it must be one of {', '.join(map(repr, DRAWN))}")
        scores = None
        if draft_logprobs is not None:
            scores = torch.as_tensor(draft_logprobs).detach().to("cpu", torch.float32, copy=True)
            if scores.shape != tokens.shape:
                raise InputError(f"draft_logprobs has shape {tuple(scores.shape)}; token_ids has {tuple(tokens.shape)}")
        object.__setattr__(self, "token_ids", tokens)
        object.__setattr__(self, "parents", links)
        object.__setattr__(self, "drawn", drawn)
        object.__setattr__(self, "draft_logprobs", scores)
        object.__setattr__(self, "depths", torch.tensor(_checked_depths(tokens, links, drawn)))

    @property
    def num_nodes(self) -> int:
        """N: drafted nodes, the root not counted."""
        return int(self.token_ids.numel()) - 1

    def children(self, node: int) -> list[int]:
        """Indices of a node's children, in draft order."""
        return [int(i) for i in (self.parents == node).nonzero().flatten()]

    def path(self, node: int) -> list[int]:
        """Indices from depth 1 down to `node`; empty for the root."""
        steps: list[int] = []
        while node > 0:
            steps.append(node)
            node = int(self.parents[node])
        return steps[::-1]


def _checked_depths(tokens: Tensor, parents: Tensor, drawn: str | None) -> list[int]:
    if tokens.shape != parents.shape or tokens.numel() == 0:
        raise InputError(
            f"a tree needs as many parents as tokens and at least a root, got {tokens.numel()} and {parents.numel()}"
        )
    links, ids = parents.tolist(), tokens.tolist()
    if links[0] != -1:
        raise InputError(f"parents[0] is {links[0]}; the root comes first and its parent is -1")
    depths, seen = [0], set[tuple[int, int]]()
    if ids[0] < 0:
        raise InputError(f"node 0 has token {ids[0]}; token ids are not negative")
    for node in range(1, len(ids)):
        parent, token = links[node], ids[node]
        if not 0 <= parent < node:
            raise InputError(f"node {node} has parent {parent}; parents come before their children")
        if token < 0:
            raise InputError(f"node {node} has token {token}; token ids are not negative")
        if (parent, token) in seen and drawn != "iid":
            raise InputError(f"node {node} repeats token {token} among the children of node {parent}")
        seen.add((parent, token))
        depths.append(depths[parent] + 1)
    return depths
