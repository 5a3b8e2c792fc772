"""Builders against a heap, against brute force, and on degenerate shapes."""

from __future__ import annotations

import heapq
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from enumeration import coverage_by_force, rows_of
from fakes import Law, Prefix, TableSession, random_law
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.build.base import Draft, TreeShape
from exittrain.build.registry import BUILDERS, drawn_by, get_builder
from exittrain.errors import InputError
from exittrain.law.exit_law import exit_law
from exittrain.law.seeding import seed_for
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


def build(name: str, session: TableSession, shape: TreeShape, first_seed: int = 0) -> Draft:
    """Context i draws, where trees are drawn, from the stream of first_seed + i."""
    generators = [torch.Generator().manual_seed(first_seed + i) for i in range(len(session.laws))]
    return get_builder(name)(session, shape, generators)


def float_logs(law: Law, prefix: Prefix) -> list[float]:
    """The session's own float32 log-probabilities: ties must tie in both."""
    return torch.tensor([math.log(p) if p > 0 else -math.inf for p in law(prefix)]).double().tolist()


def heap_tree(law: Law, budget: int, depth: int, width: int) -> list[tuple[int, int]]:
    """The plain reference: (parent, token) of each popped node."""
    nodes: list[tuple[int, int]] = []
    heap: list[tuple[float, int, int, Prefix]] = []

    def push(parent: int, prefix: Prefix, score: float) -> None:
        if len(prefix) < depth:
            logs = float_logs(law, prefix)
            ranked = sorted(range(len(logs)), key=lambda x: (-logs[x], x))[:width]
            for token in ranked:
                if logs[token] > -math.inf:
                    heapq.heappush(heap, (-(score + logs[token]), parent, token, (*prefix, token)))

    push(0, (), 0.0)
    while heap and len(nodes) < budget:
        negative, parent, token, prefix = heapq.heappop(heap)
        nodes.append((parent, token))
        push(len(nodes), prefix, -negative)
    return nodes


def eagle2_tree(law: Law, budget: int, depth: int, width: int) -> set[Prefix]:
    """EAGLE-2 as its paper has it: each level expands its `width` best nodes; the best N of all candidates stay."""
    candidates: list[tuple[Any, Prefix]] = []
    frontier: list[tuple[float, Prefix]] = [(0.0, ())]
    for _ in range(depth):
        level = []
        for score, prefix in frontier:
            logs = float_logs(law, prefix)
            for token in sorted(range(len(logs)), key=lambda x: (-logs[x], x))[:width]:
                if logs[token] > -math.inf:
                    level.append((score + logs[token], (*prefix, token)))
        frontier = sorted(level, key=lambda item: -item[0])[:width]
        candidates += level
    return {prefix for _, prefix in sorted(candidates, key=lambda item: -item[0])[:budget]}


def pairs(tree: DraftTree) -> list[tuple[int, int]]:
    return list(zip(tree.parents.tolist()[1:], tree.token_ids.tolist()[1:], strict=True))


def prefixes(tree: DraftTree) -> set[Prefix]:
    tokens = tree.token_ids.tolist()
    return {tuple(tokens[step] for step in tree.path(node)) for node in range(1, tree.num_nodes + 1)}


def untied_law(seed: int, vocab: int) -> Law:
    def law(prefix: Prefix) -> list[float]:
        rng = random.Random(seed_for(seed, *prefix))
        weights = [rng.random() for _ in range(vocab)]
        return [weight / sum(weights) for weight in weights]

    return law


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 6),
    budget=st.integers(1, 12),
    depth=st.integers(1, 5),
    width=st.integers(1, 6),
    grain=st.sampled_from([1, 2, 12]),
)
@settings(max_examples=80, deadline=None)
def test_best_first_is_the_heaps_tree(seed: int, vocab: int, budget: int, depth: int, width: int, grain: int) -> None:
    laws = [random_law(seed + i, vocab, grain, zeros=0.2, sure=0.3) for i in range(4)]
    draft = get_builder("best_first")(TableSession(laws), TreeShape(budget, depth, width))
    for law, tree in zip(laws, draft.trees.trees(), strict=True):  # DraftTree checks parents first, siblings apart
        assert pairs(tree) == heap_tree(law, budget, depth, width)


def dyadic_law(seed: int) -> Law:
    """Powers of one half only, whose float logarithms add up exactly: ties across levels."""

    def law(prefix: Prefix) -> list[Fraction]:
        rng = random.Random(seed_for("dyadic", seed, *prefix))
        exponents = rng.choice([[0], [1, 1], [1, 2, 2], [2, 2, 2, 2]])
        probs = [Fraction(1, 2**exponent) for exponent in exponents] + [Fraction(0)] * (4 - len(exponents))
        rng.shuffle(probs)
        return probs

    return law


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 14), depth=st.integers(2, 6))
@settings(max_examples=80, deadline=None)
def test_ties_across_levels_go_by_parent_order(seed: int, budget: int, depth: int) -> None:
    laws = [dyadic_law(seed + i) for i in range(4)]
    draft = get_builder("best_first")(TableSession(laws), TreeShape(budget, depth, 4))
    for law, tree in zip(laws, draft.trees.trees(), strict=True):
        assert pairs(tree) == heap_tree(law, budget, depth, 4)


