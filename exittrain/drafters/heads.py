"""What EAGLE heads and block drafters share beside their layers: where they begin, their target, how they are saved."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exittrain.drafters.base import Drafter
from exittrain.drafters.calibration import Calibration
from exittrain.drafters.formats import write_head
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.vocabulary import check_draft_ids
from exittrain.errors import InputError
from exittrain.models.folders import atomic_folder
from exittrain.models.loading import Match, quiet_transformers
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


class HeadDrafter(Drafter):
    """A network of a HeadConfig beside the target whose features and embeddings it reads, on the target's device.

    draft_ids: [D] ascending; None: it drafts every token. name: for messages and tables. Raises InputError where the
    network was made for another vocabulary or hidden size, or draft_ids are not those of its config.
    """

    network: Any

    def __init__(
        self,
        network: nn.Module,
        target: TargetModel,
        draft_ids: Tensor | None = None,
        name: str | None = None,
        calibration: Calibration | None = None,
        match: Match | None = None,
    ) -> None:
        config = network.config
        assert isinstance(config, HeadConfig)
        self.kind, self.name, self.tokenizer = config.kind, name or f"{target.name}-{config.kind}", target.tokenizer
        for what, ours, theirs in (
            ("vocabulary", config.vocab_size, target.vocab_size),
            ("hidden states", config.target_hidden_size, target.hidden_size),
        ):
            if ours != theirs:
                raise InputError(f"{self.name} is made for {what} of size {ours}; {target.name} has {theirs}")
        check_draft_ids(draft_ids, config.draft_vocab_size, config.vocab_size, self.name)
        self.network = self.module = network.to(target.device)
        self.target, self.vocab_size = target, target.vocab_size
        pruned = config.draft_vocab_size < config.vocab_size
        self.draft_ids = draft_ids.to(target.device) if draft_ids is not None and pruned else None
        self.feature_layers = config.feature_layers
        self.max_depth = None if config.block_size is None else config.block_size - 1
        self.max_positions = min(config.max_positions, target.max_positions)
        self.target_fingerprint, self.calibration, self.match = target.fingerprint(), calibration, match
        self._identity = HeadIdentity(config, network, self.draft_ids)

    def fingerprint(self) -> str:
        """As `Drafter.fingerprint`; the target's embeddings are no part of it."""
        return self._identity()

    def save(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors as vLLM's speculators has them, the target's tokenizer and
        exittrain.json, whole or not at all. Loading it back gives bit-equal logits."""
        with atomic_folder(Path(folder)) as temporary, quiet_transformers():
            write_head(temporary, self.network.config, self.network.state_dict(), self.draft_ids, self.target.name)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            self.write_note(temporary)
        return Path(folder)
