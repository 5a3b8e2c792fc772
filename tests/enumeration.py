"""Exactness by enumeration (math.md section 5): the joint law of blocks, extended by the target, is the target's."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from fakes import Law, Logits, Prefix
from scipy.stats import chisquare
from torch import Tensor

from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.base import Verifier


def rows_of(tree: DraftTree, law: Law) -> list[list[Any]]:
    """target_probs [N+1][V] of a tree under a law."""
    tokens = tree.token_ids.tolist()
    return [list(law(tuple(tokens[step] for step in tree.path(node)))) for node in range(tree.num_nodes + 1)]


def draft_rows_of(tree: DraftTree, law: Law) -> list[list[Any]]:
    """draft_probs [N+1][V] of a tree under a law: zeros at leaves, where nothing was drawn."""
    tokens, parents = tree.token_ids.tolist(), set(tree.parents.tolist())
    nothing = [Fraction(0)] * len(law(()))
    return [
        list(law(tuple(tokens[step] for step in tree.path(node)))) if node in parents else nothing
        for node in range(tree.num_nodes + 1)
    ]


def target_law(law: Law, length: int) -> dict[Prefix, Any]:
    """The target's own law of its next `length` tokens."""
    return extended({(): Fraction(1)}, law, length)


def extended(blocks: dict[Prefix, Any], law: Law, length: int) -> dict[Prefix, Any]:
    """Blocks continued by the target to `length` tokens (a longer one is cut)."""
    joint: dict[Prefix, Any] = {}
    pending = list(blocks.items())
    while pending:
        tokens, probability = pending.pop()
        if len(tokens) >= length:
            joint[tokens[:length]] = joint.get(tokens[:length], 0) + probability
        else:
            pending += [((*tokens, x), probability * p) for x, p in enumerate(law(tokens)) if p > 0]
    return joint


def random_tree(rng: random.Random, vocab: int, depth: int, num_nodes: int, drawn: str | None = None) -> DraftTree:
    """Any tree: children in any order; twins where drawn is "iid"."""
    tokens, parents, depths = [0], [-1], [0]
    for _ in range(num_nodes):
        parent = rng.choice([node for node in range(len(tokens)) if depths[node] < depth])
        token = rng.randrange(vocab)
        taken = (parent, token) in zip(parents, tokens, strict=True)
        if taken and drawn != "iid":
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree(tokens, parents, drawn)


