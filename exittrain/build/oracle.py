"""The best tree there is: the target drafts for itself (math.md section 6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exittrain.build.base import Draft, DraftSession, TreeShape
from exittrain.build.grow import grow


def build_oracle(session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None) -> Draft:
    """The N prefixes of largest reach, from a session of the target: their coverage is C*(N).

    No other limit applies: shape.depth and shape.width are the drafter's. Waves end when no node below could be kept.
    """
    return grow(session, shape.budget, depth=shape.budget, width=shape.budget)
