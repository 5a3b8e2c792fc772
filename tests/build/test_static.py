"""Static trees: shapes by name and by hand, filled by rank."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from fakes import Law, Prefix, TableSession, random_law

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.build.static import EAGLE, rank_paths
from exittrain.errors import InputError
from exittrain.tree.draft_tree import DraftTree


def static(branching: Any, budget: int = 25, depth: int = 5, law: Law | None = None) -> DraftTree:
    law = law or random_law(2, 6, zeros=0.0, sure=0.0)
    if not isinstance(branching, str):
        branching = tuple(map(tuple, branching))
    return get_builder("static")(TableSession(law), TreeShape(budget, depth, branching=branching)).trees.trees()[0]


def test_static_shapes() -> None:
    assert static("chain", budget=3).parents.tolist() == [-1, 0, 1, 2]
    assert static("chain", budget=16, depth=4).num_nodes == 4
    assert static("2-ary", budget=6).parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert static("2-ary", budget=4).parents.tolist() == [-1, 0, 0, 1, 1]
    assert static("3-ary", depth=1).parents.tolist() == [-1, 0, 0, 0]
    assert rank_paths(TreeShape(budget=2, branching="99999999999-ary")) == [(), (0,), (1,)]
    assert static([[0], [1], [0, 0]]).parents.tolist() == [-1, 0, 0, 1]


def test_eagles_tree_is_its_25_nodes() -> None:
    """Child counts from the official choices: root 4; 3, 2, 2, 1; 3, 2, 2, 1; 3; 2."""
    tree = static("eagle")
    counts = [len(tree.children(node)) for node in range(26)]
    assert len(EAGLE) == tree.num_nodes == 25
    assert counts[:5] == [4, 3, 2, 2, 1]
    assert counts[5:13] == [3, 2, 2, 1, 0, 0, 0, 0]
    assert counts[13:21] == [3, 0, 0, 0, 0, 0, 0, 0]
    assert counts[21:] == [2, 0, 0, 0, 0]
    assert sum(not count for count in counts) == 15 and int(tree.depths.max()) == 5


def test_static_ranks_are_by_probability() -> None:
    law = random_law(4, 5, zeros=0.0, sure=0.0)
    tokens = static([[0], [1], [2], [2, 0]], law=law).token_ids.tolist()
    ranked = sorted(range(5), key=lambda x: (-law(())[x], x))
    assert tokens[1:4] == ranked[:3]
    assert tokens[4] == min(range(5), key=lambda x: (-law((ranked[2],))[x], x))


def test_static_leaves_out_ranks_that_do_not_exist() -> None:
    def law(prefix: Prefix) -> list[Fraction]:
        return [Fraction(0), Fraction(1, 3), Fraction(2, 3)] if not prefix else [Fraction(0), Fraction(1), Fraction(0)]

    tree = static([[0], [1], [2], [2, 0], [1, 0], [1, 1], [9]], law=law)
    assert (tree.parents.tolist(), tree.token_ids.tolist()[1:]) == ([-1, 0, 0, 2], [2, 1, 1])


@pytest.mark.parametrize(
    ("branching", "budget", "words"),
    [
        ("egle", 25, "no static shape 'egle'"),
        ("0-ary", 25, "no static shape"),
        ("eagle", 16, "EAGLE's tree has 25 nodes and depth 5; set tree.budget"),
        ([[0, 0]], 25, r"needs its parent \[0\]"),
        ([[-1]], 25, "ranks from 0 up"),
        ([], 25, "at least one"),
    ],
)
def test_static_refuses(branching: Any, budget: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        static(branching, budget)
