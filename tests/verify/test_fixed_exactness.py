"""The fixed verifiers held to the target's law: by enumeration with Fractions, in floats, and by their draws."""

from __future__ import annotations

import random
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import chi_square, extended, mean_length, random_tree, rows_of, sampled_trees, target_law
from fakes import Law, random_law, table_law
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.law.exit_law import exit_law
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.draws import pick
from exittrain.verify.exits import Exit, children_of
from exittrain.verify.fixed import FixedVerifier
from exittrain.verify.registry import get_verifier

NAMES = ["tev", "predraw", "residual"]

GOLDEN_TARGET = table_law(
    {
        (): (F(2, 5), F(3, 5)),
        (0,): (F(1, 2), F(1, 2)), (1,): (F(1, 3), F(2, 3)),
        (0, 0): (F(1, 2), F(1, 2)), (0, 1): (F(1, 5), F(4, 5)), (1, 0): (F(3, 4), F(1, 4)), (1, 1): (F(1, 2), F(1, 2)),
    }
)  # fmt: skip
GOLDEN_DRAFTER = table_law({(): (F(3, 4), F(1, 4)), (0,): (F(1, 4), F(3, 4)), (1,): (F(1, 2), F(1, 2))})
GOLDEN = [
    ({(): 1}, F(29, 20)),
    ({(): 1, (0,): 1}, F(67, 40)),
    ({(): 2}, F(2)),
    ({(): 2, (0,): 2, (1,): 1}, F(109, 40)),
]


@st.composite
def cases(draw: st.DrawFn, drawn: str | None = None) -> tuple[DraftTree, Law]:
    vocab, depth, num_nodes = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 8))
    seed = draw(st.integers(0, 10**6))
    law = random_law(seed, vocab, zeros=draw(st.sampled_from([0.0, 0.3, 0.6])))
    return random_tree(random.Random(seed), vocab, depth, num_nodes, drawn), law


