"""Draws of the sampled verifiers against their laws: given the tree, and averaged over drawn trees against the target.

Seeds are fixed. A broken variant must be found out at p < 1e-6 by the same statistic.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from enumeration import as_batch, chi_square, draft_rows_of, draw_tree, rows_of, target_law
from fakes import Law, Logits, Prefix, random_logits, served

from exittrain.law.sampling import Sampling
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.registry import get_verifier

RULES = [("rrs", "iid"), ("rrs_wor", "without_replacement"), ("traversal", "iid"),
         ("traversal", "without_replacement"), ("block", "iid")]  # fmt: skip
SERVING = [Sampling(0.3), Sampling(), Sampling(2.0), Sampling(1.5, top_p=0.85)]
TARGET, DRAFTER, VOCAB = random_logits(1, 4, 1.0), random_logits(2, 4, 1.0), 4
Block = tuple[int, ...]


def shape_for(name: str) -> dict[Prefix, int]:
    return {(): 1, (0,): 1} if name == "block" else {(): 2, (0,): 2, (1,): 1}


def drawn_blocks(
    name: str, trees: list[DraftTree], sampling: Sampling, drafter: Law, target: Logits = TARGET
) -> list[Block]:
    """One block a tree, all in one batch, a generator each."""
    batch, logits, drafted = as_batch(trees, target, drafter)
    generators = [torch.Generator().manual_seed(5000 + index) for index in range(len(trees))]
    verdict = get_verifier(name).verify_batch(batch, logits, sampling, generators, drafted)
    ends = zip(trees, verdict.nodes.tolist(), verdict.bonus_tokens.tolist(), strict=True)
    return [(*(int(tree.token_ids[step]) for step in tree.path(node)), bonus) for tree, node, bonus in ends]


@pytest.mark.parametrize("sampling", SERVING, ids=str)
@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_batched_draws_follow_the_law_given_the_tree(name: str, drawn: str, sampling: Sampling) -> None:
    drafter, target = served(DRAFTER, sampling), served(TARGET, sampling)
    tree = draw_tree(shape_for(name), drafter, drawn, random.Random(11))
    law = get_verifier(name).block_law(tree, rows_of(tree, target), draft_rows_of(tree, drafter))
    assert chi_square(drawn_blocks(name, [tree] * 1200, sampling, drafter), law) > 0.001


@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_single_draws_follow_the_law_given_the_tree(name: str, drawn: str) -> None:
    drafter, target = served(DRAFTER, Sampling()), served(TARGET, Sampling())
    tree = draw_tree(shape_for(name), drafter, drawn, random.Random(12))
    rows = (
        torch.tensor(rows_of(tree, target)),
        torch.tensor([[float(q) for q in r] for r in draft_rows_of(tree, drafter)]),
    )
    generator, tokens = torch.Generator().manual_seed(3), tree.token_ids.tolist()
    verdicts = [get_verifier(name).verify(tree, *rows, generator) for _ in range(1200)]
    blocks = [(*(tokens[node] for node in verdict.path), verdict.bonus_token) for verdict in verdicts]
    assert chi_square(blocks, get_verifier(name).block_law(tree, *rows)) > 0.001


def joint_p_value(
    name: str, drawn: str, sampling: Sampling, recorded: Law, target: Logits = TARGET, count: int = 2500
) -> float:
    """Trees drawn at the serving settings, blocks continued by the target to three tokens, against TARGET's law."""
    rng, law, drafter = random.Random(4), served(TARGET, sampling), served(DRAFTER, sampling)
    trees = [draw_tree(shape_for(name), drafter, drawn, rng) for _ in range(count)]
    tokens = []
    for block in drawn_blocks(name, trees, sampling, recorded, target):
        while len(block) < 3:
            block = (*block, *rng.choices(range(VOCAB), law(block)))
        tokens.append(block[:3])
    return chi_square(tokens, target_law(law, 3))


@pytest.mark.parametrize("sampling", SERVING, ids=str)
@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_over_drawn_trees_the_target_is_followed(name: str, drawn: str, sampling: Sampling) -> None:
    assert joint_p_value(name, drawn, sampling, served(DRAFTER, sampling)) > 0.001


@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_q_at_another_temperature_is_found_out(name: str, drawn: str) -> None:
    sampling = Sampling(0.5)
    assert joint_p_value(name, drawn, sampling, served(DRAFTER, sampling)) > 0.001
    assert joint_p_value(name, drawn, sampling, served(DRAFTER, Sampling(2.0))) < 1e-6


@pytest.mark.parametrize(("name", "drawn"), RULES)
def test_a_target_at_another_temperature_is_found_out(name: str, drawn: str) -> None:
    """Served at 0.5, verified as if at 1 (cases.md 36): logits are halved so that only the target's side is off."""
    sampling = Sampling(0.5)
    recorded = served(DRAFTER, sampling)
    assert joint_p_value(name, drawn, sampling, recorded, lambda prefix: TARGET(prefix) / 2) < 1e-6


@pytest.mark.parametrize(("name", "drawn"), RULES)
@pytest.mark.parametrize(("p", "rate"), [(0.0, 0.0), (0.3, 0.3)])
def test_acceptance_rate_of_a_certain_draft(name: str, drawn: str, p: float, rate: float) -> None:
    """cases.md 39: q(x) = 1, so x is accepted with p(x), and never where the target has none of it."""
    tree, rows, draft = DraftTree([0, 1], [-1, 0], drawn), [[1 - p, p], [0.5, 0.5]], [[0.0, 1.0], [0.0, 0.0]]
    generator, count = torch.Generator().manual_seed(3), 3000
    one_by_one = [get_verifier(name).verify(tree, rows, draft, generator) for _ in range(count // 2)]

    def law(table: list[list[float]]) -> Any:
        return lambda prefix: torch.tensor(table[len(prefix)])

    blocks = drawn_blocks(name, [tree] * count, Sampling(), law(draft), lambda prefix: law(rows)(prefix).log())
    for accepted in ([verdict.num_accepted for verdict in one_by_one], [len(block) - 1 for block in blocks]):
        assert sum(accepted) / len(accepted) == pytest.approx(rate, abs=0.03 if rate else 0)
    assert all(block == (0,) for block in blocks if len(block) == 1)
