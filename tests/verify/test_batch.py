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
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins
from exittrain.verify.draws import pick, pick_rows
from exittrain.verify.registry import VERIFIERS, get_verifier

NAMES = [name for name in VERIFIERS if name != "greedy"]
DRAWN = {"rrs": "iid", "rrs_wor": "without_replacement", "traversal": "iid", "block": "without_replacement"}
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


def random_batch(seed: int, name: str, vocab: int = 6) -> tuple[list[DraftTree], list[Tensor], list[DraftRows]]:
    """Trees that the verifier is made for, with raw logits [1, N+1, V] and draft rows each."""
    rng = random.Random(seed)
    trees = [random_tree(rng, vocab, 4, rng.randrange(9), DRAWN.get(name)) for _ in range(7)]
    if name == "block":
        trees = [DraftTree(tree.token_ids, range(-1, tree.num_nodes), tree.drawn) for tree in trees]
    logits = [logits_for(tree, vocab, seed + i) for i, tree in enumerate(trees)]
    return trees, logits, [draft_rows(tree, vocab, seed + 50 + i) for i, tree in enumerate(trees)]


def draft_rows(tree: DraftTree, vocab: int, seed: int) -> DraftRows:
    """A random row for each node with children."""
    probs = logits_for(tree, vocab, seed)[0].softmax(-1)
    parents = TreeBatch.from_trees([tree]).has_children()
    return DraftRows(probs, torch.where(parents, torch.arange(len(probs)), -1))


def side_by_side(rows: list[DraftRows]) -> DraftRows:
    """Of single trees to a batch's, padded; the rows of an earlier tree stand before those of a later."""
    width, row_of, before = max(one.row_of.shape[1] for one in rows), [], 0
    for one in rows:
        index = torch.where(one.row_of >= 0, one.row_of + before, -1)
        row_of.append(torch.nn.functional.pad(index[0], (0, width - index.shape[1]), value=-1))
        before += len(one.probs)
    return DraftRows(torch.cat([one.probs for one in rows]), torch.stack(row_of))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0), Sampling(0.6, top_p=0.7)], ids=str)