@pytest.mark.parametrize("drawn", [None, "iid"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joint_law_is_the_targets_exactly(data: st.DataObject, drawn: str | None) -> None:
    tree, law = data.draw(cases(drawn))
    rows = rows_of(tree, law)
    length = int(tree.depths.max()) + 1
    wanted = target_law(law, length)
    for name in NAMES:
        blocks = get_verifier(name).block_law(tree, rows)
        assert extended(blocks, law, length) == wanted
        assert sum(blocks.values()) == 1
        assert get_verifier(name).expected_block_length(tree, rows) == mean_length(blocks)
    assert len({tuple(sorted(get_verifier(name).block_law(tree, rows).items())) for name in NAMES}) == 1


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_floats_keep_the_enumerated_law(case: tuple[DraftTree, Law]) -> None:
    tree, law = case
    rows = rows_of(tree, law)
    exact = get_verifier("tev").block_law(tree, rows)
    floats = np.array([[float(p) for p in row] for row in rows])
    coverage = float(exit_law(tree, floats).coverage)
    for name in NAMES:
        blocks = get_verifier(name).block_law(tree, floats)
        for block in exact.keys() | blocks.keys():
            assert abs(float(exact.get(block, 0)) - blocks.get(block, 0)) < 1e-9
        assert get_verifier(name).expected_block_length(tree, floats) == pytest.approx(1 + coverage, abs=1e-9)


@pytest.mark.parametrize(("shape", "wanted"), GOLDEN)
@pytest.mark.parametrize("name", NAMES)
def test_golden_block_lengths(name: str, shape: dict[Any, int], wanted: F) -> None:
    verifier = get_verifier(name)
    total, chances = F(0), F(0)
    for tree, chance in sampled_trees(shape, GOLDEN_DRAFTER):
        total += chance * verifier.expected_block_length(tree, rows_of(tree, GOLDEN_TARGET))
        chances += chance
    assert (total, chances) == (wanted, 1)


class KeepsChildren(FixedVerifier):
    """Broken: the bonus is drawn from the whole row, children included."""

    name = "keeps_children"

    def exits(self, tree: DraftTree, rows: Any) -> Any:
        for way in get_verifier("tev").exits(tree, rows.copy()):
            yield Exit(way.node, way.probability, rows[way.node])

    def draw(self, tree: DraftTree, rows: Any, uniform: Any) -> tuple[int, int]:
        node, _ = get_verifier("tev").draw(tree, rows.copy(), uniform)
        return node, pick(rows[node], uniform())


class NoRenormalising(FixedVerifier):
    """Broken: after a rejection the next child is tried against the unscaled residual."""

    name = "no_renormalising"

    def exits(self, tree: DraftTree, rows: Any) -> Any:
        tokens, children, come = tree.token_ids.tolist(), children_of(tree), [1] + [0] * tree.num_nodes
        for node in range(tree.num_nodes + 1):
            left, waiting = rows[node].copy(), come[node]
            for child in children[node]:
                come[child] = waiting * left[tokens[child]]
                waiting = waiting - come[child]
                left[tokens[child]] = 0
            if waiting > 0 and left.sum() > 0:
                yield Exit(node, waiting, left / left.sum())

    def draw(self, tree: DraftTree, rows: Any, uniform: Any) -> tuple[int, int]:
        ways = list(self.exits(tree, rows))
        way = ways[pick(np.array([way.probability for way in ways]), uniform())]
        return way.node, pick(way.bonus, uniform())


TREE = DraftTree([0, 2, 0, 1, 0, 2], [-1, 0, 0, 1, 1, 2])
TARGET = random_law(5, 4, zeros=0.0, sure=0.0)


def drawn_blocks(verifier: Any, count: int, seed: int = 1) -> list[tuple[int, ...]]:
    rows = torch.tensor([[float(p) for p in row] for row in rows_of(TREE, TARGET)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    tokens = TREE.token_ids.tolist()
    verdicts = [verifier.verify(TREE, rows, generator=generator) for _ in range(count)]
    return [(*(tokens[node] for node in verdict.path), verdict.bonus_token) for verdict in verdicts]


@pytest.mark.parametrize("name", NAMES)
def test_draws_follow_the_law(name: str) -> None:
    law = get_verifier("tev").block_law(TREE, rows_of(TREE, TARGET))
    assert chi_square(drawn_blocks(get_verifier(name), 4000), law) > 0.001


@pytest.mark.parametrize("broken", [KeepsChildren(), NoRenormalising()])
def test_broken_variants_are_caught(broken: FixedVerifier) -> None:
    rows = rows_of(TREE, TARGET)
    assert extended(broken.block_law(TREE, rows), TARGET, 3) != target_law(TARGET, 3)
    law = get_verifier("tev").block_law(TREE, rows)
    assert chi_square(drawn_blocks(broken, 4000), law) < 1e-6


def test_only_child_of_no_probability_is_never_accepted() -> None:
    tree, rows = DraftTree([0, 1], [-1, 0]), [[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]]
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        assert get_verifier(name).block_law(tree, rows) == {(0,): 1.0}
        for _ in range(500):
            verdict = get_verifier(name).verify(tree, rows, generator=generator)
            assert (verdict.path, verdict.bonus_token) == ((), 0)


def test_acceptance_rate_of_an_only_child() -> None:
    tree, rows = DraftTree([0, 1], [-1, 0]), [[0.7, 0.3], [0.5, 0.5]]
    for name in NAMES:
        generator = torch.Generator().manual_seed(3)
        accepted = sum(get_verifier(name).verify(tree, rows, generator=generator).num_accepted for _ in range(4000))
        assert accepted / 4000 == pytest.approx(0.3, abs=0.02)


def test_path_of_a_twin_is_a_path_of_the_given_tree() -> None:
    tree = DraftTree([0, 1, 1, 0], [-1, 0, 0, 2], "iid")
    rows = [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    for name in [*NAMES, "greedy"]:
        verdict = get_verifier(name).verify(tree, rows)
        assert (verdict.path, verdict.bonus_token) == ((2, 3), 1)
        assert get_verifier(name).expected_block_length(tree, rows) == 3.0
