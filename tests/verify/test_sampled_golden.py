"""Golden values, the papers' own numbers, and what the verifiers have to do with each other; Fractions throughout."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
from enumeration import draft_rows_of, random_tree, rows_of, sampled_trees
from fakes import Law, Prefix, random_law, table_law
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fixed_exactness import GOLDEN_TARGET

from exittrain.tree.draft_tree import DraftTree
from exittrain.verify import traversal
from exittrain.verify.registry import get_verifier
from exittrain.verify.sampled import acceptance, rejected
from exittrain.verify.traversal import Traversal

Shape = dict[Prefix, int]
CHAIN_1: Shape = {(): 1}
CHAIN_2: Shape = {(): 1, (0,): 1}

DRAFTER = table_law(
    {
        (): (F(3, 4), F(1, 4)), (0,): (F(1, 4), F(3, 4)), (1,): (F(1, 2), F(1, 2)),
        **{(a, b): (F(1, 2), F(1, 2)) for a in (0, 1) for b in (0, 1)},
    }
)  # fmt: skip
TWO_ONE: Shape = {(): 2, (0,): 2, (1,): 1}
GOLDEN: list[tuple[Shape, str, dict[str, F]]] = [
    (CHAIN_1, "iid", {"rrs": F(33, 20), "traversal": F(33, 20), "block": F(33, 20), "tev": F(29, 20)}),
    (CHAIN_1, "without_replacement", {"rrs_wor": F(33, 20), "traversal": F(33, 20), "tev": F(29, 20)}),
    (CHAIN_2, "iid", {"rrs": F(259, 120), "traversal": F(539, 240), "block": F(539, 240)}),
    (CHAIN_2, "without_replacement", {"rrs_wor": F(259, 120), "traversal": F(539, 240), "tev": F(67, 40)}),
    ({(): 2}, "iid", {"rrs": F(139, 80), "traversal": F(139, 80)}),
    ({(): 2}, "without_replacement", {"rrs_wor": F(2), "traversal": F(2), "tev": F(2)}),
    (TWO_ONE, "without_replacement", {"rrs_wor": F(353, 120), "traversal": F(353, 120), "tev": F(109, 40)}),
    (TWO_ONE, "iid", {"rrs": F(227, 96), "traversal": F(1171, 480)}),
]


@pytest.mark.parametrize(("shape", "drawn", "lengths"), GOLDEN, ids=str)
def test_golden_block_lengths(shape: Shape, drawn: str, lengths: dict[str, F]) -> None:
    totals = dict.fromkeys(lengths, F(0))
    for tree, chance in sampled_trees(shape, DRAFTER, drawn):
        rows = rows_of(tree, GOLDEN_TARGET), draft_rows_of(tree, DRAFTER)
        for name in lengths:
            totals[name] += chance * get_verifier(name).expected_block_length(tree, *rows)
    assert totals == lengths


def exits_of(name: str, tree: DraftTree, target: Any, draft: Any) -> dict[int, Any]:
    return {way.node: way.probability for way in get_verifier(name).ways(tree, target, draft)[1]}


P, Q = [F(3, 10), F(4, 10), F(3, 10)], [F(6, 10), F(3, 10), F(1, 10)]


def test_the_numbers_of_the_traversal_paper() -> None:
    """Section 3: w(X1) = 1/2, w(X3) = 2/3; X3 rejected leaves w(X1) = 1/11 and w(X4) = 7/11; then X1 is skipped."""
    tree = DraftTree([0, 0, 1, 2], [-1, 0, 1, 1], "without_replacement")
    exits = exits_of("traversal", tree, [P] * 4, [Q] * 4)
    assert exits == {2: F(2, 3), 3: F(1, 3) * F(7, 11), 1: 0, 0: F(1, 3) * F(4, 11)}
    alone = DraftTree([0, 0, 1], [-1, 0, 1], "without_replacement")
    assert exits_of("traversal", alone, [P] * 3, [Q] * 3) == {2: F(2, 3), 1: F(1, 3) * F(1, 11), 0: F(1, 3) * F(10, 11)}
    assert exits_of("rrs_wor", alone, [P] * 3, [Q] * 3) == {0: F(1, 2), 1: 0, 2: F(1, 2)}


def test_the_single_level_of_the_paper() -> None:
    """Its example of RRS: a rejected, b is accepted with 4/9, c always."""
    tree = DraftTree([0, 0, 1, 2], [-1, 0, 0, 0], "without_replacement")
    for name in ("rrs_wor", "traversal"):
        exits = exits_of(name, tree, [P] * 4, [Q] * 4)
        assert exits == {0: 0, 1: F(1, 2), 2: F(1, 2) * F(4, 9), 3: F(1, 2) * F(5, 9)}


def test_the_order_of_traversal() -> None:
    """Its figure: X3, X4, X1, X5, X2, then the root."""
    tree = DraftTree([0, 0, 1, 1, 2, 0], [-1, 0, 0, 1, 1, 2], "without_replacement")
    assert list(exits_of("traversal", tree, [P] * 6, [Q] * 6)) == [3, 4, 1, 5, 2, 0]


# What the rules have to do with each other


def chain_lengths(depth: int, target: Law, drafter: Law, names: Iterable[str]) -> dict[str, F]:
    shape = {(0,) * level: 1 for level in range(depth)}
    lengths = dict.fromkeys(names, F(0))
    for tree, chance in sampled_trees(shape, drafter, "iid"):
        rows = rows_of(tree, target), draft_rows_of(tree, drafter)
        for name in lengths:
            lengths[name] += chance * get_verifier(name).expected_block_length(tree, *rows)
    return lengths


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 3), zeros=st.sampled_from([0.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_traversal_is_never_below_rrs_on_a_chain(seed: int, depth: int, zeros: float) -> None:
    """And equal to it at depth 1; `block` is the same; both are 1 + sum q(x) acc(x) over all prefixes."""
    target, drafter = random_law(seed, 3, zeros=zeros), random_law(seed + 1, 3, zeros=zeros)
    lengths = chain_lengths(depth, target, drafter, ["rrs", "traversal", "block"])
    assert lengths["traversal"] >= lengths["rrs"]
    assert depth > 1 or lengths["traversal"] == lengths["rrs"]
    assert lengths["block"] == lengths["traversal"] == 1 + accepted_mass((), F(1), F(1), depth, target, drafter)


def accepted_mass(prefix: Prefix, reach: F, acc: F, depth: int, target: Law, drafter: Law) -> F:
    """sum over longer prefixes of q(prefix) acc(prefix)."""
    total = F(0)
    for token, (p, q) in enumerate(zip(target(prefix), drafter(prefix), strict=True)):
        if len(prefix) < depth and q > 0:
            below = min(F(1), acc * F(p) / F(q))
            longer = (*prefix, token)
            total += reach * q * below + accepted_mass(longer, reach * F(q), below, depth, target, drafter)
    return total


def test_traversal_gains_on_some_chain() -> None:
    lengths = chain_lengths(2, GOLDEN_TARGET, DRAFTER, ["rrs", "traversal"])
    assert lengths["traversal"] - lengths["rrs"] == F(539, 240) - F(259, 120) > 0


@given(seed=st.integers(0, 10**6), num_nodes=st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_block_is_traversal_on_a_chain(seed: int, num_nodes: int) -> None:
    """Exit by exit and bonus by bonus, on chains that were drawn and on ones that could not be."""
    tokens = [0, *(seed // 3**step % 3 for step in range(num_nodes))]
    tree = DraftTree(tokens, range(-1, num_nodes), "iid")
    rows = rows_of(tree, random_law(seed, 3)), draft_rows_of(tree, random_law(seed + 1, 3))
    assert get_verifier("block").block_law(tree, *rows) == get_verifier("traversal").block_law(tree, *rows)
    assert exits_of("block", tree, *rows) == exits_of("traversal", tree, *rows)


def first_of(row: Any) -> Any:
    """Certain of the row's foremost token."""
    one = np.array([F(0)] * len(row))
    one[row.argmax()] = F(int(row.max() > 0))
    return one


