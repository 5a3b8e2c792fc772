"""`verify_batch`: raw logits and serving settings in, the same law as `verify`, no dependence on neighbours."""

from __future__ import annotations

import random

import pytest
import torch
from enumeration import chi_square, random_tree
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.draws import pick, pick_rows
from exittrain.verify.registry import VERIFIERS, get_verifier

NAMES = ["tev", "predraw", "residual"]
SERVING = [Sampling(), Sampling(0.5), Sampling(2.0, top_k=3), Sampling(0.7, top_p=0.8), Sampling(0.1, top_p=0.9)]
TREE = DraftTree([0, 2, 0, 1, 0, 2], [-1, 0, 0, 1, 1, 2])
TWINS = DraftTree([0, 1, 1, 0, 2], [-1, 0, 0, 2, 1], "iid")


def logits_for(tree: DraftTree, vocab: int, seed: int) -> Tensor:
    """[1, N+1, V]; twins stand in one context, so they have one row."""
    logits = torch.randn(1, tree.num_nodes + 1, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    if tree is TWINS:
        logits[0, 2] = logits[0, 1]
    return logits


def blocks(name: str, tree: DraftTree, logits: Tensor, sampling: Sampling, count: int) -> list[tuple[int, ...]]:
    """`count` draws, as one batch of equal trees with a generator each."""
    trees = TreeBatch.from_trees([tree] * count)
    generators = [torch.Generator().manual_seed(1000 + i) for i in range(count)]
    verdict = get_verifier(name).verify_batch(trees, logits.expand(count, -1, -1), sampling, generators)
    tokens = tree.token_ids.tolist()
    return [
        (*(tokens[step] for step in tree.path(node)), bonus)
        for node, bonus in zip(verdict.nodes.tolist(), verdict.bonus_tokens.tolist(), strict=True)
    ]


@pytest.mark.parametrize("sampling", SERVING, ids=str)
@pytest.mark.parametrize("tree", [TREE, TWINS], ids=["fixed", "twins"])
def test_tev_batch_has_the_law_of_verify(tree: DraftTree, sampling: Sampling) -> None:
    logits = logits_for(tree, 4, seed=3)
    law = get_verifier("tev").block_law(tree, process_logits(logits[0], sampling).double().exp())
    assert chi_square(blocks("tev", tree, logits, sampling, 2000), law) > 0.001
    swapped = get_verifier("tev").block_law(tree, process_logits(logits[0], Sampling(4.0)).double().exp())
    assert chi_square(blocks("tev", tree, logits, sampling, 2000), swapped) < 1e-6


@pytest.mark.parametrize("name", ["predraw", "residual"])
def test_the_others_too(name: str) -> None:
    logits, sampling = logits_for(TREE, 4, seed=4), Sampling(0.7, top_p=0.8)
    law = get_verifier("tev").block_law(TREE, process_logits(logits[0], sampling).double().exp())
    assert chi_square(blocks(name, TREE, logits, sampling, 800), law) > 0.001


def random_batch(seed: int, vocab: int = 6) -> tuple[list[DraftTree], list[Tensor]]:
    rng = random.Random(seed)
    trees = [random_tree(rng, vocab, 4, rng.randrange(9)) for _ in range(7)]
    return trees, [logits_for(tree, vocab, seed + i) for i, tree in enumerate(trees)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(0.6, top_p=0.7)], ids=str)
