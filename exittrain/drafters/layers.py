"""A drafter made of some of the target's own layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.vocabulary import shared_size
from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.models.placement import layers_name, whole


def copy_layers(
    target: CausalModel,
    layers: int | Sequence[int],
    dtype: torch.dtype | None = None,
    share_embeddings: bool = True,
) -> CausalDrafter:
    """The first k layers of the target, or a list of them in order, between its embeddings, final norm and head.

    share_embeddings: embeddings and head stay frozen and, where dtype and device agree, use the target's own storage,
    so that training touches the layers and the final norm only; False copies and trains them. The target's tensors are
    never written to either way. Raises InputError where a layer does not exist.
    """
    total = int(target.config.num_hidden_layers)
    chosen = list(range(layers)) if isinstance(layers, int) else [int(layer) for layer in layers]
    if not chosen or any(not 0 <= layer < total for layer in chosen) or (isinstance(layers, int) and layers < 1):
        raise InputError(f"layers {layers} asked of {target.name}, which has layers 0 to {total - 1}")
    module, size = _smaller_module(target, chosen, dtype or target.dtype), shared_size(target, target)
    drafter = CausalDrafter(
        CausalModel(module, target.tokenizer, f"{target.name}-layers-{len(chosen)}", verify=False),
        "layers",
        target.fingerprint(),
        draft_ids=None if size is None else torch.arange(size, device=target.device),
    )
    if share_embeddings:
        share_with_target(drafter.model, target)
    return drafter


def share_with_target(model: CausalModel, target: CausalModel) -> None:
    """Freeze the embeddings and head of `model` and let them use the target's storage where the numbers are its own."""
    for ours, theirs in ((model.embeddings, target.embeddings), (model.output, target.output)):
        for name, parameter in list(ours.named_parameters()):
            parameter.requires_grad_(False)
            source = theirs.get_parameter(name).detach()
            same = source.dtype == parameter.dtype and source.device == parameter.device
            if same and source.shape == parameter.shape and torch.equal(source, parameter):
                # New data under our own Parameter: a later cast of the drafter leaves the target as it is.
                parameter.data = source


def _smaller_module(target: CausalModel, chosen: list[int], dtype: torch.dtype) -> Any:
    config = copy.deepcopy(target.module.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(chosen)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in chosen]
    prefix, source = _layer_prefix(target), target.module.state_dict()
    tensor_of = partial(whole, target.module)
    state = {key: tensor_of(key, tensor) for key, tensor in source.items() if not key.startswith(prefix)}
    for new, old in enumerate(chosen):
        start = f"{prefix}{old}."
        own = {key: tensor_of(key, tensor) for key, tensor in source.items() if key.startswith(start)}
        state |= {f"{prefix}{new}.{key[len(start) :]}": tensor for key, tensor in own.items()}
    with torch.random.fork_rng():
        module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=target.module.config._attn_implementation
        )
    module.load_state_dict(state)
    module.generation_config = copy.deepcopy(target.module.generation_config)
    return module.to(target.device)


def _layer_prefix(target: CausalModel) -> str:
    """The name of the list of decoder layers in the state dict, such as `model.layers.`."""
    if name := layers_name(target.module):
        return f"{name}."
    raise InputError(f"{target.name} keeps its layers in a way that is not supported; use a causal_lm drafter")