@pytest.mark.parametrize("name", BUILDERS)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_trees_scores_and_slots_agree(name: str, seed: int, budget: int) -> None:
    roots = [7, 8, 9]
    laws = [random_law(seed + i, 4) for i in range(3)]
    session = TableSession(laws, roots)
    draft = build(name, session, TreeShape(budget, 4, 3, branching="2-ary"), seed)
    trees = draft.trees
    assert trees.drawn == drawn_by(name)
    assert int(trees.valid.sum(1).max()) == trees.token_ids.shape[1] <= budget + 1
    for row, tree in enumerate(trees.trees()):
        tokens = tree.token_ids.tolist()
        assert tokens[0] == roots[row]
        for node in range(tree.num_nodes + 1):
            prefix = tuple(tokens[step] for step in tree.path(node))
            slot = int(draft.slots[row, node])
            if slot >= 0:
                assert session.prefixes[row][slot] == prefix
            if node:
                assert tree.draft_logprobs is not None
                assert float(tree.draft_logprobs[node]) == float_logs(laws[row], prefix[:-1])[prefix[-1]] > -math.inf
            if tree.children(node):
                assert slot >= 0
    assert (trees.depths[~trees.valid] == 0).all() and (trees.token_ids[~trees.valid] == 0).all()
    assert (draft.slots[~trees.valid] == -1).all()


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 10), depth=st.integers(1, 5), width=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_beam_is_eagle_2(seed: int, budget: int, depth: int, width: int) -> None:
    laws = [untied_law(seed + i, 5) for i in range(3)]
    session = TableSession(laws)
    draft = get_builder("beam")(session, TreeShape(budget, depth, width))
    for law, tree in zip(laws, draft.trees.trees(), strict=True):
        assert prefixes(tree) == eagle2_tree(law, budget, depth, width)
    assert all(int(wave.sum(1).max()) <= width for wave in session.waves)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_oracle_coverage_is_the_largest_there_is(seed: int, budget: int) -> None:
    law = random_law(seed, 3)
    draft = get_builder("oracle")(TableSession(law), TreeShape(budget, 1, 1))
    tree = draft.trees.trees()[0]
    coverage = float(exit_law(tree, rows_of(tree, law)).coverage)
    assert coverage == pytest.approx(coverage_by_force(law, 3, depth=budget, budget=budget), abs=1e-6)


def test_oracle_follows_a_certain_target_to_the_budget() -> None:
    draft = get_builder("oracle")(TableSession(random_law(0, 4, sure=1.0)), TreeShape(5, 2, 1))
    assert draft.trees.max_depth == draft.trees.trees()[0].num_nodes == 5


def test_certain_chain_ties_its_parents_and_keeps_them() -> None:
    """cases.md 55: a child of probability 1 scores as its parent does; the cut keeps ancestors first."""
    law = random_law(3, 4, sure=1.0)
    for name in ["best_first", "beam"]:
        tree = get_builder(name)(TableSession(law), TreeShape(3, 6, 4)).trees.trees()[0]
        assert tree.parents.tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("budget", "depth", "width"), [(4, 1, 4), (1, 1, 1), (1, 6, 8), (3, 3, 1)])
def test_degenerate_shapes(name: str, budget: int, depth: int, width: int) -> None:
    """cases.md 56."""
    laws = [random_law(seed, 5, zeros=0.0, sure=0.0) for seed in range(2)]
    for tree in build(name, TableSession(laws), TreeShape(budget, depth, width)).trees.trees():
        assert 1 <= tree.num_nodes <= budget


@pytest.mark.parametrize("name", BUILDERS)
def test_greedy_drafter_gives_smaller_trees(name: str) -> None:
    """Tokens of no probability are never selected, whatever the budget; drawn i.i.d., the only one comes again."""
    law = random_law(1, 6, sure=1.0)
    tree = build(name, TableSession(law), TreeShape(13, 3, 4, branching="3-ary")).trees.trees()[0]
    assert tree.num_nodes == (13 if name in ("oracle", "sampled_iid") else 3)
    assert all(law(prefix[:-1])[prefix[-1]] == 1 for prefix in prefixes(tree))


def test_budgets_are_nested() -> None:
    law = random_law(11, 6)
    large = pairs(get_builder("best_first")(TableSession(law), TreeShape(12, 5, 6)).trees.trees()[0])
    for budget in range(1, 12):
        small = pairs(get_builder("best_first")(TableSession(law), TreeShape(budget, 5, 6)).trees.trees()[0])
        assert small == large[:budget]


def test_rows_do_not_depend_on_neighbours() -> None:
    laws = [random_law(seed, 5) for seed in range(6)]
    for name in BUILDERS:
        shape = TreeShape(7, 4, 3, branching="2-ary")
        together = build(name, TableSession(laws), shape).trees.trees()
        alone = [build(name, TableSession(law), shape, seed).trees.trees()[0] for seed, law in enumerate(laws)]
        assert [pairs(tree) for tree in together] == [pairs(tree) for tree in alone]


def test_waves_only_run_nodes_that_may_be_kept() -> None:
    """One wave a level, and never more nodes in it than the budget."""
    session = TableSession([random_law(seed, 8, zeros=0.0) for seed in range(5)])
    get_builder("best_first")(session, TreeShape(6, 4, 8))
    assert len(session.waves) <= 3
    assert all(wave.shape[1] <= 5 for wave in session.waves)


def test_unknown_builder_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'best_first'"):
        get_builder("bestfirst")


def test_how_each_builder_draws() -> None:
    drawn = {name: drawn_by(name) for name in BUILDERS}
    assert {name for name, kind in drawn.items() if kind != "top"} == {"sampled_iid", "sampled_wor"}
    assert (drawn["sampled_iid"], drawn["sampled_wor"]) == ("iid", "without_replacement")
    with pytest.raises(InputError, match="did you mean 'sampled_wor'"):
        drawn_by("sampled_wro")


def test_batches_of_different_sizes() -> None:
    trees = TreeBatch.from_trees([DraftTree([0], [-1]), DraftTree([0, 1, 2], [-1, 0, 1])])
    assert [tree.num_nodes for tree in trees.trees()] == [0, 2]
