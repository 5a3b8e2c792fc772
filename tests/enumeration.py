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
from fakes import Law, Prefix
from scipy.stats import chisquare

from exittrain.tree.draft_tree import DraftTree


def rows_of(tree: DraftTree, law: Law) -> list[list[Any]]:
    """target_probs [N+1][V] of a tree under a law."""
    tokens = tree.token_ids.tolist()
    return [list(law(tuple(tokens[step] for step in tree.path(node)))) for node in range(tree.num_nodes + 1)]


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


def sampled_children(probs: list[Fraction], count: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every ordered draw of `count` children without replacement, with its probability."""
    for tokens in itertools.permutations(range(len(probs)), count):
        chance, left = Fraction(1), Fraction(1)
        for token in tokens:
            chance, left = chance * (probs[token] / left if left else 0), left - probs[token]
        if chance > 0:
            yield tokens, chance


def sampled_trees(shape: dict[Prefix, int], drafter: Law) -> Iterator[tuple[DraftTree, Fraction]]:
    """Every tree of a shape whose children are drawn without replacement, with its probability.

    shape: rank path of a node (its parent's draws in order) -> its number of children.
    """

    def grow(pending: list[tuple[Prefix, Prefix, int]], tokens: list[int], parents: list[int]) -> Iterator[Any]:
        if not pending:
            yield DraftTree(tokens, parents, "without_replacement"), Fraction(1)
            return
        (ranks, prefix, node), *rest = pending
        count = shape.get(ranks, 0)
        draws = sampled_children(list(drafter(prefix)), count) if count else [((), Fraction(1))]
        for drawn, chance in draws:
            new = [((*ranks, rank), (*prefix, token), len(tokens) + rank) for rank, token in enumerate(drawn)]
            for tree, below in grow([*rest, *new], tokens + list(drawn), parents + [node] * len(drawn)):
                yield tree, chance * below

    return grow([((), (), 0)], [0], [-1])


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
