"""The exit law: against enumeration, batched against single, and its guards."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from enumeration import random_tree, rows_of
from fakes import random_law
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.errors import InputError
from exittrain.law.exit_law import batch_exit_law, edge_logprobs, exit_law
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_every_term_by_hand(seed: int, vocab: int) -> None:
    law = random_law(seed, vocab)
    tree = random_tree(random.Random(seed), vocab, 3, 8)
    rows, tokens = rows_of(tree, law), tree.token_ids.tolist()
    reach = [Fraction(1)]
    for node in range(1, tree.num_nodes + 1):
        parent = int(tree.parents[node])
        reach.append(reach[parent] * rows[parent][tokens[node]])
    miss = [1 - sum(rows[node][tokens[child]] for child in tree.children(node)) for node in range(len(reach))]
    found = exit_law(tree, rows)
    for node in range(len(reach)):
        assert float(found.reach[node]) == pytest.approx(float(reach[node]), abs=1e-12)
        assert float(found.miss[node]) == pytest.approx(float(miss[node]), abs=1e-12)
        assert float(found.exit[node]) == pytest.approx(float(reach[node] * miss[node]), abs=1e-12)
        if reach[node] * miss[node] == 0:
            assert float(found.exit[node]) == 0.0  # never exits: not a sliver of rounding
    assert float(found.exit.sum()) == pytest.approx(1, abs=1e-12)
    assert float(found.coverage) == pytest.approx(float(sum(reach[1:])), abs=1e-12)
    assert float((found.exit * tree.depths).sum()) == pytest.approx(float(found.coverage), abs=1e-12)


def test_batched_is_single() -> None:
    rng = random.Random(1)
    trees = [random_tree(rng, 6, 4, rng.randrange(12)) for _ in range(30)]
    batch = TreeBatch.from_trees(trees)
    logits = torch.randn(30, batch.token_ids.shape[1], 6, generator=torch.Generator().manual_seed(0)) * 4
    logprobs = logits.log_softmax(-1)
    edges = edge_logprobs(batch, logprobs)
    assert edges.dtype == torch.float64 and (edges[~batch.valid] == 0).all() and (edges[:, 0] == 0).all()
    law = batch_exit_law(batch, edges)
    for row, tree in enumerate(trees):
        size = tree.num_nodes + 1
        single = exit_law(tree, logprobs[row, :size].exp())
        for name in ("reach", "miss", "exit"):
            torch.testing.assert_close(getattr(law, name)[row, :size], getattr(single, name), atol=1e-6, rtol=0)
            assert (getattr(law, name)[row, size:] == 0).all()
        assert float(law.coverage[row]) == pytest.approx(float(single.coverage), abs=1e-6)


def test_each_node_reads_its_parents_row() -> None:
    """cases.md 41: distinct rows everywhere."""
    tree = DraftTree([9, 1, 2, 0], [-1, 0, 1, 0])
    logprobs = torch.arange(12.0).reshape(1, 4, 3)
    assert edge_logprobs(TreeBatch.from_trees([tree]), logprobs)[0].tolist() == [0, 1, 5, 0]


def test_certain_and_impossible_chains() -> None:
    chain = DraftTree([0, 1, 1], [-1, 0, 1])
    sure = exit_law(chain, [[0.0, 1.0]] * 3)
    assert (sure.reach.tolist(), sure.exit.tolist(), float(sure.coverage)) == ([1, 1, 1], [0, 0, 1], 2)
    never = exit_law(chain, [[1.0, 0.0]] * 3)
    assert (never.reach.tolist(), never.exit.tolist(), float(never.coverage)) == ([1, 0, 0], [1, 0, 0], 0)
    batch = batch_exit_law(TreeBatch.from_trees([chain]), torch.tensor([[0.0, -torch.inf, -torch.inf]]))
    assert batch.exit.tolist() == [[1, 0, 0]]
    assert exit_law(DraftTree([0], [-1]), [[0.5, 0.5]]).exit.tolist() == [1]


def test_tiny_probabilities_do_not_vanish() -> None:
    """A chain of 40 tokens at 1e-6 each has a reach of 1e-240: float64, whatever the model's dtype."""
    tree = DraftTree([0] * 41, list(range(-1, 40)))
    law = batch_exit_law(TreeBatch.from_trees([tree]), torch.full((1, 41), -13.815511))
    assert 0 < float(law.reach[0, -1]) < 1e-200


def test_twins_count_once() -> None:
    tree = DraftTree([0, 1, 1, 0], [-1, 0, 0, 2], "iid")
    law = exit_law(tree, [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])
    assert law.reach.tolist() == [1, 0.75, 0, 0.375]
    assert law.exit.tolist() == [0.25, 0.375, 0, 0.375]
    assert float(law.coverage) == 1.125


@pytest.mark.parametrize("edges", [[0.0, -0.1, -0.1], [0.0, float("nan"), -1.0], [0.0, 0.1, -9.0]])
def test_what_is_no_distribution_is_an_error(edges: list[float]) -> None:
    trees = TreeBatch.from_trees([DraftTree([0], [-1]), DraftTree([0, 1, 2], [-1, 0, 0])])
    with pytest.raises(InputError, match="exits of tree 1 sum to"):
        batch_exit_law(trees, torch.tensor([[0.0, 0.0, 0.0], edges]))


def test_rounding_beyond_one_is_clamped() -> None:
    trees = TreeBatch.from_trees([DraftTree([0, 1], [-1, 0])])
    law = batch_exit_law(trees, torch.tensor([[0.0, 2e-7]]))
    assert float(law.miss[0, 0]) == 0.0


def test_rounding_does_not_add_up_with_depth() -> None:
    """Two children that carry everything, 48 levels deep: float32 log-probabilities exceed one at every level."""
    tokens, parents, last = [0], [-1], 0
    for _ in range(48):
        tokens, parents, last = [*tokens, 1, 2], [*parents, last, last], len(tokens)
    trees = TreeBatch.from_trees([DraftTree(tokens, parents)])
    beyond = 0.0
    for gap in torch.linspace(2, 16, 200):
        pair = torch.stack([torch.zeros(()), -gap]).log_softmax(0)
        beyond = max(beyond, float(pair.double().exp().sum()) - 1)
        law = batch_exit_law(trees, torch.cat([torch.zeros(1), pair.repeat(48)])[None])
        assert float(law.exit.sum()) == pytest.approx(1, abs=1e-12)
    assert beyond * 48 > 1e-6
