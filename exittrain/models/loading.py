"""From what a user names (folder, GGUF file, known name, hub id) to a module and a tokenizer, or one clear line."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from exittrain.errors import InputError, nearest
from exittrain.models.fetch import KNOWN_MODELS, fetch
from exittrain.models.placement import DISK, Spread, device_map
from exittrain.models.sums import check_folder

# What readers of configs, weights and GGUF files raise on files that are absent, foreign, damaged or cut short.
_UNREADABLE = (
    OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, AssertionError, ImportError,
    struct.error, SafetensorError,
)  # fmt: skip


@dataclass(frozen=True)
class Match:
    """How the tensors of a source fit the model its config describes.

    matched: how many tensors of the model were read; extra: names the source has and the model has no place for.
    """

    matched: int
    extra: tuple[str, ...]

    def __str__(self) -> str:
        others = f"{len(self.extra)} extra and ignored, first {self.extra[0]}" if self.extra else "none extra"
        return f"{self.matched} tensors matched, none missing, {others}"


class Loaded(NamedTuple):
    """A module, its tokenizer (or None), a display name, and how its weights fitted."""

    module: Any
    tokenizer: Any
    name: str
    match: Match


class Vocabulary(NamedTuple):
    """What ids mean to a model: its display name, columns of its logits, its tokenizer (or None)."""

    name: str
    vocab_size: int
    tokenizer: Any


def load_pretrained(source: str | Path, dtype: torch.dtype, attention: str, spread: Spread | None = None) -> Loaded:
    """The model of a source; raises InputError where it cannot be used or where a weight would be a random number.

    spread: the devices its layers shall lie on, in place of host memory."""
    place, shown, name, extra = _locate(source)
    more = dict(extra)
    if spread is not None:
        if "gguf_file" in extra:
            raise InputError(f"{shown} is a GGUF file, which is read whole: a device map needs a Hugging Face folder")
        more["device_map"] = _places(_config(place, shown), shown, dtype, spread)
    if DISK in more.get("device_map", {}).values():
        module, match = _load_to_disk(place, shown, dtype, attention, **more)
    else:
        module, match = _load(place, shown, dtype, attention, **more)
    return Loaded(module, load_tokenizer(place, **extra), name, match)


def load_vocabulary(source: str | Path) -> Vocabulary:
    """Name, vocabulary size and tokenizer of a model source, without its weights; raises InputError as loading does."""
    place, shown, name, extra = _locate(source)
    config = _config(place, shown, **extra).get_text_config()
    return Vocabulary(name, int(config.vocab_size), load_tokenizer(place, **extra))


def _config(place: str, shown: str, **extra: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(place, **extra)
    except _UNREADABLE as error:
        raise InputError(f"the config of {shown} cannot be loaded: {_first_line(error)}") from error


def _locate(source: str | Path) -> tuple[str, str, str, dict[str, Any]]:
    """(where transformers finds it, what messages call it, display name, further arguments) of a model source, its
    folder's sums compared where it has a list of them."""
    check_source(source)
    path = Path(source).expanduser()
    if not path.exists():
        if str(source) in KNOWN_MODELS:
            return str(fetch(str(source))), str(source), str(source), {}
        return str(source), str(source), str(source), {}
    if path.is_file():
        return str(path.parent), str(path), path.stem, {"gguf_file": path.name}
    if (path / "config.json").exists():
        check_folder(path)
        return str(path), str(path), path.resolve().name, {}
    return _locate(next(path.glob("*.gguf")))


def check_source(source: str | Path) -> None:
    """Raise InputError where a path holds no whole model; hub ids and known names pass. Loads nothing."""
    path = Path(source).expanduser()
    if not path.exists():
        is_path = path.is_absolute() or str(source).startswith(("./", "../", "~")) or path.suffix == ".gguf"
        if is_path and str(source) not in KNOWN_MODELS:
            raise InputError(f"{source} does not exist; name a folder, a GGUF file, a hub id or a known model")
    elif path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{path} is a file but not a .gguf; name the model's folder instead")
    elif (path / "config.json").exists():
        check_weights(path)
    elif len(files := sorted(path.glob("*.gguf"))) != 1:
        found = f"{len(files)} GGUF files, name one of them" if files else "neither a config.json nor a GGUF file"
        raise InputError(f"{path} holds {found}")


