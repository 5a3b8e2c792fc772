"""Known wrong ways to verify sampled trees, each shown not to be exact: what the exactness tests must catch.

By enumeration, so a distance is a number and no accident; on the same tables the right rule is at distance 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
from enumeration import distance, joint_law, sampled_trees, target_law
from fakes import Law, Prefix, random_law, sharpened

from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins
from exittrain.verify import rrs, sampled, traversal
from exittrain.verify.base import Verifier
from exittrain.verify.exits import Exit
from exittrain.verify.registry import get_verifier
from exittrain.verify.rrs import Rrs
from exittrain.verify.sampled import SampledVerifier
from exittrain.verify.traversal import Traversal

Trees = Iterable[tuple[DraftTree, Any]]
TARGET = random_law(1, 3, zeros=0.0, sure=0.0)
DRAFTER = random_law(2, 3, zeros=0.0, sure=0.0)
WIDE: dict[Prefix, int] = {(): 2, (0,): 2}
STAR: dict[Prefix, int] = {(): 2}
THREE: dict[Prefix, int] = {(): 3}
CLEAR = 0.005  # total variation


def trees(shape: dict[Prefix, int], drawn: str, drafter: Law = DRAFTER) -> Trees:
    return list(sampled_trees(shape, drafter, drawn))


def error(rule: str | Verifier, among: Trees, target: Law = TARGET, drafter: Law = DRAFTER) -> float:
    verifier = get_verifier(rule) if isinstance(rule, str) else rule
    return distance(joint_law(verifier, among, target, drafter, 3), target_law(target, 3))


# The update after a rejection


def with_unlike_parent(acc: Any, p: Any, q: Any, token: int, drawn: str | None) -> Any:
    """acc(f) <- S / (1 - q(x)), as one public implementation has it."""
    left = np.maximum(acc * p - q, 0).sum()
    _, target, draft = sampled.rejected(acc, p, q, token, drawn)
    return min(F(1), left / (1 - q[token])), target, draft


def with_parent_unchanged(acc: Any, p: Any, q: Any, token: int, drawn: str | None) -> Any:
    return acc, *sampled.rejected(acc, p, q, token, drawn)[1:]


def with_q_unchanged(acc: Any, p: Any, q: Any, token: int, drawn: str | None) -> Any:
    """cases.md 31: the odds of later draws without replacement are taken from the whole row."""
    return sampled.rejected(acc, p, q, token, "iid")


def with_p_unchanged(acc: Any, p: Any, q: Any, token: int, drawn: str | None) -> Any:
    new, _, draft = sampled.rejected(acc, p, q, token, drawn)
    return new, p, draft


def with_token_zeroed(acc: Any, p: Any, q: Any, token: int, drawn: str | None) -> Any:
    """The fixed trees' update, p(x) <- 0, where q was drawn from."""
    new, _, draft = sampled.rejected(acc, p, q, token, drawn)
    left = p.copy()
    left[token] = 0
    return new, left / left.sum(), draft