def test_neighbours_and_padding_change_nothing(name: str, sampling: Sampling) -> None:
    trees, logits = random_batch(5)
    batch = TreeBatch.from_trees(trees)
    padded = torch.full((len(trees), batch.token_ids.shape[1], 6), torch.nan)  # poison: padding is never read
    for row, own in enumerate(logits):
        padded[row, : own.shape[1]] = own[0]
    verifier = get_verifier(name)
    together = verifier.verify_batch(batch, padded, sampling, [torch.Generator().manual_seed(i) for i in range(7)])
    for row, (tree, own) in enumerate(zip(trees, logits, strict=True)):
        alone = verifier.verify_batch(TreeBatch.from_trees([tree]), own, sampling, [torch.Generator().manual_seed(row)])
        assert int(alone.nodes) == int(together.nodes[row])
        assert int(alone.bonus_tokens) == int(together.bonus_tokens[row])


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_follows_the_argmax(name: str, temperature: float) -> None:
    """cases.md 42. No generator is needed, none is advanced."""
    trees, logits = random_batch(8)
    for tree, own in zip(trees, logits, strict=True):
        node, tokens, best = 0, tree.token_ids.tolist(), own[0].argmax(-1).tolist()
        while (child := next((c for c in tree.children(node) if tokens[c] == best[node]), None)) is not None:
            node = child
        verdict = get_verifier(name).verify_batch(TreeBatch.from_trees([tree]), own, Sampling(temperature), [])
        assert (int(verdict.nodes), int(verdict.bonus_tokens)) == (node, best[node])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_nucleus(name: str) -> None:
    """cases.md 37: at the root, deeper, and as the bonus after a full acceptance."""
    sampling = Sampling(0.1, top_p=0.9)
    logits = logits_for(TREE, 4, seed=6) / 8
    allowed = process_logits(logits[0], sampling) > -torch.inf
    trees, count = TreeBatch.from_trees([TREE] * 300), 300
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    verdict = get_verifier(name).verify_batch(trees, logits.expand(count, -1, -1), sampling, generators)
    for node, bonus in zip(verdict.nodes.tolist(), verdict.bonus_tokens.tolist(), strict=True):
        assert allowed[node, bonus]
        assert all(allowed[int(TREE.parents[step]), int(TREE.token_ids[step])] for step in TREE.path(node))


def test_children_that_carry_everything_are_never_exited_at() -> None:
    """The nucleus {0, 1} is all in the tree: rounding leaves no sliver of miss at the root."""
    tree = DraftTree([0, 0, 1], [-1, 0, 0])
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0)) / 10
    logits[0, 0, :2] = torch.tensor([4.1, 3.9])
    count = 2000
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    verdict = get_verifier("tev").verify_batch(
        TreeBatch.from_trees([tree] * count), logits.expand(count, -1, -1), Sampling(0.9, top_k=2), generators
    )
    assert (verdict.nodes > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_tokens_and_inputs_untouched(name: str) -> None:
    """cases.md 36, 45."""
    trees, logits = random_batch(9)
    tree, own = max(zip(trees, logits, strict=True), key=lambda pair: pair[0].num_nodes)
    batch, before = TreeBatch.from_trees([tree]), own.clone()
    runs = [
        get_verifier(name).verify_batch(batch, own, Sampling(temperature), [torch.Generator().manual_seed(2)])
        for temperature in (0.5, 0.5, 2.0)
    ]
    assert (int(runs[0].nodes), int(runs[0].bonus_tokens)) == (int(runs[1].nodes), int(runs[1].bonus_tokens))
    assert torch.equal(own, before)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_no_draw_falls_on_weight_zero(uniform: float) -> None:
    """cases.md 39: at the edges of the uniform's range and exactly between two weights."""
    weights = torch.tensor([0.0, 0.1, 0.0, 0.1, 0.2, 0.0], dtype=torch.float64)
    wanted = {0.0: 1, 0.25: 3, 0.5: 4}.get(uniform, 4)
    assert pick(weights.numpy(), uniform) == wanted
    uniforms = torch.tensor([uniform, uniform], dtype=torch.float64)
    assert pick_rows(weights.expand(2, -1), uniforms).tolist() == [wanted, wanted]


def test_bare_roots_and_half_precision() -> None:
    """cases.md 56: zero nodes give one token."""
    root = DraftTree([3], [-1])
    for name in NAMES:
        logits = torch.tensor([[[-40.0, 30.0, -40.0]]], dtype=torch.bfloat16)
        verdict = get_verifier(name).verify_batch(
            TreeBatch.from_trees([root]), logits, Sampling(), [torch.Generator().manual_seed(0)]
        )
        assert (int(verdict.nodes), int(verdict.bonus_tokens)) == (0, 1)


def test_vast_and_tiny_logits_stay_finite() -> None:
    """cases.md 44: a residual 1e-80 of the whole is never drawn from in error, one that is all there is is."""
    tree = DraftTree([0, 0], [-1, 0])
    logits = torch.tensor([[[300.0, 100.0, -200.0], [-1e4, -1e4, -1e4 + 5]]])
    for name in NAMES:
        verdict = get_verifier(name).verify_batch(
            TreeBatch.from_trees([tree]), logits, Sampling(), [torch.Generator().manual_seed(0)]
        )
        assert int(verdict.nodes) == 1


def test_greedy_needs_temperature_zero() -> None:
    with pytest.raises(InputError, match=r"greedy needs temperature 0, not 1\.0"):
        get_verifier("greedy").verify_batch(TreeBatch.from_trees([TREE]), logits_for(TREE, 4, 0), Sampling(), [])
