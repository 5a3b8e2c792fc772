"""The sampled verifiers in floats: rows against Fractions, all trees side by side against the rows, and extremes."""

from __future__ import annotations

import random
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import as_batch, draft_rows_of, draw_tree, random_tree, rows_of, sampled_trees
from fakes import Prefix, random_law, random_logits, served
from torch import Tensor

from exittrain.law.sampling import Sampling, log_weights
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.base import expected_block_lengths
from exittrain.verify.registry import get_verifier

RULES = [("rrs", "iid"), ("rrs_wor", "without_replacement"), ("traversal", "iid"),
         ("traversal", "without_replacement"), ("block", "iid")]  # fmt: skip
BRANCHED: dict[Prefix, int] = {(): 3, (0,): 3, (1,): 1, (2,): 2, (0, 0): 2, (0, 2): 1, (0, 0, 1): 2, (2, 1): 1}
CHAIN: dict[Prefix, int] = {(0,) * level: 1 for level in range(6)}


def shape_for(name: str) -> dict[Prefix, int]:
    return CHAIN if name == "block" else BRANCHED


def exits_by_rows(name: str, tree: DraftTree, target: Any, draft: Any) -> list[Any]:
    exits = [0.0] * (tree.num_nodes + 1)
    for way in get_verifier(name).ways(tree, target, draft)[1]:
        exits[way.node] += way.probability
    return exits


@pytest.mark.parametrize(("name", "drawn"), RULES)
@pytest.mark.parametrize("seed", range(4))
def test_floats_keep_the_enumerated_law(name: str, drawn: str, seed: int) -> None:
    """1e-9, block by block."""
    target, drafter = random_law(seed, 3), random_law(seed + 20, 3)
    shape = {(): 1, (0,): 1, (0, 0): 1} if name == "block" else {(): 2, (0,): 1, (1,): 2}
    for tree, _ in list(sampled_trees(shape, drafter, drawn))[:40]:
        rows = rows_of(tree, target), draft_rows_of(tree, drafter)
        exact = get_verifier(name).block_law(tree, *rows)
        floats = get_verifier(name).block_law(tree, *([[float(p) for p in row] for row in table] for table in rows))
        for block in exact.keys() | floats.keys():
            assert abs(float(exact.get(block, 0)) - floats.get(block, 0)) < 1e-9


