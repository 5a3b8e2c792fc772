"""What EAGLE heads and block drafters share beside their layers: where they begin, and a name for their numbers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from exittrain.drafters.head_config import HeadConfig
from exittrain.models.target import TargetModel


def final_norm(target: TargetModel) -> Tensor | None:
    """[Ht] what the target's final norm multiplies by, in whatever form it keeps that; None where it does more (takes
    the mean away, adds a bias)."""
    norm: Any = getattr(target.module.base_model, "norm", None)
    if norm is None:
        return None
    ones = target.embeddings.weight.new_ones(target.hidden_size)
    weight: Tensor = norm(ones)
    return weight if bool(weight.any()) and torch.equal(norm(-ones), -weight) else None


class HeadIdentity:
    """`identity()` is the sha256 (hex) of a head as it is now: its config, the ids it can draft and its own tensors.

    The target's parts that it uses are no part of it (`Drafter.target_fingerprint`). Cached while nothing is trained.
    """

    def __init__(self, config: HeadConfig, module: nn.Module, draft_ids: Tensor | None) -> None:
        self._config, self._module, self._draft_ids = config, module, draft_ids
        self._known: tuple[list[tuple[int, int]], str] | None = None

    def __call__(self) -> str:
        tensors = sorted(self._module.state_dict(keep_vars=True).items())
        frozen = not any(tensor.requires_grad for _, tensor in tensors)
        versions = [(tensor.data_ptr(), tensor._version) for _, tensor in tensors]
        if frozen and self._known is not None and self._known[0] == versions:
            return self._known[1]
        ids = None if self._draft_ids is None else self._draft_ids.tolist()
        digest = hashlib.sha256(json.dumps([self._config.as_dict(), ids], sort_keys=True).encode())
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._known = (versions, digest.hexdigest())
        return self._known[1]
