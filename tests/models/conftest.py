from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tiny_models import VOCAB, random_tree, tiny_target
from torch import Tensor

from exittrain.models.target import TargetModel
from exittrain.tree.draft_tree import DraftTree


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_target(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def forest(generator: torch.Generator) -> Callable[..., tuple[list[Tensor], list[DraftTree], Tensor, Tensor]]:
    """A maker of sequences of the given lengths and trees at random anchors: (sequences, trees, rows, anchors)."""

    def make(lengths: Sequence[int], sizes: Sequence[int]) -> tuple[list[Tensor], list[DraftTree], Tensor, Tensor]:
        sequences = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
        trees, rows, anchors = [], [], []
        for index, size in enumerate(sizes):
            row = index % len(lengths)
            anchor = int(torch.randint(lengths[row], (1,), generator=generator))
            trees.append(random_tree(int(sequences[row][anchor]), size, generator))
            rows.append(row)
            anchors.append(anchor)
        return sequences, trees, torch.tensor(rows), torch.tensor(anchors)

    return make
