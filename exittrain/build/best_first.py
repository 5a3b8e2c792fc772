"""Best-first trees: the N likeliest prefixes under the drafter (math.md section 6; DDTree, OPT-Tree)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exittrain.build.base import Draft, DraftSession, TreeShape
from exittrain.build.grow import grow


def build_best_first(
    session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None
) -> Draft:
    """A heap's tree on cumulative draft log-probability, grown in waves: exact, ties by parent order, then token id.

    shape.width children are looked at per node; a level expands as many nodes as stand among the best so far.
    """
    return grow(session, shape.budget, shape.depth, shape.width)
