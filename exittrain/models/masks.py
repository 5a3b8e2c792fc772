"""The one form of attention mask this package uses."""

from __future__ import annotations

import torch
from torch import Tensor


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention mask [S, 1, L, K] of `visible` [S, L, K] bool: 0 where seen, finfo.min elsewhere.

    Never bool (eager attention would add True as 1) and never -inf (a row that sees nothing would be NaN).
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
