"""Parameters and Adam's moments by name, whole and in float32: one form for every ZeRO stage and number of ranks.

DeepSpeed keeps them flat and in parts; its own checkpoints hold those parts and fit one stage and one number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


def gather(parameters: Mapping[str, nn.Parameter], optimizer: Any, plain: bool, keep: bool) -> dict[str, Any]:
    """{"parameters", "exp_avg", "exp_avg_sq": {name: float32 on the CPU}, "updates": Adam's count}; without `keep` the
    tensors are left out.

    parameters: the trained ones by name, in the same order on every rank; all ranks call it. plain: they and the
    optimiser's states are ordinary tensors. Moments are left out before the first update.
    """
    base = _base(optimizer, plain)
    updates = max((int(state["step"]) for state in base.state.values() if "step" in state), default=0)
    _link(optimizer)
    wanted = ("parameters", *MOMENTS) if updates else ("parameters",)
    state: dict[str, Any] = {"updates": updates}
    for kind in wanted:
        whole = ((name, _whole(p, kind, base, plain)) for name, p in parameters.items())
        state[kind] = {name: value.to("cpu", torch.float32) for name, value in whole if keep}
    return state


def scatter(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: Any, plain: bool) -> None:
    """Put what `gather` gave into parameters and optimiser, each rank its part; all ranks call it.

    The optimiser must not have stepped yet.
    """
    base = _base(optimizer, plain)
    if state["updates"]:
        for held in [p for group in base.param_groups for p in group["params"]] if plain else _flats(optimizer):
            step = torch.tensor(float(state["updates"]), dtype=torch.float32, device=held.device)
            zeros = {name: torch.zeros_like(held, dtype=torch.float32, requires_grad=False) for name in MOMENTS}
            base.state[held] = {"step": step, **zeros}
        _link(optimizer)
    for kind in ("parameters", *(MOMENTS if state["updates"] else ())):
        for name, parameter in parameters.items():
            _put(parameter, state[kind][name], kind, base, plain)
    _put_low_precision(state["parameters"], parameters, plain)


@torch.no_grad()
def _whole(parameter: nn.Parameter, kind: str, base: Any, plain: bool) -> Tensor:
    if plain:
        held = parameter if kind == "parameters" else base.state[parameter].get(kind, torch.zeros_like(parameter))
        return held.detach()
    from deepspeed import utils

    moment = () if kind == "parameters" else (kind,)
    found = (utils.safe_get_full_optimizer_state if moment else utils.safe_get_full_fp32_param)(parameter, *moment)
    assert isinstance(found, Tensor)  # trained parameters have masters
    return found.detach()


@torch.no_grad()
def _put(parameter: nn.Parameter, value: Tensor, kind: str, base: Any, plain: bool) -> None:
    if plain:
        (parameter if kind == "parameters" else base.state[parameter][kind]).copy_(value)
        return
    from deepspeed import utils

    moment = () if kind == "parameters" else (kind,)
    if hasattr(parameter, "ds_tensor"):  # ZeRO 3, whose parts may reach past the end (its own setter forgets that)
        size = parameter.ds_tensor.numel()
        part = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
        part = part[size * dist.get_rank() :][:size]
        (utils.safe_set_local_optimizer_state if moment else utils.safe_set_local_fp32_param)(parameter, part, *moment)
    else:
        (utils.safe_set_full_optimizer_state if moment else utils.safe_set_full_fp32_param)(parameter, value, *moment)


@torch.no_grad()
def _put_low_precision(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], plain: bool) -> None:
    """The parameters that forwards read, beside the masters: rounded as a step rounds them."""
    if plain:
        return
    import deepspeed

    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(values[name])


def empty(parameter: nn.Parameter) -> None:
    """Let go of a partitioned parameter's data: DeepSpeed's caches keep the object."""
    parameter.data = parameter.data.new_empty(0)
    parameter.__dict__.clear()


def _base(optimizer: Any, plain: bool) -> Any:
    """The torch optimiser."""
    return optimizer if plain else optimizer.optimizer


def _link(optimizer: Any) -> None:
    """Let the parameters of ZeRO 1 and 2 know their moments. DeepSpeed does so after the first group's first step, when
    those of the other groups are not there yet."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    groups = getattr(optimizer, "bit16_groups", ())
    for group, flat in zip(groups, _flats(optimizer) if groups else (), strict=True):
        lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)


def _flats(optimizer: Any) -> Iterable[Tensor]:
    """This rank's flat parts of the masters, by which the torch optimiser knows its states."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        parts: Iterable[Tensor] = optimizer.fp32_partitioned_groups_flat  # ZeRO 3
        return parts
    parts = optimizer.single_partition_of_fp32_groups
    return parts
