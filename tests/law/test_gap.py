"""The gap to the oracle: by hand, against sets of prefixes, and as an identity."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from enumeration import coverage_by_force, random_tree, rows_of
from fakes import Law, Prefix, TableSession, random_law
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.law.exit_law import exit_law
from exittrain.law.gap import PLACES, CoverageGap, coverage_gap, deepest_shared, first_nodes
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


def edges_of(trees: list[DraftTree], laws: list[Law]) -> Tensor:
    """[B, M] log p of every drafted node under its row's law."""
    rows = []
    for tree, law in zip(trees, laws, strict=True):
        values = [0.0]
        for node in range(1, tree.num_nodes + 1):
            prefix = path(tree, node)
            p = float(law(prefix[:-1])[prefix[-1]])
            values.append(math.log(p) if p > 0 else -math.inf)
        rows.append(torch.tensor(values, dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def path(tree: DraftTree, node: int) -> Prefix:
    return tuple(int(tree.token_ids[step]) for step in tree.path(node))


def oracle_of(laws: list[Law], budget: int) -> TreeBatch:
    return get_builder("oracle")(TableSession(laws), TreeShape(budget)).trees


def gap_of(laws: list[Law], trees: list[DraftTree], budget: int, depth: int) -> CoverageGap:
    oracle = oracle_of(laws, budget)
    return coverage_gap(
        oracle, edges_of(oracle.trees(), laws), TreeBatch.from_trees(trees), edges_of(trees, laws), depth
    )


HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


def by_hand(prefix: Prefix) -> list[Fraction]:
    """Token 0 always has 1/2, then 1/3, then 1/6."""
    return [HALF, THIRD, Fraction(1, 6)]


def test_a_gap_by_hand() -> None:
    """The 7 best prefixes: 0 (1/2), 1 (1/3), 00 (1/4), then 2, 01, 10 (1/6 each), then 000 (1/8)."""
    tree = DraftTree([0, 0, 2, 0, 2, 0], [-1, 0, 0, 1, 1, 2])  # 0, 2, 00, 02, 20 with limit 2
    gap = gap_of([by_hand], [tree], 7, 2)
    missed = dict(zip(PLACES, gap.missed[0].tolist(), strict=True))
    # 1 and 10 leave at the root, 01 at node 0 (it has children), 000 at 00, which stands at the limit.
    assert missed == pytest.approx({"root": 1 / 3 + 1 / 6, "branch": 1 / 6, "leaf": 0, "horizon": 1 / 8})
    assert float(gap.spare) == pytest.approx(1 / 12 + 1 / 12)  # 02 and 20
    assert float(gap.oracle_coverage) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4 + 3 / 6 + 1 / 8)
    assert float(gap.coverage) == pytest.approx(1 / 2 + 1 / 6 + 1 / 4 + 1 / 12 + 1 / 12)
    exits = dict(zip(PLACES, gap.exits[0].tolist(), strict=True))
    branch = HALF * THIRD + Fraction(1, 6) * HALF  # of 0 and of 2
    horizon = Fraction(1, 4) + Fraction(1, 12) + Fraction(1, 12)
    assert exits == pytest.approx({"root": THIRD, "branch": branch, "leaf": 0, "horizon": horizon})
    deeper = gap_of([by_hand], [tree], 7, 3)  # the same tree, had it been free to go on
    assert deeper.missed[0].tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 8, 0])
    assert deeper.exits[0].tolist() == pytest.approx([THIRD, branch, horizon, 0])


@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 5), budget=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_against_sets_of_prefixes(seed: int, vocab: int, budget: int) -> None:
    rng, depth = random.Random(seed), 4
    laws = [random_law(seed + i, vocab) for i in range(4)]
    trees = [random_tree(rng, vocab, depth, rng.randrange(12)) for _ in laws]
    gap, oracle = gap_of(laws, trees, budget, depth), oracle_of(laws, budget).trees()
    for row, (law, tree, best) in enumerate(zip(laws, trees, oracle, strict=True)):
        found, missed = {path(tree, node): node for node in range(tree.num_nodes + 1)}, [0.0] * 4
        reach = exit_law(best, rows_of(best, law)).reach.tolist()
        for node in range(1, best.num_nodes + 1):
            prefix = path(best, node)
            if prefix in found:
                continue
            while prefix not in found:
                prefix = prefix[:-1]
            inside = "branch" if tree.children(found[prefix]) else "leaf"
            place = "root" if not prefix else "horizon" if len(prefix) == depth else inside
            missed[PLACES.index(place)] += reach[node]
        assert gap.missed[row].tolist() == pytest.approx(missed, abs=1e-6)
        wanted = {path(best, node) for node in range(best.num_nodes + 1)}
        own = exit_law(tree, rows_of(tree, law))
        spare = sum(float(own.reach[node]) for prefix, node in found.items() if prefix not in wanted)
        assert float(gap.spare[row]) == pytest.approx(spare, abs=1e-6)
        assert float(gap.coverage[row]) == pytest.approx(float(own.coverage), abs=1e-6)
    torch.testing.assert_close(
        gap.oracle_coverage - gap.coverage, gap.missed.sum(1) - gap.spare, atol=1e-12, rtol=0
    )  # the identity
    torch.testing.assert_close(gap.exits.sum(1), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_tree_beside_itself_shares_every_node() -> None:
    rng = random.Random(3)
    trees = TreeBatch.from_trees([random_tree(rng, 4, 4, size) for size in (9, 0, 5)])
    nearest, held = deepest_shared(trees, trees)
    assert (held == trees.valid).all()
    assert (nearest[held] == torch.arange(trees.valid.shape[1]).expand_as(nearest)[held]).all()


@pytest.mark.parametrize("seed", range(4))
def test_one_oracle_tree_holds_the_best_of_every_budget(seed: int) -> None:
    law = random_law(seed, 3)
    oracle = oracle_of([law], 5)
    edges = edges_of(oracle.trees(), [law])
    root = TreeBatch.from_trees([DraftTree([0], [-1])])
    for budget in range(1, 6):
        gap = coverage_gap(*first_nodes(oracle, edges, budget), root, torch.zeros(1, 1), depth=1)
        best = coverage_by_force(law, 3, depth=budget, budget=budget)
        assert float(gap.oracle_coverage) == pytest.approx(best, abs=1e-9)
        assert gap.missed[0].tolist() == pytest.approx([best, 0, 0, 0], abs=1e-9)


def test_the_oracle_takes_a_wave_a_level_never_a_forward_a_node() -> None:
    """Fewer calls than levels of the deepest tree, all contexts together; a certain target leaves a call a node."""
    session = TableSession([random_law(seed, 6, zeros=0.0, sure=0.0) for seed in range(5)])
    trees = get_builder("oracle")(session, TreeShape(40)).trees
    assert 0 < len(session.waves) <= trees.max_depth < 20
    assert sum(int(wave.sum()) for wave in session.waves) > len(session.waves) * 5
    certain = TableSession(random_law(0, 4, sure=1.0))
    assert get_builder("oracle")(certain, TreeShape(7)).trees.max_depth == 7
    assert len(certain.waves) == 6
