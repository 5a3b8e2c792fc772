"""The sampled verifiers held to the target's law by enumeration: every tree that may be drawn, every way out of it.

Fractions throughout: == means exactly. What must fail to be exact is in test_sampled_broken.py.
"""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from enumeration import joint_law, sampled_trees, target_law
from fakes import Law, Prefix, random_law, sharpened
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins
from exittrain.verify.registry import get_verifier

Shape = dict[Prefix, int]
SHAPES: dict[str, Shape] = {
    "chain 1": {(): 1},
    "chain 2": {(): 1, (0,): 1},
    "chain 3": {(): 1, (0,): 1, (0, 0): 1},
    "2 children": {(): 2},
    "3 children": {(): 3},
    "ragged 2-1": {(): 2, (0,): 2, (1,): 1},
    "second child grows": {(): 2, (1,): 1, (1, 0): 1},
    "narrow, then wide": {(): 1, (0,): 2, (0, 1): 1},
}
BINARY: Shape = {(): 2, (0,): 2, (1,): 2}
DRAWN = ["iid", "without_replacement"]
FIXED = ["tev", "predraw", "residual"]


def rules(drawn: str, shape: Shape) -> list[str]:
    chain = max(shape.values()) == 1
    return ["rrs" if drawn == "iid" else "rrs_wor", "traversal", *(["block"] if chain else []), *FIXED]


def on_tokens(tokens: set[int], seed: int, vocab: int) -> Law:
    """A random law that knows no other tokens."""
    law = random_law(seed, vocab, zeros=0.0, sure=0.0)

    def narrowed(prefix: Prefix) -> list[F]:
        row = [F(p) if token in tokens else F(0) for token, p in enumerate(law(prefix))]
        return [p / sum(row) for p in row]

    return narrowed


def pair(kind: str, vocab: int) -> tuple[Law, Law]:
    """(target, drafter)."""
    target = random_law(5, vocab, zeros=0.25, sure=0.1)
    return {
        "open": lambda: (random_law(1, vocab, zeros=0.0, sure=0.0), random_law(2, vocab, zeros=0.0, sure=0.0)),
        "zeros and ones": lambda: (target, random_law(8, vocab, zeros=0.25, sure=0.1)),
        "same": lambda: (target, target),
        "sharper": lambda: (random_law(3, vocab, sure=0.0), sharpened(random_law(3, vocab, sure=0.0))),
        "disjoint": lambda: (on_tokens({0}, 6, vocab), on_tokens({1, 2}, 7, vocab)),
        "half disjoint": lambda: (on_tokens({0, 1}, 6, vocab), on_tokens({1, 2}, 7, vocab)),
    }[kind]()


def assert_exact(shape: Shape, drawn: str, target: Law, drafter: Law) -> None:
    length = max(len(ranks) for ranks in shape) + 2
    trees, wanted = list(sampled_trees(shape, drafter, drawn)), target_law(target, length)
    assert sum(chance for _, chance in trees) == 1
    for name in rules(drawn, shape):
        assert joint_law(get_verifier(name), trees, target, drafter, length) == wanted, name


@pytest.mark.parametrize("kind", ["open", "zeros and ones", "same", "sharper", "disjoint", "half disjoint"])
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("shape", SHAPES)
def test_joint_law_is_the_targets_exactly(shape: str, drawn: str, kind: str) -> None:
    """cases.md 30, 31, 40: all rules on the same sampled trees, three tokens; an i.i.d. tree keeps its twins."""
    assert_exact(SHAPES[shape], drawn, *pair(kind, 3))


@pytest.mark.parametrize(("drawn", "kind"), [("iid", "zeros and ones"), ("without_replacement", "open")])
def test_joint_law_on_binary_trees(drawn: str, kind: str) -> None:
    assert_exact(BINARY, drawn, *pair(kind, 3))


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("shape", [{(): 3}, {(): 2, (0,): 1}], ids=str)
def test_joint_law_of_four_tokens(shape: Shape, drawn: str) -> None:
    assert_exact(shape, drawn, *pair("open", 4))


@given(seed=st.integers(0, 10**6), drawn=st.sampled_from(DRAWN))
@settings(max_examples=15, deadline=None)
def test_joint_law_of_random_tables(seed: int, drawn: str) -> None:
    assert_exact({(): 2, (0,): 1}, drawn, random_law(seed, 3), random_law(seed + 1, 3))


@pytest.mark.parametrize("name", ["rrs_wor", "traversal"])
@pytest.mark.parametrize("shape", [{(): 3}, {(): 2, (0,): 1}], ids=str)
def test_twins_may_be_dropped_where_q_is_then_updated(name: str, shape: Shape) -> None:
    """I.i.d. draws, each token at its first appearance, with the without-replacement update."""
    target, drafter = pair("open", 3)
    trees = [(dropped(tree), chance) for tree, chance in sampled_trees(shape, drafter, "iid")]
    length = max(len(ranks) for ranks in shape) + 2
    assert joint_law(get_verifier(name), trees, target, drafter, length) == target_law(target, length)


def dropped(tree: DraftTree) -> DraftTree:
    merged, _ = merge_twins(tree)
    return DraftTree(merged.token_ids, merged.parents, "without_replacement")