class OneHot(Traversal):
    """q is certain of the first living child. Its rows hold the children's places, the foremost highest."""

    def ways(self, tree: DraftTree, target_probs: Any, draft_probs: Any) -> Any:
        places = [[0] * len(row) for row in target_probs]
        for node in range(tree.num_nodes + 1):
            for rank, child in enumerate(tree.children(node)):
                places[node][int(tree.token_ids[child])] = len(places[node]) - rank
        return tree, self.exits(tree, np.array(target_probs), np.array(places))


def moved(acc: Any, target: Any, places: Any, token: int, drawn: str | None) -> Any:
    acc, target, _ = rejected(acc, target, first_of(places), token, drawn=None)
    left = places.copy()
    left[token] = 0
    return acc, target, left


@given(seed=st.integers(0, 10**6), num_nodes=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_with_one_hot_q_traversal_has_tevs_law(seed: int, num_nodes: int) -> None:
    """On any fixed tree: a cross-check, not a mode (math.md section 3)."""
    tree = random_tree(random.Random(seed), 3, 3, num_nodes)
    rows = rows_of(tree, random_law(seed, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traversal, "acceptance", lambda acc, p, places, x: acceptance(acc, p, first_of(places), x))
        patch.setattr(traversal, "rejected", moved)
        law = OneHot().block_law(tree, rows)
    assert law == get_verifier("tev").block_law(tree, rows)