def sampled_children(probs: list[Any], count: int, drawn: str) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every ordered draw of `count` children with its probability; without replacement never more than there are."""
    if drawn == "iid":
        for tokens in itertools.product(range(len(probs)), repeat=count):
            if all(probs[token] > 0 for token in tokens):
                yield tokens, math.prod(probs[token] for token in tokens)
        return
    possible = [token for token, chance in enumerate(probs) if chance > 0]
    for tokens in itertools.permutations(possible, min(count, len(possible))):
        chance = Fraction(1)
        for turn, token in enumerate(tokens):
            chance = chance * probs[token] / sum(probs[other] for other in possible if other not in tokens[:turn])
        yield tokens, chance


def sampled_trees(
    shape: dict[Prefix, int], drafter: Law, drawn: str = "without_replacement"
) -> Iterator[tuple[DraftTree, Any]]:
    """Every tree of a shape whose children are drawn from the drafter, in draw order, with its probability.

    shape: rank path of a node (its parent's draws in order) -> its number of children. drawn: "iid" (twins are kept,
    each with its own children) or "without_replacement".
    """

    def grow(pending: list[tuple[Prefix, Prefix, int]], tokens: list[int], parents: list[int]) -> Iterator[Any]:
        if not pending:
            yield DraftTree(tokens, parents, drawn), Fraction(1)
            return
        (ranks, prefix, node), *rest = pending
        count = shape.get(ranks, 0)
        draws = sampled_children(list(drafter(prefix)), count, drawn) if count else [((), Fraction(1))]
        for children, chance in draws:
            new = [((*ranks, rank), (*prefix, token), len(tokens) + rank) for rank, token in enumerate(children)]
            for tree, below in grow([*rest, *new], tokens + list(children), parents + [node] * len(children)):
                yield tree, chance * below

    return grow([((), (), 0)], [0], [-1])


def draw_tree(shape: dict[Prefix, int], drafter: Law, drawn: str, rng: random.Random) -> DraftTree:
    """One of `sampled_trees`, at random; for vocabularies that cannot be enumerated."""
    tokens, parents, pending = [0], [-1], [((), (), 0)]
    while pending:
        ranks, prefix, node = pending.pop(0)
        weights = [float(p) for p in drafter(prefix)] if ranks in shape else []
        for rank in range(shape.get(ranks, 0)):
            if not any(weights):
                break
            (token,) = rng.choices(range(len(weights)), weights)
            pending.append(((*ranks, rank), (*prefix, token), len(tokens)))
            tokens.append(token)
            parents.append(node)
            weights[token] = weights[token] if drawn == "iid" else 0.0
    return DraftTree(tokens, parents, drawn)


def joint_law(
    verifier: Verifier, trees: Iterable[tuple[DraftTree, Any]], target: Law, drafter: Law, length: int
) -> dict[Prefix, Any]:
    """The law of the first `length` tokens: a block of a tree at random, continued by the target."""
    blocks: dict[Prefix, Any] = {}
    for tree, chance in trees:
        for block, probability in verifier.block_law(tree, rows_of(tree, target), draft_rows_of(tree, drafter)).items():
            blocks[block] = blocks.get(block, 0) + chance * probability
    return extended(blocks, target, length)


def distance(left: dict[Any, Any], right: dict[Any, Any]) -> float:
    """Total variation."""
    return float(sum(abs(left.get(key, 0) - right.get(key, 0)) for key in left.keys() | right.keys())) / 2


def as_batch(trees: list[DraftTree], target: Logits, drafter: Law) -> tuple[TreeBatch, Tensor, DraftRows]:
    """Trees side by side, their raw logits [B, M, V] (NaN where padded) and the rows their children were drawn from."""
    batch, prefixes = TreeBatch.from_trees(trees), dict[Prefix, int]()
    vocab = len(target(()))
    logits = torch.full((*batch.parents.shape, vocab), torch.nan)
    row_of = torch.full_like(batch.parents, -1)
    parents = batch.has_children()
    for row, tree in enumerate(trees):
        tokens = tree.token_ids.tolist()
        for node in range(tree.num_nodes + 1):
            prefix = tuple(tokens[step] for step in tree.path(node))
            logits[row, node] = target(prefix)
            if parents[row, node]:
                row_of[row, node] = prefixes.setdefault(prefix, len(prefixes))
    probs = [[float(p) for p in drafter(prefix)] for prefix in prefixes]
    return batch, logits, DraftRows(torch.tensor(probs).reshape(-1, vocab), row_of)


def chi_square(draws: Iterable[Any], law: dict[Any, Any]) -> float:
    """p-value of draws against a law; 0 where something impossible was drawn."""
    counts = Counter(draws)
    if not set(counts) <= set(law):
        return 0.0
    total = sum(counts.values())
    keys = sorted(law, key=lambda key: float(law[key]))
    expected = np.array([float(law[key]) for key in keys]) * total
    observed = np.array([counts[key] for key in keys])
    # Rare outcomes share a cell: chi-square wants at least a handful expected in each.
    rare = max(1, int(np.searchsorted(np.cumsum(expected), 8.0)) + 1)
    expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    observed = np.concatenate([[observed[:rare].sum()], observed[rare:]])
    if len(expected) < 2:
        return 1.0
    return float(chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue)


def mean_length(law: dict[Prefix, Any]) -> Any:
    return sum(len(block) * probability for block, probability in law.items())


def coverage_by_force(law: Law, vocab: int, depth: int, budget: int) -> float:
    """C*(N) by trying every prefix-closed set of `budget` prefixes of at most `depth` tokens."""
    best = 0.0

    def reach(prefix: Prefix) -> float:
        return math.prod(float(law(prefix[:i])[x]) for i, x in enumerate(prefix))

    def search(chosen: tuple[Prefix, ...], candidates: list[Prefix], total: float) -> None:
        nonlocal best
        best = max(best, total)
        if len(chosen) == budget:
            return
        for index, prefix in enumerate(candidates):
            children = [(*prefix, x) for x in range(vocab)] if len(prefix) < depth else []
            search((*chosen, prefix), candidates[index + 1 :] + children, total + reach(prefix))

    search((), [(x,) for x in range(vocab)], 0.0)
    return best