def batch_of(
    name: str, drawn: str, vocab: int, sampling: Sampling, seed: int
) -> tuple[list[DraftTree], TreeBatch, Tensor, DraftRows]:
    """Nine trees drawn at the serving settings, of the whole shape or of its upper part."""
    rng, target, drafter = random.Random(seed), random_logits(seed, vocab, 2.0), random_logits(seed + 99, vocab, 2.0)

    def near(prefix: Prefix) -> Tensor:
        return 0.7 * target(prefix) + 0.5 * drafter(prefix)

    trees = []
    for index in range(9):
        shape = {ranks: count for ranks, count in shape_for(name).items() if len(ranks) <= index // 2}
        trees.append(draw_tree(shape, served(near, sampling), drawn, rng))
    return trees, *as_batch(trees, target, served(near, sampling))


@pytest.mark.parametrize(("name", "drawn"), RULES)
@pytest.mark.parametrize(
    ("vocab", "sampling"),
    [(4, Sampling()), (40, Sampling(0.3)), (300, Sampling(2.0)), (300, Sampling(0.7, top_p=0.9)), (40, Sampling(1, 7))],
    ids=str,
)
def test_batches_equal_the_rows(name: str, drawn: str, vocab: int, sampling: Sampling) -> None:
    """Ragged and padded. From the same numbers within 1e-11; float32 logits against float64 ones within 1e-5."""
    verifier = get_verifier(name)
    trees, batch, logits, drafted = batch_of(name, drawn, vocab, sampling, seed=vocab)
    exits = verifier.exit_probabilities(batch, logits, sampling, drafted)
    doubles = verifier.exit_probabilities(batch, logits.double(), sampling, drafted)
    lengths = expected_block_lengths(exits, batch)
    torch.testing.assert_close(exits.sum(1), torch.ones(9, dtype=torch.float64), atol=1e-12, rtol=0)
    assert float(exits.min()) >= 0
    for row, tree in enumerate(trees):
        own, width = logits[row, : tree.num_nodes + 1], tree.num_nodes + 1
        draft = drafted.of_tree(row, tree.num_nodes)
        weights = log_weights(own, sampling).exp().double()
        same = exits_by_rows(name, tree, weights / weights.sum(1, keepdim=True), draft)
        np.testing.assert_allclose(exits[row, :width].numpy(), same, atol=1e-11, rtol=0)
        assert not exits[row, width:].any()
        exact = log_weights(own.double(), sampling).softmax(-1)
        finer = exits_by_rows(name, tree, exact, draft)
        np.testing.assert_allclose(doubles[row, :width].numpy(), finer, atol=1e-11, rtol=0)
        np.testing.assert_allclose(exits[row, :width].numpy(), finer, atol=1e-5, rtol=0)
        assert float(lengths[row]) == pytest.approx(verifier.expected_block_length(tree, exact, draft), abs=1e-4)


@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_each_tree_alone_is_the_same(name: str, drawn: str) -> None:
    trees, batch, logits, drafted = batch_of(name, drawn, 30, Sampling(), seed=3)
    together = get_verifier(name).exit_probabilities(batch, logits, Sampling(), drafted)
    for row, tree in enumerate(trees):
        width = tree.num_nodes + 1
        own = DraftRows(drafted.probs, drafted.row_of[row : row + 1, :width])
        alone = get_verifier(name).exit_probabilities(
            TreeBatch.from_trees([tree]), logits[row : row + 1, :width], Sampling(), own
        )
        torch.testing.assert_close(together[row, :width], alone[0], atol=1e-13, rtol=0)


def test_block_in_batches_is_its_own_rule() -> None:
    """It takes traversal's batched form: held to the coins h_i of its rows, bonus included."""
    trees, batch, logits, drafted = batch_of("block", "iid", 5, Sampling(), seed=4)
    exits, cut = get_verifier("block").batch_exits(batch, logits, Sampling(), drafted)  # type: ignore[attr-defined]
    for row, tree in enumerate(trees):
        draft, probs = drafted.of_tree(row, tree.num_nodes), logits[row, : tree.num_nodes + 1].double().softmax(-1)
        for way in get_verifier("block").ways(tree, probs, draft)[1]:  # type: ignore[attr-defined]
            assert float(exits[row, way.node]) == pytest.approx(float(way.probability), abs=1e-6)
            weights = logits[row, way.node].sub(logits[row, way.node].max()).double().exp()
            if cut[row, way.node] > 0:
                weights = (weights - cut[row, way.node] * drafted.probs[drafted.row_of[row, way.node]]).clamp(min=0)
            if exits[row, way.node] > 1e-3:
                np.testing.assert_allclose((weights / weights.sum()).numpy(), way.bonus, atol=1e-5)


@pytest.mark.parametrize("name", ["rrs_wor", "traversal"])
@pytest.mark.parametrize("rest", [1e-6, 1e-9, 1e-13, 1e-20])
def test_a_drafter_all_but_certain_has_exact_odds_for_the_second_draw(name: str, rest: float) -> None:
    """1 - q(x) would keep few digits of the mass that is left, or none."""
    tree = DraftTree([0, 0, 1, 2], [-1, 0, 0, 0], "without_replacement")
    drafted = torch.tensor([[1.0, rest, 3 * rest, 2 * rest]])
    logits = torch.tensor([0.2, 0.5, 0.2, 0.1]).log().expand(1, 4, -1)
    weights = log_weights(logits[0], Sampling()).exp()
    rows = [[[F(float(p)) for p in row] for row in table] for table in (weights, drafted.expand(4, -1))]
    exact = exits_by_rows(name, tree, *([[p / sum(row) for p in row] for row in table] for table in rows))
    row_of = torch.tensor([[0, -1, -1, -1]])
    exits = get_verifier(name).exit_probabilities(
        TreeBatch.from_trees([tree]), logits, Sampling(), DraftRows(drafted, row_of)
    )
    np.testing.assert_allclose(exits[0].numpy(), [float(p) for p in exact], atol=1e-12, rtol=1e-9)


VOCAB = 5
EXTREMES = {
    "open": torch.tensor([0.3, -1.0, 0.7, 0.1, -0.4]),
    "vast": torch.tensor([200.0, -200.0, 199.0, 0.0, 200.0]),
    "certain": torch.tensor([-200.0, 200.0, -200.0, -200.0, -200.0]),
    "another certain": torch.tensor([-200.0, -200.0, 200.0, -200.0, -200.0]),
    "tiny": torch.tensor([1e-30, 1.0, 1e-30, 0.5, 1e-38]).log(),
    "zeros": torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]).log(),
}


