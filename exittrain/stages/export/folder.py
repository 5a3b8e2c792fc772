"""A Hugging Face folder as files: what is read from the source, and what is written for servers.

Nothing here goes through a model: tensors are read and written by safetensors, configs as JSON.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from exittrain.drafters.formats.write import rope_fields
from exittrain.errors import InputError
from exittrain.models.loading import check_weights, weight_map

INDEX = "model.safetensors.index.json"
# What goes along byte for byte: generation settings, the tokenizer in its usual forms, our own notes, licences.
CARRIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "chat_template*", "exittrain.json", "calibration.json", "LICENSE*",
    "NOTICE*",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder: tensor names by file name, and the one floating dtype all of them have."""

    folder: Path
    files: dict[str, tuple[str, ...]]
    dtype: torch.dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one at a time."""
        for file, names in self.files.items():
            with safe_open(self.folder / file, framework="pt") as reader:
                for name in names:
                    yield name, reader.get_tensor(name)

    def file_of(self) -> dict[str, str]:
        """File name by tensor name."""
        return {name: file for file, names in self.files.items() for name in names}


def read_weights(folder: Path) -> Weights:
    """The weights of a folder, headers only.

    Raises:
        InputError: a file is missing, cut short or no safetensors; a tensor stands in two files; dtypes are mixed.
    """
    check_weights(folder)
    index = folder / INDEX
    names = sorted(set(weight_map(index).values())) if index.exists() else ["model.safetensors"]
    files, dtypes = {}, set()
    for name in names:
        if not (folder / name).exists():
            raise InputError(f"{folder} holds no safetensors: load and save it with transformers first")
        with safe_open(folder / name, framework="pt") as reader:
            files[name] = tuple(sorted(reader.keys()))
            dtypes |= {reader.get_slice(key).get_dtype() for key in files[name]}
    count = Counter(key for keys in files.values() for key in keys)
    if twice := [key for key, times in count.items() if times > 1]:
        raise InputError(f"{folder} holds {twice[0]} in two files: save it again")
    floating = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if len(dtypes) != 1 or not dtypes <= floating.keys():
        raise InputError(
            f"{folder} holds tensors of {', '.join(sorted(dtypes)) or 'nothing'}: an export is of one of F32, BF16, F16"
        )
    return Weights(folder, files, floating[dtypes.pop()])


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError where there is none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return {**data}
    except (OSError, ValueError, TypeError):
        raise InputError(f"{file} is missing or cannot be read: copy it again") from None


def carried_files(folder: Path) -> list[str]:
    """Names of the files that go along as they are."""
    return sorted(
        file.name
        for file in folder.iterdir()
        if file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in CARRIED)
    )


def serving_config(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The source's config with the dtype as stored, and rotary settings under their new and their old names.

    Servers that stand on an older transformers read only `torch_dtype`, `rope_theta` and `rope_scaling`.
    """
    name = str(dtype).removeprefix("torch.")
    out = {**config, "dtype": name, "torch_dtype": name}
    rope = config.get("rope_parameters")
    return out | (rope_fields(rope) if isinstance(rope, dict) and "rope_theta" in rope else {})


def write_folder(source: Weights, folder: Path, dtype: torch.dtype, tokenizer: Any) -> None:
    """Write config, weights and what goes along into an empty `folder`. tokenizer: saved where the source has none."""
    total = 0
    for file, keys in source.files.items():
        with safe_open(source.folder / file, framework="pt") as reader:
            tensors = {key: reader.get_tensor(key).to(dtype) for key in keys}
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if (source.folder / INDEX).exists():
        write_object(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": source.file_of()})
    write_object(folder / "config.json", serving_config(read_object(source.folder / "config.json"), dtype))
    names = carried_files(source.folder)
    for name in names:
        shutil.copyfile(source.folder / name, folder / name)
    if not any(name.startswith("tokenizer") for name in names):
        tokenizer.save_pretrained(folder)


def write_object(file: Path, data: dict[str, Any]) -> None:
    """Sorted JSON; the folder around it is what is atomic."""
    file.write_text(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Same dtype, shape and bits: NaN equals NaN, 0 is not -0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
