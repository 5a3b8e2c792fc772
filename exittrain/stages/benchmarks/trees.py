"""Trees to verify: a shape and a drafter of the kind that serve, so that rules which stop early stop where they would.

Shapes: B trees, M = N+1 nodes with the root, R nodes with children in a tree, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.build.fill import Path
from exittrain.build.ranked import ranked_shape
from exittrain.law.seeding import generator_for
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree

TREES = 8  # of a cell, at least
DEPTH = 8  # deepest level of the shape
ACCEPTANCE = tuple(0.6 / (rank + 1) ** 2 for rank in range(64))  # by rank: a power law, as Sequoia observed
# A target of about 1.4 nats whose best token has 0.6, and a drafter whose token it accepts two times in three (the sum
# of min(p, q)). Logits of spread 4 would have 5 nats over 152k tokens: trees would end at their first level.
SPREAD, NOISE = 8.0, 1.4


@dataclass(frozen=True, eq=False)
class VerifyCase:
    """B trees drawn without replacement from a drafter, and the target's logits [B, M, V] bfloat16 at their nodes.

    draft_rows: what the children were drawn from, B * R rows.
    """

    trees: TreeBatch
    target_logits: Tensor
    draft_rows: DraftRows


def tree_parents(num_nodes: int) -> list[int]:
    """The parents [N+1] of Sequoia's best shape for the acceptance above."""
    column: dict[Path, int] = {(): 0}
    for path in ranked_shape(ACCEPTANCE, num_nodes, DEPTH):
        column[path] = len(column)
    return [-1] + [column[path[:-1]] for path in column if path]


def num_cases(batch: int) -> int:
    """Cases of a cell: TREES trees at least, for how long a rule that stops early takes depends on the tree."""
    return -(-TREES // batch)


def make_cases(nodes: int, vocab: int, batch: int, device: str | torch.device = "cpu") -> list[VerifyCase]:
    """The cases of one cell, all of one shape."""
    return [make_case(nodes, vocab, batch, device, number) for number in range(num_cases(batch))]


def make_case(nodes: int, vocab: int, batch: int, device: str | torch.device = "cpu", number: int = 0) -> VerifyCase:
    """Always the same for the same arguments. nodes < vocab, or children run out of tokens."""
    generator = generator_for(0, "bench", "verify", nodes, vocab, batch, number)
    parents = tree_parents(nodes)
    inner = sorted(set(parents[1:]))
    trees = []
    logits = torch.empty((batch, nodes + 1, vocab), dtype=torch.bfloat16)
    probs = torch.empty((batch, len(inner), vocab))
    for row in range(batch):  # tree by tree: in float32 all of them at once would be the largest thing in memory
        scores = SPREAD * torch.randn((nodes + 1, vocab), generator=generator)
        logits[row] = scores
        drafted = scores[inner]
        drafted += NOISE * torch.randn(drafted.shape, generator=generator)
        torch.softmax(drafted, -1, out=probs[row])
        trees.append(_drawn(parents, inner, probs[row], generator))
    row_of = torch.full((batch, nodes + 1), -1)
    row_of[:, inner] = torch.arange(batch * len(inner)).view(batch, -1)
    return VerifyCase(
        TreeBatch.from_trees(trees, device),
        logits.to(device),
        DraftRows(probs.flatten(0, 1).to(device), row_of.to(device)),
    )


def _drawn(parents: list[int], inner: list[int], probs: Tensor, generator: torch.Generator) -> DraftTree:
    """The shape filled from the rows [R, V] of its inner nodes; torch returns such draws in the order they came."""
    children: dict[int, list[int]] = {node: [] for node in inner}
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    tokens = [0] * len(parents)
    for own, places in zip(probs, children.values(), strict=True):
        drawn = torch.multinomial(own, len(places), generator=generator).tolist()
        for node, token in zip(places, drawn, strict=True):
            tokens[node] = token
    return DraftTree(tokens, parents, "without_replacement")
