"""A model over several devices: its decoder layers on GPUs in order, then in host memory, then on disk.

Embeddings, final norm and head stay whole on the first device, so states come from there and go there whatever lies
between; layers in host memory or on disk are brought to the first device for their turn (accelerate's hooks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.accelerate import load_offloaded_parameter

from exittrain.errors import InputError

ROOM = 0.85  # of a device's free memory, for layers; the rest is their part of a cache
FIRST_ROOM = 0.6  # of the first's, which also holds what is trained, logits and features
HOST = "cpu"
DISK = "disk"


@dataclass(frozen=True)
class Spread:
    """devices: the process's own first, then others it may use; max_memory: bytes of layers and ends that a device (a
    GPU's index, or "cpu") may hold, as a number or with a unit ("40GiB"); what is left out is a part of what is free.
    processes: how many take their part of the host's free memory.
    """

    devices: tuple[torch.device, ...]
    max_memory: Mapping[int | str, int | str] = field(default_factory=dict)
    processes: int = 1

    def rooms(self) -> list[tuple[int | str, int]]:
        """(where, bytes), in the order they are filled."""
        names = [HOST if device.type == "cpu" else device.index or 0 for device in self.devices]
        names += [] if HOST in names else [HOST]
        unknown = [name for name in self.max_memory if name not in names]
        if unknown:
            raise InputError(f"max_memory names device {unknown[0]}, this process may use {', '.join(map(str, names))}")
        return [(name, self._room(name, place == 0)) for place, name in enumerate(names)]

    def _room(self, name: int | str, is_first: bool) -> int:
        given = self.max_memory.get(name)
        if given is not None:
            try:
                return int(convert_file_size_to_int(given))
            except (ValueError, OverflowError):
                raise InputError(f"max_memory of {name} is {given!r}: a number of bytes, or such as 40GiB") from None
        if isinstance(name, int):
            return int(torch.cuda.mem_get_info(name)[0] * (FIRST_ROOM if is_first else ROOM))
        free = psutil.virtual_memory().available / self.processes  # what the cache of files would give up included
        return int(free * (FIRST_ROOM if is_first else ROOM))


def process_spread(device: torch.device, local_ranks: int, max_memory: Mapping[int | str, int | str]) -> Spread:
    """What one of a node's `local_ranks` processes may use, whose own device this is. What max_memory says of GPUs that
    are other processes' is theirs."""
    if device.type != "cuda":
        return Spread((device,), max_memory, local_ranks)
    own, count = device.index or 0, torch.cuda.device_count()
    gpus = (own, *(gpu for gpu in process_gpus(count, own, local_ranks) if gpu != own))
    mine = {name: room for name, room in max_memory.items() if name in gpus or name not in range(count)}
    return Spread(tuple(torch.device("cuda", gpu) for gpu in gpus), mine, local_ranks)


def process_gpus(count: int, local_rank: int, local_ranks: int) -> tuple[int, ...]:
    """Of a node's visible GPUs those that one of its processes may spread over: its own, then every `local_ranks`-th.

    Fewer than processes are no node's: a launcher shows each process its own alone, and it has them all.
    """
    if count < local_ranks:
        return tuple(range(count))
    return tuple(range(local_rank, count, local_ranks))


def device_map(config: Any, dtype: torch.dtype, spread: Spread) -> dict[str, Any]:
    """Module name -> device, for `from_pretrained`; every module is in it once.

    Raises:
        InputError: the first device has no room for what is not a decoder layer, or no layers are recognised.
    """
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    prefix = layers_name(module)
    if not prefix:
        raise InputError(
            f"{type(module).__name__} keeps its layers in a way that cannot be spread: no device map for it"
        )
    layers = module.get_submodule(prefix)
    rooms = spread.rooms()
    first, left = rooms[0]
    left -= _bytes(module) - _bytes(layers)
    if left < 0:
        raise InputError(
            f"embeddings, norm and head take {(_bytes(module) - _bytes(layers)) / 2**30:.2f} GiB, device {first} has "
            f"{rooms[0][1] / 2**30:.2f}: they are not split, so raise max_memory or use a device with more room"
        )
    places = dict.fromkeys(_outside(module, prefix), first)
    others = iter(rooms[1:])
    for index, layer in enumerate(layers):
        size = _bytes(layer)
        while left < size:
            first, left = next(others, (DISK, 1 << 62))
        left -= size
        places[f"{prefix}.{index}"] = first
    return places


def layers_name(module: Any) -> str:
    """Where a causal LM keeps its list of decoder layers, such as `model.layers`; "" where none is recognised."""
    total = int(module.config.get_text_config().num_hidden_layers)
    text = {id(part) for part in module.get_decoder().modules()}  # a vision tower may have as many layers
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == total and id(part) in text:
            return str(name)
    return ""


def whole(module: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter as it is, read from where it waits if it lies in host memory or on disk."""
    return load_offloaded_parameter(module, name) if tensor.device.type == "meta" else tensor


def _outside(module: Any, inside: str) -> Sequence[str]:
    """The largest modules that together hold all but the module named `inside`."""
    names: list[str] = []
    for name, child in module.named_children():
        if name == inside:
            continue
        deeper = inside.startswith(f"{name}.")
        names += [f"{name}.{part}" for part in _outside(child, inside[len(name) + 1 :])] if deeper else [name]
    return names


def _bytes(module: Any) -> int:
    """Of parameters and buffers, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
