"""A head's folder as it lies on disk, whoever wrote it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exittrain.drafters.formats.configs import form_of, parse_config
from exittrain.drafters.formats.tensors import split_tensors
from exittrain.drafters.head_config import HeadConfig
from exittrain.errors import InputError
from exittrain.models.loading import check_weights, weight_map
from exittrain.models.sums import check_folder

INDEX, WEIGHTS, OLD_WEIGHTS = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True, eq=False)
class HeadCheckpoint:
    """A head as read, on the CPU.

    tensors: by speculators' names, as stored; draft_ids [D] int64 ascending, None where the head drafts every token;
    embed_tokens [V, H]: the head's own copy of the embeddings, None where it relies on the target's; form:
    "speculators", "sglang" or "dflash"; extra: names of stored tensors that mean nothing to the head.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    draft_ids: Tensor | None
    embed_tokens: Tensor | None
    form: str
    extra: tuple[str, ...]


def is_head_folder(folder: str | Path) -> bool:
    """Whether config.json there describes a head or block drafter, readable or not; reads no weights."""
    try:
        data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return form_of(data) is not None
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def read_head(folder: str | Path, num_target_layers: int | None = None) -> HeadCheckpoint:
    """The head in `folder`. num_target_layers: for a config that leaves the feature layers to the target's depth.

    Raises InputError, one line, where config or weights are missing, damaged, of another kind or contradict each other.
    """
    path = Path(folder)
    check_folder(path)
    data = _config_data(path)
    config = parse_config(data, str(path), num_target_layers)
    form = str(form_of(data))
    found: dict[str, Tensor] = {}
    for name, tensor in _tensors(path):
        ours = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        if ours in found:
            raise InputError(f"{path} holds {ours} twice")
        found[ours] = tensor
    tensors, draft_ids, embeddings, extra = split_tensors(found, config, str(path))
    return HeadCheckpoint(config, tensors, draft_ids, embeddings, form, extra)


def _config_data(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        return {**json.loads(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} is missing or cannot be read: copy the drafter's folder again") from error


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weight files; of several kinds, safetensors are read and the old .bin is not."""
    check_weights(folder)
    if (folder / INDEX).exists():
        placed = weight_map(folder / INDEX)
        for file in sorted(set(placed.values())):
            yield from _from_safetensors(folder / file, sorted(name for name in placed if placed[name] == file))
    elif (folder / WEIGHTS).exists():
        yield from _from_safetensors(folder / WEIGHTS, None)
    else:
        yield from _from_pickle(folder / OLD_WEIGHTS).items()


def _from_safetensors(file: Path, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    with _readable(file), safe_open(file, framework="pt") as reader:
        for name in sorted(reader.keys()) if names is None else names:
            yield name, reader.get_tensor(name)


def _from_pickle(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        raise InputError(f"{file} is missing: only one {OLD_WEIGHTS} or safetensors can be read")
    with _readable(file):
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise InputError(f"{file} holds something else than tensors by name")
    return {str(name): tensor for name, tensor in state.items()}


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError, LookupError, EOFError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} is damaged or cut short; copy it again") from error
