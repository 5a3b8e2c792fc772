"""Sequoia's shape against every shape there is, and on vectors that no measurement should give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from fakes import TableSession, random_law
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.build.base import TreeShape
from exittrain.build.fill import Path
from exittrain.build.ranked import ranked_shape
from exittrain.build.registry import get_builder
from exittrain.errors import InputError


def worth(paths: Sequence[Path], acceptance: Sequence[float]) -> float:
    """Expected accepted tokens."""
    return sum(math.prod(acceptance[rank] for rank in path) for path in paths)


def best_by_force(acceptance: Sequence[float], budget: int, depth: int) -> float:
    """Over every way to share out nodes among children in order: all shapes, whatever their form."""

    @cache
    def below(nodes: int, first: int, levels: int) -> float:
        """Best worth of `nodes` nodes in the subtrees of the children from rank `first` on."""
        if nodes == 0 or levels == 0 or first == len(acceptance):
            return 0.0 if nodes == 0 else -math.inf
        options = [
            acceptance[first] * (1 + below(size - 1, 0, levels - 1)) + below(nodes - size, first + 1, levels)
            for size in range(1, nodes + 1)
        ]
        return max(options)

    return max(below(nodes, 0, depth) for nodes in range(budget + 1))


@given(
    weights=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    spare=st.integers(0, 6),
    budget=st.integers(1, 9),
    depth=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_the_best_of_all_shapes(weights: list[int], spare: int, budget: int, depth: int) -> None:
    acceptance = [w / (sum(weights) + spare or 1) for w in sorted(weights, reverse=True)]
    paths = ranked_shape(acceptance, budget, depth)
    assert worth(paths, acceptance) == pytest.approx(best_by_force(acceptance, budget, depth), abs=1e-12)
    assert len(paths) == len(set(paths)) == min(budget, sum(len(weights) ** d for d in range(1, depth + 1)))


@given(weights=st.lists(st.integers(0, 12), min_size=1, max_size=5), budget=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_any_vector_gives_nested_shapes_that_can_be_drawn(weights: list[int], budget: int) -> None:
    acceptance = [w / (sum(weights) or 1) for w in weights]
    paths = ranked_shape(acceptance, budget, 3)
    for number, path in enumerate(paths):
        assert not path[:-1] or path[:-1] in paths[:number]
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths[:number]
    assert ranked_shape(acceptance, max(1, budget - 2), 3) == paths[: max(1, budget - 2)]
    shape = TreeShape(budget, 3, branching=paths)
    get_builder("sampled_wor")(TableSession(random_law(0, 6)), shape, [torch.Generator().manual_seed(0)])


def test_small_shapes_by_hand() -> None:
    assert ranked_shape([0.9, 0.05], 3, 5) == ((0,), (0, 0), (0, 0, 0))
    assert ranked_shape([0.9, 0.05], 3, 1) == ((0,), (1,))
    assert ranked_shape([0.5, 0.25], 4, 3) == ((0,), (1,), (0, 0), (0, 1))  # 1/8 three times: by depth, then path
    assert ranked_shape([0.1, 0.5], 2, 2) == ((0,), (1,))  # 0.3 each


@pytest.mark.parametrize(
    ("acceptance", "budget", "depth", "words"),
    [
        ([], 3, 2, "acceptance is empty"),
        ([0.5, -0.1], 3, 2, r"acceptance\[1\] is -0.1"),
        ([math.nan], 3, 2, r"acceptance\[0\] is nan"),
        ([0.7, 0.7], 3, 2, "sums to 1.4"),
        ([0.7], 0, 2, "budget 0"),
        ([0.7], 2, 0, "depth 0"),
    ],
)
def test_what_is_refused(acceptance: list[float], budget: int, depth: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ranked_shape(acceptance, budget, depth)
    assert ranked_shape([0.7, 0.3 + 1e-7], 1, 1) == ((0,),)
