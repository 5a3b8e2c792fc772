"""LoRA: a drafter of which only low-rank additions to linear layers are trained, saved as if it had been trained whole.

Hu et al., 2021 (arXiv 2106.09685): W x + (alpha / rank) B A x, with B zero at the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exittrain.drafters.causal import CausalDrafter
from exittrain.errors import InputError
from exittrain.models.causal import CausalModel

ALL_LINEAR = "all-linear"


def add_adapter(drafter: CausalDrafter, rank: int, alpha: float, targets: Sequence[str] | str, seed: int) -> None:
    """Freeze the drafter and put a trainable adapter on every linear layer whose name ends in one of `targets`.

    targets: names such as q_proj, or `all-linear`: all but the head. The drafter computes what it did before; the start
    of A is its seed's and the global random state stays. `Drafter.save` writes merged weights, so that a saved drafter
    has no adapter.

    Raises:
        InputError: no such layer, an embedding, or a head tied to one (the other use would change unseen), or adapters
            are there already.
    """
    from peft import LoraConfig, inject_adapter_in_model

    module = drafter.module
    if drafter.frozen is not None:
        raise InputError(f"{drafter.name} has an adapter already")
    names = targets if isinstance(targets, str) else list(targets)
    if names != ALL_LINEAR:
        _check_targets(drafter.model, names)
    frozen = drafter.frozen_names()
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    drafter.frozen = frozen


def merged_state(module: Any) -> dict[str, Tensor]:
    """The state dict of `module` with its adapters added to the weights, under the names it had without them.

    Added in float32 and cast once: of a float32 weight the sum differs from the two forwards by rounding only (a part
    in 1e-5 of the logits), of a bfloat16 one by at most half a unit in each weight's last place (2^-8 of it).
    """
    state = {name.replace(".base_layer.", "."): t for name, t in module.state_dict().items() if ".lora_" not in name}
    for place, layer in module.named_modules():
        for adapter in getattr(layer, "lora_A", {}):
            down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
            weight = state[f"{place}.weight"]
            merged = weight.float() + layer.scaling[adapter] * (up @ down)
            state[f"{place}.weight"] = merged.detach().to(weight.dtype)
    return state


def _check_targets(model: CausalModel, names: Sequence[str]) -> None:
    modules = dict(model.module.named_modules())
    for wanted in names:
        found = [layer for name, layer in modules.items() if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            linear = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, torch.nn.Linear)})
            raise InputError(f"LoRA: {model.name} has no layer {wanted!r} (its linear layers: {', '.join(linear)})")
        if model.embeddings in found:
            raise InputError(f"LoRA on the embedding {wanted!r} is not supported: name linear layers")
        if model.output in found and model.output.weight is model.embeddings.weight:
            raise InputError(f"LoRA on the head {wanted!r}, which is tied to the embedding: leave it out")
        if not all(isinstance(layer, torch.nn.Linear) for layer in found):
            raise InputError(f"LoRA: {wanted!r} is no linear layer of {model.name}")