@pytest.mark.parametrize(
    ("rule", "drawn", "update"),
    [
        ("traversal", "without_replacement", with_unlike_parent),
        ("traversal", "iid", with_unlike_parent),
        ("traversal", "without_replacement", with_parent_unchanged),
        ("traversal", "iid", with_parent_unchanged),
        ("traversal", "without_replacement", with_q_unchanged),
        ("rrs_wor", "without_replacement", with_q_unchanged),
        ("traversal", "iid", with_p_unchanged),
        ("rrs", "iid", with_p_unchanged),
        ("rrs_wor", "without_replacement", with_p_unchanged),
        ("rrs_wor", "without_replacement", with_token_zeroed),
        ("rrs", "iid", with_token_zeroed),
        ("traversal", "iid", with_token_zeroed),
    ],
)
def test_wrong_updates_are_caught(rule: str, drawn: str, update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    among = trees(WIDE, drawn)
    assert error(rule, among) == 0
    monkeypatch.setattr(traversal, "rejected", update)
    monkeypatch.setattr(rrs, "rejected", update)
    assert error(rule, among) > CLEAR


# The order of siblings, and which of them are kept


def reordered(among: Trees, rank: Any) -> Iterator[tuple[DraftTree, Any]]:
    """Trees of one level with their children in the order of rank(place, token)."""
    for tree, chance in among:
        tokens = tree.token_ids.tolist()
        order = sorted(range(1, len(tokens)), key=lambda node: rank(node, tokens[node]))
        yield DraftTree([0, *(tokens[node] for node in order)], tree.parents, tree.drawn), chance


ODDS = DRAFTER(())


@pytest.mark.parametrize(("rule", "drawn"), [("rrs_wor", "without_replacement"), ("traversal", "without_replacement")])
@pytest.mark.parametrize(
    "rank",
    [
        lambda place, token: -place,
        lambda place, token: (-ODDS[token], place),
        lambda place, token: (ODDS[token], place),
    ],
    ids=["reversed", "likeliest first", "likeliest last"],
)
def test_siblings_out_of_draw_order_are_caught(rule: str, drawn: str, rank: Any) -> None:
    among = trees(STAR, drawn)
    assert error(rule, reordered(among, lambda place, token: place)) == 0
    assert error(rule, reordered(among, rank)) > CLEAR


@pytest.mark.parametrize("rule", ["rrs", "traversal"])
def test_iid_siblings_sorted_by_q_are_caught(rule: str) -> None:
    assert error(rule, trees(STAR, "iid")) == 0
    assert error(rule, reordered(trees(STAR, "iid"), lambda place, token: (-ODDS[token], place))) > CLEAR


@pytest.mark.parametrize("rule", ["rrs_wor", "traversal"])
def test_a_top_k_tree_with_its_true_q_is_caught(rule: str) -> None:
    """cases.md 30: relabelled, as the rule itself refuses it; `tev` is exact on the same tree."""
    best = sorted(range(3), key=lambda token: -ODDS[token])[:2]
    among = [(DraftTree([0, *best], [-1, 0, 0], "without_replacement"), F(1))]
    assert error("tev", among) == 0
    assert error(rule, among) > 0.1


@pytest.mark.parametrize("rule", ["rrs_wor", "traversal"])
def test_a_tree_pruned_by_q_is_caught(rule: str) -> None:
    """cases.md 33: three are drawn, the two likeliest kept, in draw order."""

    def pruned(tree: DraftTree) -> DraftTree:
        tokens = tree.token_ids.tolist()[1:]
        kept = sorted(tokens, key=lambda token: -ODDS[token])[:2]
        return DraftTree([0, *(token for token in tokens if token in kept)], [-1, 0, 0], tree.drawn)

    among = [(pruned(tree), chance) for tree, chance in trees(THREE, "without_replacement")]
    assert error("tev", among) == 0
    assert error(rule, trees(THREE, "without_replacement")) == 0
    assert error(rule, among) > CLEAR


@pytest.mark.parametrize("rule", ["rrs", "traversal"])
def test_twins_merged_with_q_unchanged_are_caught(rule: str) -> None:
    """cases.md 32: a token counts once and is then rejected as if it could have come again."""

    def merged(tree: DraftTree) -> DraftTree:
        single, _ = merge_twins(tree)
        return DraftTree(single.token_ids, single.parents, "iid")

    among = [(merged(tree), chance) for tree, chance in trees(THREE, "iid")]
    assert error(rule, trees(THREE, "iid")) == 0
    assert error(rule, among) > CLEAR


# What is stored and what is drawn from


@pytest.mark.parametrize(
    ("rule", "drawn"), [("rrs", "iid"), ("traversal", "iid"), ("rrs_wor", "without_replacement"),
                        ("traversal", "without_replacement")],
)  # fmt: skip
def test_raw_q_of_a_sharpened_draw_is_caught(rule: str, drawn: str) -> None:
    """cases.md 34: drawn at half the temperature, verified with the probabilities at one."""
    among = trees(WIDE, drawn, sharpened(DRAFTER))
    assert error(rule, among, drafter=sharpened(DRAFTER)) == 0
    assert error(rule, among) > CLEAR


class UnscaledBonus(SampledVerifier):
    """The exits are right, and a leaf's bonus is drawn at another temperature (EAGLE's code)."""

    drawn = ("iid", "without_replacement")

    def __init__(self, rule: Rrs | Traversal, raw: Law) -> None:
        self.name, self.rule, self.raw = rule.name, rule, raw

    def exits_of(self, *given: Any) -> Any:
        raise NotImplementedError

    def exits(self, tree: DraftTree, target_rows: Any, draft_rows: Any) -> Iterator[Exit]:
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        for way in self.rule.exits(tree, target_rows, draft_rows):
            raw = np.array(self.raw(tuple(tokens[step] for step in tree.path(way.node))))
            yield way if way.node in parents else Exit(way.node, way.probability, raw)


@pytest.mark.parametrize("rule", [Rrs(), Traversal()], ids=["rrs", "traversal"])
def test_a_bonus_of_unscaled_logits_is_caught(rule: Rrs | Traversal) -> None:
    among, served = trees(WIDE, "iid"), sharpened(TARGET)
    assert error(rule, among, served) == 0
    assert error(UnscaledBonus(rule, served), among, served) == 0
    assert error(UnscaledBonus(rule, TARGET), among, served) > CLEAR
