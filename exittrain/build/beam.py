"""EAGLE-2's dynamic tree (arXiv 2406.16858 section 4; math.md section 6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exittrain.build.base import Draft, DraftSession, TreeShape
from exittrain.build.grow import grow


def build_beam(session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None) -> Draft:
    """Each level expands its `width` best nodes, each with its `width` best children; the best N of all are kept.

    EAGLE-2 also expands nodes that already stand outside the best N; nothing below them can be kept, so it is not done.
    shape.depth is the deepest level (EAGLE's own `depth` counts the rounds after the first, one less).
    """
    return grow(session, shape.budget, shape.depth, shape.width, beam=shape.width)
