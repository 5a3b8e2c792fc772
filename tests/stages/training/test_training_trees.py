"""Trees side by side: groups, joining, leaves left out, and what shards hold."""

from __future__ import annotations

import pytest
import torch
from tiny_training import SHAPE, VOCAB, make_drafter, make_rows

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.errors import InputError
from exittrain.law.exit_law import batch_exit_law, edge_logprobs
from exittrain.law.sampling import Sampling, process_logits
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.stages.training import scoring
from exittrain.stages.training import trees as trees_module
from exittrain.stages.training.held_out import staleness
from exittrain.stages.training.scoring import score_edges, tree_edges
from exittrain.stages.training.sequences import SequenceSet, choose_anchors
from exittrain.stages.training.trees import (
    StoredTrees,
    anchor_groups,
    draw_trees,
    join_trees,
    max_trees,
    take_trees,
    tree_generators,
)
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.tree.merge import merge_twins

FIELDS = ("token_ids", "parents", "depths", "valid")


def drawn(sequences: SequenceSet, sampling: Sampling | None = None):
    masks = [sequences.anchor_mask(i, 1000) for i in range(len(sequences))]
    owner, anchors = choose_anchors(masks, 3, generator_for(0))
    trees = draw_trees(make_drafter(), sequences.tokens, owner, anchors, SHAPE, sampling or Sampling(), "best_first")
    return trees, owner, anchors


def test_groups_hold_every_anchor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees_module, "MAX_TOKENS", 60)
    owner = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 3])
    lengths = [30, 10, 50, 20]
    groups = [rows.tolist() for rows in anchor_groups(lengths, owner, most=3)]
    assert sorted(i for rows in groups for i in rows) == list(range(9))
    for rows in groups:
        used = {int(owner[i]) for i in rows}
        assert len(rows) <= 3 and len(used) * max(lengths[s] for s in used) <= 60
    assert list(anchor_groups([], torch.zeros(0, dtype=torch.int64))) == []


def test_wide_vocabularies_share_a_group_with_few() -> None:
    assert max_trees(150_000, TreeShape(budget=64)) == 6
    assert max_trees(1000, TreeShape(budget=16)) == trees_module.MAX_TREES


