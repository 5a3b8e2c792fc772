"""Parts of trees: a part fixed in advance is the smaller tree itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumeration import chi_square
from fakes import TableSession, random_law

from exittrain.build.base import Draft, TreeShape
from exittrain.build.parts import sub_draft
from exittrain.build.registry import get_builder
from exittrain.build.static import rank_paths
from exittrain.errors import InputError


def build(name: str, shape: TreeShape, count: int = 6, seed: int = 0, vocab: int = 5) -> Draft:
    laws = [random_law(seed + i, vocab, zeros=0.3) for i in range(count)]
    return get_builder(name)(TableSession(laws), shape, [torch.Generator().manual_seed(i) for i in range(count)])


def same(ours: Draft, theirs: Draft) -> None:
    for name in ("token_ids", "parents", "depths", "valid", "draft_logprobs"):
        assert torch.equal(getattr(ours.trees, name), getattr(theirs.trees, name))
    assert ours.trees.drawn == theirs.trees.drawn


@pytest.mark.parametrize("name", ["best_first", "oracle"])
@pytest.mark.parametrize("budget", [1, 2, 5, 11])
def test_the_first_n_nodes_of_a_best_first_tree_are_the_tree_of_budget_n(name: str, budget: int) -> None:
    large = build(name, TreeShape(12, 4, 5))
    part, columns = sub_draft(large, budget)
    same(part, build(name, TreeShape(budget, 4, 5)))
    assert torch.equal(columns >= 0, part.trees.valid) and int(columns.max()) <= budget


@pytest.mark.parametrize("name", ["static", "sampled_iid", "sampled_wor"])
def test_columns_say_where_the_nodes_stood(name: str) -> None:
    whole = build(name, TreeShape(14, 3, branching="2-ary"))
    part, columns = sub_draft(whole, [(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
    trees, index, used = part.trees, columns.clamp(min=0), columns >= 0
    assert torch.equal(used, trees.valid) and 1 < int(used.sum(1).max()) <= 6
    assert torch.equal(trees.token_ids, torch.where(used, whole.trees.token_ids.gather(1, index), 0))
    assert torch.equal(part.slots, torch.where(used, whole.slots.gather(1, index), -1))
    assert all(tree.num_nodes <= 5 for tree in trees.trees())  # each a sound tree of its own
    if name != "static":
        assert whole.draft_rows is not None and part.draft_rows is not None
        assert part.draft_rows.probs is whole.draft_rows.probs
        assert torch.equal(part.draft_rows.row_of[used], whole.draft_rows.row_of.gather(1, index)[used])
        assert (part.draft_rows.row_of[trees.has_children()] >= 0).all()


@pytest.mark.parametrize("budget", [1, 3, 6])
def test_a_smaller_static_shape(budget: int) -> None:
    whole, shape = build("static", TreeShape(14, 3, branching="2-ary")), TreeShape(budget, 3, branching="2-ary")
    same(sub_draft(whole, set(rank_paths(shape)))[0], build("static", shape))


def first_children(draft: Draft) -> list[int]:
    return [int(tree.token_ids[1]) for tree in draft.trees.trees()]


def test_a_part_of_a_sampled_tree_has_the_law_of_the_smaller_shape_and_one_chosen_by_score_has_not() -> None:
    law = random_law(1, 4, zeros=0.0, sure=0.0)
    generators = [torch.Generator().manual_seed(i) for i in range(1500)]
    whole = get_builder("sampled_wor")(TableSession([law] * 1500), TreeShape(2, 1, branching="2-ary"), generators)
    wanted = dict(enumerate(law(())))
    assert chi_square(first_children(sub_draft(whole, [(0,)])[0]), wanted) > 0.001
    assert whole.trees.draft_logprobs is not None
    scores = whole.trees.draft_logprobs
    chosen = torch.stack([scores[:, 0] == 0, scores[:, 1] >= scores[:, 2], scores[:, 1] < scores[:, 2]], dim=1)
    assert chi_square(first_children(whole.keep(chosen)[0]), wanted) < 1e-6


def test_nothing_and_everything() -> None:
    whole = build("best_first", TreeShape(7, 3, 4))
    same(sub_draft(whole, 7)[0], whole)
    same(sub_draft(whole, 99)[0], whole)
    roots, columns = sub_draft(whole, 0)
    assert roots.trees.token_ids.shape == (6, 1) and columns.tolist() == [[0]] * 6
    assert sub_draft(build("sampled_iid", TreeShape(3, 3)), [()])[0].trees.valid.sum() == 6


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("best_first", -1, "must not be negative"),
        ("sampled_wor", 3, "give rank paths"),
        ("static", [(0, 0)], r"rank path \[0, 0\] needs \[0\]"),
        ("sampled_iid", [(1,)], r"rank path \[1\] needs \[0\]"),
    ],
)
def test_what_is_refused(name: str, part: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        sub_draft(build(name, TreeShape(6, 3, branching="2-ary")), part)