@pytest.mark.parametrize("draft_kind", EXTREMES)
@pytest.mark.parametrize("target_kind", EXTREMES)
def test_extremes_stay_finite(target_kind: str, draft_kind: str) -> None:
    """cases.md 44: p = q, residuals of nothing, 1e-30 on either side, children that could not have been drawn.

    With the rows in floats too; a bonus is always a token of the target's.
    """
    rng = random.Random(len(target_kind) * 7 + len(draft_kind))
    for name, drawn in RULES:
        for temperature, trees in [(1.0, 4), (0.3, 4), (0.0, 2)]:
            sampling = Sampling(temperature)
            forest = [random_tree(rng, VOCAB, 3, rng.randrange(10), drawn) for _ in range(trees)]
            if name == "block":
                forest = [DraftTree(tree.token_ids, range(-1, tree.num_nodes), drawn) for tree in forest]
            batch = TreeBatch.from_trees(forest)
            logits = EXTREMES[target_kind].expand(*batch.parents.shape, -1)
            drafted = DraftRows(EXTREMES[draft_kind].softmax(-1)[None], torch.zeros_like(batch.parents))
            exits = get_verifier(name).exit_probabilities(batch, logits, sampling, drafted)
            assert bool(torch.isfinite(exits).all()) and float(exits.min()) >= 0
            torch.testing.assert_close(exits.sum(1), torch.ones(trees, dtype=torch.float64), atol=1e-9, rtol=0)
            generators = [torch.Generator().manual_seed(seed) for seed in range(trees)]
            verdict = get_verifier(name).verify_batch(batch, logits, sampling, generators, drafted)
            served_row = log_weights(EXTREMES[target_kind], sampling).exp()
            assert bool((served_row[verdict.bonus_tokens] > 0).all())
            for tree in forest:
                rows = served_row.double().expand(tree.num_nodes + 1, -1)
                draft = drafted.of_tree(0, 0).expand(tree.num_nodes + 1, -1)
                law = get_verifier(name).block_law(tree, rows / rows.sum(1, keepdim=True), draft)
                assert sum(law.values()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_a_drafter_that_is_the_target_is_accepted_whole(name: str, drawn: str) -> None:
    """p = q: the first path to a leaf, with certainty but for rounding."""
    logits = random_logits(8, 50)
    rng = random.Random(1)
    trees = [draw_tree(shape_for(name), served(logits, Sampling(0.8)), drawn, rng) for _ in range(20)]
    batch, target, drafted = as_batch(trees, logits, served(logits, Sampling(0.8)))
    exits = get_verifier(name).exit_probabilities(batch, target, Sampling(0.8), drafted)
    for row, tree in enumerate(trees):
        node = 0
        while children := tree.children(node):
            node = children[0]
        assert float(exits[row, node]) == pytest.approx(1, abs=1e-5)