def check_weights(folder: Path) -> None:
    """Raise InputError naming the weight file of a Hugging Face folder that is missing or cut short."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(weight_map(index).values()))
    elif (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
    elif list(folder.glob("pytorch_model*.bin")):
        return
    else:
        raise InputError(f"{folder / 'model.safetensors'} is missing; the folder holds no weights")
    for name in names:
        file = folder / name
        if not file.exists():
            raise InputError(f"{file} is missing; copy the model's folder again")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is damaged or cut short; copy it again") from error


def weight_map(index: Path) -> dict[str, str]:
    """File by tensor name, as `model.safetensors.index.json` says. Raises InputError where it cannot be read, or names
    a file that is not beside it: whoever writes such a folder again would write elsewhere."""
    try:
        placed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{index} cannot be read; copy it again") from error
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index} puts {name} into {file!r}, which is no file beside it; copy it again")
    return placed


def load_tokenizer(source: str, **extra: Any) -> Any:
    """The tokenizer beside a model, or None where there is none."""
    folder = Path(source)
    if folder.is_dir() and "gguf_file" not in extra and not any(folder.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, **extra)
    except _UNREADABLE as error:
        raise InputError(f"the tokenizer of {source} cannot be loaded: {_first_line(error)}") from error


def _places(config: Any, shown: str, dtype: torch.dtype, spread: Spread) -> dict[str, Any]:
    try:
        return device_map(config, dtype, spread)
    except InputError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"{shown} cannot be spread over devices: {_first_line(error)}") from error


def _load_to_disk(source: str, shown: str, dtype: torch.dtype, attention: str, **extra: Any) -> tuple[Any, Match]:
    """Layers on disk are read from the model's own files where those hold what the module does; else (the experts of
    most mixtures, files that are no safetensors) from a copy in $TMPDIR that goes with the module."""
    folder = tempfile.mkdtemp(prefix="exittrain-layers-")
    try:
        module, match = _load(source, shown, dtype, attention, offload_folder=folder, **extra)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True)
    return module, match


def _load(source: str, shown: str, dtype: torch.dtype, attention: str, **extra: Any) -> tuple[Any, Match]:
    with quiet_transformers():
        try:
            # Wrong shapes are let through here, to be refused below by name instead of by a table.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, attn_implementation=attention, output_loading_info=True,
                ignore_mismatched_sizes=True, **extra,
            )  # fmt: skip
        except _UNREADABLE as error:
            if isinstance(error, OSError) and not Path(source).exists():
                guess = nearest(shown, sorted(KNOWN_MODELS))
                raise InputError(
                    f"{shown} is no local folder and cannot be had from the hub{guess}; "
                    "check the name and the network, or give a local folder"
                ) from error
            remedy = "; if the file is damaged or cut short, get it again" if "gguf_file" in extra else ""
            raise InputError(f"{shown} cannot be loaded as a causal LM: {_first_line(error)}{remedy}") from error
        module, info = loaded
        match = check_match(shown, module, info)
        if "gguf_file" in extra:
            forget_quantisation(module)
        return module, match


def check_match(shown: str, module: Any, info: dict[str, Any]) -> Match:
    """How weights fitted, from the loading info of transformers. shown: what messages call the source.

    Raises InputError where a tensor is missing or of another shape: transformers fills such places at random.
    """
    extra = tuple(sorted(info["unexpected_keys"]))
    beside = f"; it has {len(extra)} that the model has no place for, first {extra[0]}" if extra else ""
    if wrong := sorted(info["mismatched_keys"], key=str):
        name, theirs, ours = wrong[0]
        raise InputError(
            f"{shown} has {len(wrong)} weights of another shape than its config says, first {name} "
            f"({tuple(theirs)}, not {tuple(ours)}); they would be random numbers{beside}"
        )
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{shown} lacks {len(missing)} weights, first {missing[0]}; they would be random numbers{beside}"
        )
    return Match(sum(1 for _ in module.named_parameters()), extra)


def forget_quantisation(module: Any) -> None:
    """A dequantised GGUF model is a plain one: what it came from must not be saved with it or change its identity."""
    module.config.__dict__.pop("quantization_config", None)
    module.hf_quantizer = None
    for name in ("is_quantized", "quantization_method"):
        module.__dict__.pop(name, None)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No loading bars or notes of transformers: what goes wrong is raised, what goes well needs no print."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