def test_neighbours_and_padding_change_nothing(name: str, sampling: Sampling) -> None:
    trees, logits, rows = random_batch(5, name)
    batch = TreeBatch.from_trees(trees)
    padded = torch.full((len(trees), batch.token_ids.shape[1], 6), torch.nan)  # poison: padding is never read
    for row, own in enumerate(logits):
        padded[row, : own.shape[1]] = own[0]
    verifier = get_verifier(name)
    generators = [torch.Generator().manual_seed(i) for i in range(7)]
    together = verifier.verify_batch(batch, padded, sampling, generators, side_by_side(rows))
    exits = verifier.exit_probabilities(batch, padded, sampling, side_by_side(rows))
    assert exits.dtype == torch.float64 and not exits[~batch.valid].any()
    for row, (tree, own) in enumerate(zip(trees, logits, strict=True)):
        single, generator = TreeBatch.from_trees([tree]), torch.Generator().manual_seed(row)
        alone = verifier.verify_batch(single, own, sampling, [generator], rows[row])
        assert int(alone.nodes) == int(together.nodes[row])
        assert int(alone.bonus_tokens) == int(together.bonus_tokens[row])
        ours = verifier.exit_probabilities(single, own, sampling, rows[row])[0]
        torch.testing.assert_close(exits[row, : len(ours)], ours, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_follows_the_argmax(name: str, temperature: float) -> None:
    """cases.md 42. No generator is needed, none is advanced."""
    trees, logits, rows = random_batch(8, name)
    for tree, own, drafted in zip(trees, logits, rows, strict=True):
        node, tokens, best = 0, tree.token_ids.tolist(), own[0].argmax(-1).tolist()
        while (child := next((c for c in tree.children(node) if tokens[c] == best[node]), None)) is not None:
            node = child
        single = TreeBatch.from_trees([tree])
        verdict = get_verifier(name).verify_batch(single, own, Sampling(temperature), [], drafted)
        assert (int(verdict.nodes), int(verdict.bonus_tokens)) == (node, best[node])
        exits = get_verifier(name).exit_probabilities(single, own, Sampling(temperature), drafted)
        assert float(exits[0, node]) == pytest.approx(1, abs=1e-12)


def tree_for(name: str) -> DraftTree:
    """TREE, or the chain of its tokens, as the verifier wants it drawn."""
    return DraftTree(TREE.token_ids, range(-1, 5) if name == "block" else TREE.parents, DRAWN.get(name))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_nucleus(name: str) -> None:
    """cases.md 37: at the root, deeper, and as the bonus after a full acceptance."""
    sampling, tree, count = Sampling(0.1, top_p=0.9), tree_for(name), 300
    logits = logits_for(TREE, 4, seed=6) / 8
    allowed = process_logits(logits[0], sampling) > -torch.inf
    trees, rows = TreeBatch.from_trees([tree] * count), side_by_side([draft_rows(tree, 4, 7)] * count)
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    verdict = get_verifier(name).verify_batch(trees, logits.expand(count, -1, -1), sampling, generators, rows)
    for node, bonus in zip(verdict.nodes.tolist(), verdict.bonus_tokens.tolist(), strict=True):
        assert allowed[node, bonus]
        assert all(allowed[int(tree.parents[step]), int(tree.token_ids[step])] for step in tree.path(node))


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
    trees, logits, rows = random_batch(9, name)
    tree, own, drafted = max(zip(trees, logits, rows, strict=True), key=lambda parts: parts[0].num_nodes)
    batch, before, probs = TreeBatch.from_trees([tree]), own.clone(), drafted.probs.clone()
    runs = [
        get_verifier(name).verify_batch(batch, own, Sampling(temperature), [torch.Generator().manual_seed(2)], drafted)
        for temperature in (0.5, 0.5, 2.0)
    ]
    assert (int(runs[0].nodes), int(runs[0].bonus_tokens)) == (int(runs[1].nodes), int(runs[1].bonus_tokens))
    assert torch.equal(own, before) and torch.equal(drafted.probs, probs)


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
    for name in NAMES:
        trees, rows = TreeBatch.from_trees([DraftTree([3], [-1], DRAWN.get(name))]), torch.full((1, 1), -1)
        logits = torch.tensor([[[-40.0, 30.0, -40.0]]], dtype=torch.bfloat16)
        given = (trees, logits, Sampling())
        nothing = DraftRows(torch.zeros(0, 3), rows)
        verdict = get_verifier(name).verify_batch(*given, [torch.Generator().manual_seed(0)], nothing)
        assert (int(verdict.nodes), int(verdict.bonus_tokens)) == (0, 1)
        assert get_verifier(name).exit_probabilities(*given, nothing).tolist() == [[1.0]]


def test_vast_and_tiny_logits_stay_finite() -> None:
    """cases.md 44: a residual 1e-80 of the whole is never drawn from in error, one that is all there is is."""
    logits = torch.tensor([[[300.0, 100.0, -200.0], [-1e4, -1e4, -1e4 + 5]]])
    for name in NAMES:
        tree = DraftTree([0, 0], [-1, 0], DRAWN.get(name))
        rows, generators = draft_rows(tree, 3, 0), [torch.Generator().manual_seed(0)]
        verdict = get_verifier(name).verify_batch(TreeBatch.from_trees([tree]), logits, Sampling(), generators, rows)
        assert int(verdict.nodes) == 1


def test_greedy_needs_temperature_zero() -> None:
    with pytest.raises(InputError, match=r"greedy needs temperature 0, not 1\.0"):
        get_verifier("greedy").verify_batch(TreeBatch.from_trees([TREE]), logits_for(TREE, 4, 0), Sampling(), [])
    with pytest.raises(InputError, match=r"greedy needs temperature 0, not 1\.0"):
        get_verifier("greedy").exit_probabilities(TreeBatch.from_trees([TREE]), logits_for(TREE, 4, 0), Sampling())


@pytest.mark.parametrize("tree", [TREE, TWINS], ids=["fixed", "twins"])
@pytest.mark.parametrize("name", ["tev", "predraw", "residual"])
def test_fixed_verifiers_have_one_exit_law_in_batches(name: str, tree: DraftTree) -> None:
    """Against the rule's own exits; twins count at the first and are numbered as in the tree given."""
    logits, sampling = logits_for(tree, 4, seed=5), Sampling(0.7, top_p=0.9)
    exits = get_verifier(name).exit_probabilities(TreeBatch.from_trees([tree]), logits, sampling)[0]
    probs, wanted = process_logits(logits[0], sampling).double().exp(), torch.zeros(tree.num_nodes + 1).double()
    merged, kept = merge_twins(tree)
    for way in get_verifier(name).ways(tree, probs, None)[1]:
        wanted[kept[way.node]] += way.probability
    torch.testing.assert_close(exits, wanted, atol=1e-7, rtol=0)
    assert float(exits @ (tree.depths + 1).double()) == pytest.approx(
        get_verifier(name).expected_block_length(tree, probs), abs=1e-6
    )
    assert merged.num_nodes == tree.num_nodes or not exits[2]
