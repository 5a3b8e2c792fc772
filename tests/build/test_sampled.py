"""Sampled trees have the law of their draws: by exact grids, by enumeration and chi-square, with controls that fail."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction as F
from functools import lru_cache
from typing import Any

import pytest
import torch
from enumeration import chi_square
from fakes import Law, Prefix, TableSession, random_law, sharpened
from torch import Tensor

from exittrain.build import sampled
from exittrain.build.base import Draft, TreeShape
from exittrain.build.fill import Path
from exittrain.build.registry import get_builder
from exittrain.build.sampled import draw_tokens
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.draft_tree import DraftTree

NAMES = {"sampled_iid": "iid", "sampled_wor": "without_replacement"}
PATHS: tuple[Path, ...] = ((), (0,), (1,), (0, 0), (0, 1), (1, 0))
Key = tuple[int | None, ...]  # a tree as the token at each place of the shape, None where there is none


def cached(law: Law) -> Law:
    return lru_cache(maxsize=None)(law)


def tree_law(paths: Sequence[Path], law: Law, drawn: str) -> dict[Key, Any]:
    """Every tree of a shape with its probability, place after place."""
    found: dict[Key, Any] = {(-1,): F(1)}
    for path in paths[1:]:
        longer: dict[Key, Any] = {}
        for key, chance in found.items():
            at = dict(zip(paths, key, strict=False))
            tokens = [at[path[:depth]] for depth in range(1, len(path))]
            left = [] if None in tokens else list(law(tuple(t for t in tokens if t is not None)))
            if drawn == "without_replacement":
                for rank in range(path[-1]):
                    elder = at[(*path[:-1], rank)]
                    if elder is not None:
                        left[elder] = 0
            options: list[tuple[int | None, Any]] = [(x, p / sum(left)) for x, p in enumerate(left) if p > 0]
            for token, probability in options or [(None, F(1))]:
                longer[(*key, token)] = chance * probability
        found = longer
    return found


def key_of(tree: DraftTree, paths: Sequence[Path]) -> Key:
    tokens, at = tree.token_ids.tolist(), {0: ()}
    for node in range(tree.num_nodes + 1):
        at |= {child: (*at[node], rank) for rank, child in enumerate(tree.children(node))}
    token_at: dict[Path, int] = {path: tokens[node] for node, path in at.items()}
    return (-1, *(token_at.get(path) for path in paths[1:]))


def build(name: str, laws: Sequence[Law], paths: Any = PATHS, seeds: Sequence[int] | None = None) -> Draft:
    shape = TreeShape(16, 4, branching=paths if isinstance(paths, str) else tuple(paths[1:]))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(laws))]
    return get_builder(name)(TableSession(laws), shape, generators)


def keys(name: str, law: Law, count: int, paths: Sequence[Path] = PATHS) -> list[Key]:
    return [key_of(tree, paths) for tree in build(name, [cached(law)] * count, paths).trees.trees()]


@pytest.mark.parametrize("replaced", [True, False])
def test_draws_over_a_grid_of_uniforms_have_the_exact_law(replaced: bool) -> None:
    """Every threshold of this row, renormalised or not, is a multiple of 1/60: counting is enumeration."""
    row = [F(1, 2), F(0), F(1, 3), F(1, 6)]
    uniforms = (torch.cartesian_prod(torch.arange(60), torch.arange(60)).double() + 0.5) / 60
    probs = torch.tensor([float(p) for p in row]).expand(3600, -1)
    before = probs.clone()
    tokens, weights = draw_tokens(probs, uniforms, replaced)
    wanted = {
        (a, b): row[a] * (row[b] if replaced else row[b] / (1 - row[a])) * 3600
        for a, b in itertools.product((0, 2, 3), repeat=2)
        if replaced or a != b
    }
    assert Counter(map(tuple, tokens.tolist())) == wanted
    assert torch.equal(weights, probs.double().gather(1, tokens)) and torch.equal(probs, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_trees_have_the_law_of_their_draws(name: str, seed: int) -> None:
    law = random_law(seed, 4, zeros=0.3, sure=0.15)
    expected = tree_law(PATHS, law, NAMES[name])
    assert sum(expected.values()) == 1
    drawn = keys(name, law, 2500)
    assert chi_square(drawn, expected) > 0.001
    other = "iid" if name == "sampled_wor" else "without_replacement"
    assert chi_square(drawn, tree_law(PATHS, law, other)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_sharpened_drafter_is_found_out(name: str) -> None:
    """cases.md 34: drawn at one temperature, held to the rows of another."""
    law = random_law(5, 4, zeros=0.0, sure=0.0)
    assert chi_square(keys(name, sharpened(law), 1500), tree_law(PATHS, law, NAMES[name])) < 1e-6


def test_siblings_sorted_by_probability_are_found_out() -> None:
    """cases.md 33: the order of the draws is part of the law."""
    paths, law = ((), (0,), (1,)), random_law(5, 4, zeros=0.0, sure=0.0)
    drawn, wanted = keys("sampled_wor", law, 1500, paths), tree_law(paths, law, "without_replacement")
    assert chi_square(drawn, wanted) > 0.001
    assert chi_square([(-1, *sorted(key[1:], key=lambda x: -law(())[x or 0])) for key in drawn], wanted) < 1e-6


def test_twenty_thousand_draws_from_the_recorded_row() -> None:
    """cases.md 35: token and q come from one float32 tensor."""
    row = (torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2).softmax(-1)
    uniforms = torch.rand((20000, 1), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, _ = draw_tokens(row.expand(20000, -1), uniforms, True)
    drawn = tokens[:, 0].tolist()
    assert chi_square(drawn, dict(enumerate(row.tolist()))) > 0.001
    sharp = row**1.1
    assert chi_square(drawn, dict(enumerate((sharp / sharp.sum()).tolist()))) < 1e-6


class Recording(TableSession):
    """Remembers each slot's log-probabilities as they were given out."""

    def root(self) -> Tensor:
        self.given = [[row] for row in super().root()]
        return torch.stack([row[0] for row in self.given])

    def expand(self, parent_slots: Tensor, token_ids: Tensor, valid: Tensor) -> Tensor:
        logprobs = super().expand(parent_slots, token_ids, valid)
        for rows, new in zip(self.given, logprobs, strict=True):
            rows.extend(new)
        return logprobs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("branching", ["chain", "3-ary", "eagle"])
