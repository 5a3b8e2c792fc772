"""From a head's folder to a drafter bound to its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exittrain.drafters.base import Drafter
from exittrain.drafters.block.drafter import BlockDrafter
from exittrain.drafters.block.network import BlockNetwork
from exittrain.drafters.calibration import Calibration
from exittrain.drafters.eagle.drafter import EagleDrafter
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.formats import HeadCheckpoint, read_head
from exittrain.drafters.formats.tensors import EMBEDDINGS
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.vocabulary import check_vocabulary
from exittrain.errors import InputError
from exittrain.models.features import LayerTap
from exittrain.models.loading import Match, Vocabulary, load_tokenizer
from exittrain.models.target import TargetModel

# Rotary angles of these depend on the position alone, so that a longer context changes nothing within the old one.
_LENGTH_FREE = ("default", "linear", "llama3")


def assemble_head(folder: Path, target: TargetModel, dtype: torch.dtype, frozen: tuple[str, ...] = ()) -> Drafter:
    """The EAGLE head or block drafter in `folder`, on the target's device, its parameters in `dtype` and trainable but
    for those named `frozen` and for embeddings of its own.

    A head made for shorter contexts is served in the target's where its rotary positions allow it, as servers do it.
    Raises InputError where it cannot be read (`formats.read_head`) or is not made for this target: another vocabulary,
    tokenizer, hidden size or depth.
    """
    checkpoint = read_head(folder, int(target.config.num_hidden_layers))
    config, name = checkpoint.config, folder.resolve().name
    _check_target(config, folder, target)
    if config.rope_parameters.get("rope_type", "default") in _LENGTH_FREE:
        config = replace(config, max_positions=max(config.max_positions, target.max_positions))
    match, calibration = Match(len(checkpoint.tensors), checkpoint.extra), Calibration.load(folder)
    if config.kind == "block":
        block = _filled(BlockNetwork(config), checkpoint.tensors, target, dtype, frozen)
        return BlockDrafter(block, target, checkpoint.draft_ids, name, calibration, match)
    own = _own_embeddings(checkpoint, target, dtype)
    if own is None and config.hidden_size != target.hidden_size:
        raise InputError(f"{folder} is {config.hidden_size} wide, unlike its target, and has no embed_tokens.weight")
    made = EagleNetwork(config, target.embeddings if own is None else own, own is not None)
    tensors = dict(checkpoint.tensors) | ({} if own is None else {EMBEDDINGS: own.weight})
    eagle = _filled(made, tensors, target, dtype, frozen)
    return EagleDrafter(eagle, target, checkpoint.draft_ids, name, calibration, match)


def _check_target(config: HeadConfig, folder: Path, target: TargetModel) -> None:
    tokenizer = load_tokenizer(str(folder))
    check_vocabulary(Vocabulary(folder.resolve().name, config.vocab_size, tokenizer), target)
    if config.target_hidden_size != target.hidden_size:
        raise InputError(
            f"{folder} reads features of size {config.target_hidden_size}, those of {target.name} are "
            f"{target.hidden_size}: name the target it was made for"
        )
    LayerTap(target, config.feature_layers)  # raises for a layer that the target does not have


def _own_embeddings(checkpoint: HeadCheckpoint, target: TargetModel, dtype: torch.dtype) -> nn.Embedding | None:
    """The checkpoint's embeddings, unless they are the target's, in whichever of both dtypes says less."""
    stored = checkpoint.embed_tokens
    if stored is None:
        return None
    theirs = target.embeddings.weight.detach()
    if theirs.shape == stored.shape:
        ours = theirs.cpu()
        if torch.equal(ours.to(stored.dtype), stored) or torch.equal(stored.to(ours.dtype), ours):
            return None
    size, width = stored.shape
    return nn.Embedding(size, width, _weight=stored.to(dtype), _freeze=True)


@torch.no_grad()
def _filled(
    network: Any, tensors: Mapping[str, Tensor], target: TargetModel, dtype: torch.dtype, frozen: tuple[str, ...]
) -> Any:
    network.to(target.device)
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(dtype)  # parameters alone: rotary frequencies stay in float32
        parameter.requires_grad_(name not in frozen and name != EMBEDDINGS)
    network.load_state_dict(tensors)
    return network
