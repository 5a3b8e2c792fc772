"""Which sequences and anchors a step sees."""

from __future__ import annotations

import pytest
import torch
from tiny_training import make_rows

from exittrain.errors import InputError
from exittrain.law.seeding import generator_for
from exittrain.stages.training.sequences import Plan, SequenceSet, batch_at, choose_anchors, micro_batches


@pytest.mark.parametrize(("count", "batch"), [(10, 4), (10, 3), (1, 4), (100, 4), (65, 4), (7, 7)])
def test_an_epoch_sees_every_sequence_once(count: int, batch: int) -> None:
    lengths = tuple(3 + i * 7 % 11 for i in range(count))
    per_epoch, seen = 0, []
    while len(seen) < count:
        seen += batch_at(lengths, batch, 0, per_epoch)
        per_epoch += 1
    assert sorted(seen) == list(range(count))
    second = [i for step in range(per_epoch, 2 * per_epoch) for i in batch_at(lengths, batch, 0, step)]
    assert sorted(second) == list(range(count))
    assert count < 10 or second != seen


def test_order_is_a_function_of_seed_and_step() -> None:
    lengths = tuple(range(5, 45))
    assert batch_at(lengths, 4, 0, 7) == batch_at(lengths, 4, 0, 7)
    assert [batch_at(lengths, 4, 0, s) for s in range(9)] != [batch_at(lengths, 4, 1, s) for s in range(9)]


def test_batches_hold_sequences_of_like_length() -> None:
    lengths = tuple(torch.randint(10, 200, (640,), generator=torch.Generator().manual_seed(0)).tolist())
    spread = [max(ls) - min(ls) for s in range(160) if (ls := [lengths[i] for i in batch_at(lengths, 4, 0, s)])]
    assert sum(spread) / len(spread) < 20


def test_anchors_precede_trained_tokens() -> None:
    rows = [{"sequence_id": "a", "token_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [1, 0, 0, 1, 1, 0, 1]}]
    data = SequenceSet.from_rows(rows)
    assert data.anchor_mask(0, 100).nonzero().flatten().tolist() == [2, 3, 5]  # the first token has no predecessor
    assert data.anchor_mask(0, 3).nonzero().flatten().tolist() == [2, 3]
    assert not data.anchor_mask(0, -3).any()  # trees deeper than the model's positions


def test_anchors_are_uniform_without_replacement() -> None:
    masks = [torch.tensor([True] * 5 + [False] * 3), torch.tensor([False, True])]
    counts = torch.zeros(5)
    for seed in range(400):
        owner, anchors = choose_anchors(masks, 2, generator_for(seed))
        assert owner.tolist() == [0, 0, 1] and anchors[2] == 1 and anchors[0] < anchors[1] < 5
        counts[anchors[:2]] += 1
    assert (counts - 160).abs().max() < 40


def test_rows_without_trained_tokens_are_counted() -> None:
    rows = [*make_rows(3), {"sequence_id": "none", "token_ids": [1, 2], "loss_mask": [1, 0]}]
    data = SequenceSet.from_rows(rows)
    assert (len(data), data.num_dropped) == (3, 1)
    with pytest.raises(InputError, match="no sequence with a trained token"):
        SequenceSet.from_rows(rows[3:])
    with pytest.raises(InputError, match="'bad'"):
        SequenceSet.from_rows([{"sequence_id": "bad", "token_ids": [1, 2], "loss_mask": [1]}])


@pytest.mark.parametrize(("count", "micro", "world"), [(10, 2, 3), (1, 1, 3), (4, 2, 1), (5, 3, 2)])
def test_every_member_is_in_one_micro_batch(count: int, micro: int, world: int) -> None:
    """As many micro-batches on every rank, whatever it got (cases.md 88)."""
    parts = [micro_batches(count, micro, rank, world) for rank in range(world)]
    assert all(len(part) == micro for part in parts)
    assert sorted(i for part in parts for members in part for i in members) == list(range(count))


def test_a_share_keeps_its_anchors() -> None:
    plan = Plan([7, 8, 9], torch.tensor([0, 0, 1, 2, 2]), torch.tensor([3, 5, 4, 1, 2]))
    indices, owner, anchors, rows = plan.share([2, 0])
    assert indices == [9, 7] and rows.tolist() == [0, 1, 3, 4]
    assert [(indices[o], a) for o, a in zip(owner.tolist(), anchors.tolist(), strict=True)] == [
        (7, 3), (7, 5), (9, 1), (9, 2)
    ]  # fmt: skip
    assert plan.share([])[3].tolist() == []