def test_recorded_rows_are_the_sessions_bit_for_bit(name: str, branching: str) -> None:
    session = Recording([random_law(seed, 5, zeros=0.4, sure=0.3) for seed in range(6)])
    generators = [torch.Generator().manual_seed(i) for i in range(6)]
    draft = get_builder(name)(session, TreeShape(25, 5, branching=branching), generators)
    rows, trees = draft.draft_rows, draft.trees
    assert rows is not None and rows.probs.dtype == torch.float32
    assert torch.equal(rows.row_of >= 0, trees.has_children())
    assert sorted(rows.row_of[rows.row_of >= 0].tolist()) == list(range(len(rows.probs)))
    for tree, node in trees.has_children().nonzero().tolist():
        given = session.given[tree][int(draft.slots[tree, node])]
        assert torch.equal(rows.probs[rows.row_of[tree, node]], given.exp())
        for child in trees.trees()[tree].children(node):
            assert trees.draft_logprobs is not None
            assert trees.draft_logprobs[tree, child] == given[trees.token_ids[tree, child]] > -torch.inf


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_depends_on_its_own_stream_alone(name: str) -> None:
    laws = [random_law(seed, 4, zeros=0.4, sure=0.3) for seed in range(7)]
    together = build(name, laws, "2-ary").trees.trees()
    assert len({tree.num_nodes for tree in together}) > 1 or name == "sampled_iid"
    for seed, (law, tree) in enumerate(zip(laws, together, strict=True)):
        alone = build(name, [law], "2-ary", [seed]).trees.trees()[0]
        assert torch.equal(alone.token_ids, tree.token_ids) and torch.equal(alone.parents, tree.parents)
    again = build(name, laws, "2-ary").trees
    assert torch.equal(again.token_ids, build(name, laws, "2-ary").trees.token_ids)
    others = build(name, laws, "2-ary", range(50, 57)).trees.trees()
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(together, others, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_uniforms_used_are_a_function_of_the_shape(name: str) -> None:
    """Also where tokens run out: what the generator gives next does not tell how the tree turned out."""
    shape = TreeShape(5, 4, branching=PATHS[1:])
    for law in (random_law(0, 6, zeros=0.0, sure=0.0), random_law(0, 6, sure=1.0)):
        generator, plain = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        get_builder(name)(TableSession(law), shape, [generator])
        torch.rand(5, dtype=torch.float64, generator=plain)
        assert torch.equal(generator.get_state(), plain.get_state())


def test_few_tokens() -> None:
    """Without replacement the missing children are left out with all below; i.i.d. twins stay and have children."""

    def law(prefix: Prefix) -> list[F]:
        return [F(0), F(1, 3), F(2, 3)] if not prefix else [F(1), F(0), F(0)]

    paths = ((), (0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (2, 0))
    for tree in build("sampled_wor", [law] * 20, paths).trees.trees():
        assert tree.parents.tolist() == [-1, 0, 0, 1, 2] and sorted(tree.token_ids.tolist()[1:3]) == [1, 2]
    for tree in build("sampled_iid", [law] * 20, paths).trees.trees():
        assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 2, 2, 3]
        assert set(tree.token_ids.tolist()[1:4]) <= {1, 2} and tree.token_ids.tolist()[4:] == [0] * 4
    one = build("sampled_wor", [random_law(0, 1)] * 2, "3-ary").trees.trees()
    assert all(tree.parents.tolist() == [-1, 0, 1, 2] for tree in one)  # the shape has three levels


@pytest.mark.parametrize("name", NAMES)
def test_rows_cut_by_top_p(name: str) -> None:
    """Nothing outside the nucleus is drawn, and the recorded rows are the cut ones."""
    sampling = Sampling(0.7, top_p=0.6)

    def law(prefix: Prefix) -> list[float]:
        logits = torch.randn(12, generator=torch.Generator().manual_seed(sum(prefix) + 31 * len(prefix))) * 2
        return process_logits(logits, sampling).exp().tolist()

    draft = build(name, [cached(law)] * 30, "3-ary")
    rows = draft.draft_rows
    assert rows is not None and (rows.probs == 0).any()
    for index, tree in enumerate(draft.trees.trees()):
        own = rows.of_tree(index, tree.num_nodes)
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        for node in range(1, tree.num_nodes + 1):
            prefix = tuple(tokens[step] for step in tree.path(node)[:-1])
            assert law(prefix)[tokens[node]] > 0
            assert own[parents[node]].tolist() == pytest.approx(law(prefix), abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_drawing_in_turn_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laws = [random_law(seed, 5) for seed in range(5)]
    whole = build(name, laws, "3-ary").trees
    monkeypatch.setattr(sampled, "MAX_WEIGHTS", 10)
    assert torch.equal(build(name, laws, "3-ary").trees.token_ids, whole.token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused(name: str) -> None:
    session, builder = TableSession([random_law(0, 4)] * 2), get_builder(name)
    with pytest.raises(InputError, match=f"{name} draws its trees"):
        builder(session, TreeShape())
    with pytest.raises(InputError, match=f"{name} needs one generator a context: 1 for 2"):
        builder(session, TreeShape(), [torch.Generator()])
    with pytest.raises(InputError, match=r"\[0, 1\] needs its elder sibling \[0, 0\]"):
        build(name, [random_law(0, 4)], ((), (0,), (0, 1)))
    with pytest.raises(InputError, match="EAGLE's tree has 25 nodes"):
        build(name, [random_law(0, 4)], "eagle")