def test_grouping_changes_no_tree(sequences: SequenceSet, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, owner, anchors = drawn(sequences)
    monkeypatch.setattr(trees_module, "MAX_TREES", 2)
    parts, _, _ = drawn(sequences)
    for name in FIELDS:
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    assert whole.token_ids[:, 0].tolist() == [
        int(sequences.tokens[s][a]) for s, a in zip(owner.tolist(), anchors.tolist(), strict=True)
    ]


@pytest.mark.parametrize("builder", ["sampled_iid", "sampled_wor"])
def test_sampled_trees_depend_on_their_place_alone(
    sequences: SequenceSet, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what its own generator gives, without twins: whatever is drawn beside it, in whatever groups."""
    masks = [sequences.anchor_mask(i, 1000) for i in range(len(sequences))]
    owner, anchors = choose_anchors(masks, 3, generator_for(0))
    shape = TreeShape(budget=12, depth=2, branching="3-ary")

    def draw(rows: torch.Tensor, *parts: int) -> list[DraftTree]:
        places = [(sequences.ids[owner[row]], int(anchors[row])) for row in rows]
        generators = tree_generators(builder, places, *parts)
        inputs = (sequences.tokens, owner[rows], anchors[rows], shape, Sampling(0.3), builder)
        return draw_trees(make_drafter(), *inputs, generators).trees()

    everything = torch.arange(len(anchors))
    whole = draw(everything, 5)
    monkeypatch.setattr(trees_module, "MAX_TREES", 2)
    again, other = draw(everything.flip(0), 5)[::-1], draw(everything, 6)
    for row, tree in enumerate(whole):
        session = make_drafter().session(
            [sequences.tokens[owner[row]]], torch.tensor([0]), anchors[row : row + 1], Sampling(0.3)
        )
        alone = [generator_for(5, sequences.ids[owner[row]], int(anchors[row]))]
        (drawn_tree,) = get_builder(builder)(session, shape, alone).trees.trees()
        for wanted in (merge_twins(drawn_tree)[0], again[row]):
            assert tree.token_ids.tolist() == wanted.token_ids.tolist()
            assert tree.parents.tolist() == wanted.parents.tolist()
        edges = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
        assert len(set(edges)) == len(edges)
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(whole, other, strict=True))
    assert (min(tree.num_nodes for tree in whole) < 12) == (builder == "sampled_iid")


def test_trees_by_score_take_no_generators(sequences: SequenceSet) -> None:
    assert tree_generators("best_first", [("a", 1)], 0) is None
    inputs = (sequences.tokens, torch.tensor([0]), torch.tensor([3]), SHAPE, Sampling())
    with pytest.raises(InputError, match="give it generators"):
        draw_trees(make_drafter(), *inputs, "sampled_wor")


def test_join_undoes_take(sequences: SequenceSet) -> None:
    whole, _, _ = drawn(sequences)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    rows = list(torch.split(order, 7))
    joined = join_trees([take_trees(whole, part) for part in rows], rows)
    for name in (*FIELDS, "draft_logprobs"):
        assert torch.equal(getattr(whole, name), getattr(joined, name)), name
    assert len(join_trees([], [])) == 0


def test_inner_trees_hold_roots_and_parents_only() -> None:
    trees = TreeBatch.from_trees(
        [DraftTree([1, 2, 3, 4, 5], [-1, 0, 0, 2, 3]), DraftTree([7, 8], [-1, 0]), DraftTree([9], [-1])]
    )
    edges = tree_edges(trees)
    assert [tree.token_ids.tolist() for tree in edges.inner.trees()] == [[1, 3, 4], [7], [9]]
    assert [tree.parents.tolist() for tree in edges.inner.trees()] == [[-1, 0, 1], [-1], [-1]]
    assert edges.rows.tolist() == [0, 2, 3, 5] and edges.places.tolist() == [0, 1, 2, 3]
    assert edges.tokens.tolist() == [2, 3, 4, 5, 8] and edges.row_of.tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, top_p=0.9), Sampling(0.0)])
def test_scores_equal_whole_trees(
    target: TargetModel, sequences: SequenceSet, sampling: Sampling, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.CHUNK_BYTES, "cpu", chunk_rows * 4 * VOCAB)
    trees, owner, anchors = drawn(sequences, sampling)
    whole = target.head(target.tree_hidden(sequences.tokens, trees, owner, anchors))
    expected = edge_logprobs(trees, process_logits(whole, sampling))
    for rows in (None, trees.valid):
        edges = tree_edges(trees, rows)
        hidden = target.tree_hidden(sequences.tokens, edges.inner, owner, anchors).flatten(0, 1)[edges.places]
        found, logits = score_edges(target.head, hidden, edges, sampling, VOCAB, keep=True)
        torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-4, atol=1e-6)
        assert logits.shape == (len(edges.rows), VOCAB)
        law = batch_exit_law(trees, found)
        torch.testing.assert_close(law.coverage, batch_exit_law(trees, expected).coverage, rtol=1e-4, atol=1e-6)


def records(sequences: SequenceSet, target: TargetModel) -> list[dict]:
    trees, owner, anchors = drawn(sequences)
    edges = tree_edges(trees)
    hidden = target.tree_hidden(sequences.tokens, edges.inner, owner, anchors).flatten(0, 1)[edges.places]
    scores, _ = score_edges(target.head, hidden, edges, Sampling(), VOCAB)
    rows = []
    for i, size in enumerate(trees.valid.sum(1).tolist()):
        rows.append(
            {
                "sequence_id": sequences.ids[owner[i]],
                "anchor": int(anchors[i]),
                **{name: getattr(trees, name)[i, :size].tolist() for name in ("token_ids", "parents", "depths")},
                "draft_logprob": trees.draft_logprobs[i, 1:size].tolist(),
                "target_logprob": scores[i, 1:size].tolist(),
                "temperature": 1.0,
                "target_hash": "t",
            }
        )
    return rows


def test_stored_trees_are_the_recorded_ones(sequences: SequenceSet, target: TargetModel) -> None:
    stored = StoredTrees.from_rows(records(sequences, target)[::-1], sequences, 1.0, "t")
    owner, rows = stored.choose([4, 0], 2, generator_for(1))
    assert owner.tolist() == [0, 0, 1, 1]
    for i, row in zip([4, 4, 0, 0], rows.tolist(), strict=True):
        assert int(stored.trees.token_ids[row, 0]) == int(sequences.tokens[i][stored.anchors[row]])
    moved = staleness(make_drafter(), target, sequences.tokens, stored, rows, SHAPE, Sampling(), "best_first")
    assert moved["log_q_change"] < 1e-5 and moved["still_drawn"] == 1
    moved = staleness(make_drafter(9), target, sequences.tokens, stored, rows, SHAPE, Sampling(), "best_first")
    assert moved["log_q_change"] > 1e-3 and moved["still_drawn"] < 1


@pytest.mark.parametrize(("change", "said"), [
    ({"target_hash": "other"}, "target_hash other"),
    ({"temperature": 0.5}, "temperature 0.5"),
    ({"token_ids": [49, 1], "parents": [-1, 0], "depths": [0, 1]}, "another root"),
])  # fmt: skip
def test_shards_that_do_not_fit_are_refused(
    sequences: SequenceSet, target: TargetModel, change: dict, said: str
) -> None:
    rows = records(sequences, target)
    rows[2] |= change
    with pytest.raises(InputError, match=said):
        StoredTrees.from_rows(rows, sequences, 1.0, "t")


def test_shards_of_other_sequences_are_refused(sequences: SequenceSet, target: TargetModel) -> None:
    others = SequenceSet.from_rows([{**row, "sequence_id": f"other{i}"} for i, row in enumerate(make_rows())])
    with pytest.raises(InputError, match="no shard row"):
        StoredTrees.from_rows(records(sequences, target), others, 1.0, "t")
