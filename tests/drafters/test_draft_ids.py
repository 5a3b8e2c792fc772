"""Which ids a pruned head drafts."""

from __future__ import annotations

import pytest
import torch

from exittrain.drafters.vocabulary import check_draft_ids, choose_draft_ids, covered_share
from exittrain.errors import InputError

COUNTS = torch.tensor([5, 0, 7, 5, 0, 5, 1, 0])


def test_the_most_frequent_ids_ascending_ties_by_id():
    assert choose_draft_ids(COUNTS, 1).tolist() == [2]
    assert choose_draft_ids(COUNTS, 3).tolist() == [0, 2, 3]
    assert choose_draft_ids(COUNTS, 6).tolist() == [0, 1, 2, 3, 5, 6]
    assert choose_draft_ids(COUNTS, 8).tolist() == list(range(8))
    assert choose_draft_ids(COUNTS, 3).dtype == torch.int64


def test_ids_that_end_a_response_are_always_in():
    assert choose_draft_ids(COUNTS, 3, always=[7, 4, 7]).tolist() == [2, 4, 7]
    assert choose_draft_ids(COUNTS, 2, always=[7, 4]).tolist() == [4, 7]
    with pytest.raises(InputError, match="a draft vocabulary of 1 tokens: it needs 2 to 8"):
        choose_draft_ids(COUNTS, 1, always=[7, 4])
    with pytest.raises(InputError, match="must lie in 0 to 7, got 8"):
        choose_draft_ids(COUNTS, 3, always=[8])


@pytest.mark.parametrize("size", [0, -2, 9])
def test_sizes_that_cannot_be(size):
    with pytest.raises(InputError, match="it needs 1 to 8"):
        choose_draft_ids(COUNTS, size)


def test_the_share_of_counted_tokens_that_is_covered():
    assert covered_share(COUNTS, torch.tensor([0, 2, 3])) == pytest.approx(17 / 23)
    assert covered_share(COUNTS, torch.arange(8)) == 1
    with pytest.raises(InputError, match="no token was counted"):
        covered_share(torch.zeros(8, dtype=torch.int64), torch.tensor([1]))


@pytest.mark.parametrize("ids", [[3, 2, 5], [2, 2, 5], [2, 3], [2, 3, 8], [-1, 3, 5]])
def test_draft_ids_that_do_not_fit(ids):
    with pytest.raises(InputError, match="must be 3 different ids from 0 to 7"):
        check_draft_ids(torch.tensor(ids), 3, 8, "head")


def test_draft_ids_that_fit():
    check_draft_ids(torch.tensor([0, 3, 7]), 3, 8, "head")
    check_draft_ids(None, 8, 8, "head")
    with pytest.raises(InputError, match="can draft 3 of 8 tokens but does not say which"):
        check_draft_ids(None, 3, 8, "head")
