"""Is a written folder what it should be? Read back by transformers and safetensors alone, against what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from exittrain.drafters.vocabulary import check_vocabulary, real_size
from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.models.loading import Vocabulary, check_match, load_tokenizer, quiet_transformers
from exittrain.stages.export.folder import Weights, carried_files, read_object, read_weights, same_bits

TOLERANCE = 1e-5  # of float32 logits, relative where they are larger than 1
# What a config may say differently: where it lay, who wrote it, and the dtype, which is checked on the tensors.
_NOT_COMPARED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_UNREADABLE = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, SafetensorError)


@dataclass(frozen=True)
class Checked:
    """What was found equal. logit_error: the largest difference of float32 logits on num_tokens positions;
    padding_ids: columns of the logits beyond the tokenizer, none of which was ever the likeliest; padding_mass: the
    largest probability they had together."""

    num_tensors: int
    num_tokens: int
    logit_error: float
    padding_ids: int
    padding_mass: float

    def __str__(self) -> str:
        padding = f"; {self.padding_ids} ids beyond the tokenizer, never the likeliest" if self.padding_ids else ""
        return (
            f"read back by transformers, float32 logits within {self.logit_error:.1g} on {self.num_tokens} "
            f"tokens{padding}"
        )


def check_folder(
    folder: Path, source: Weights, reference: CausalModel, target: Vocabulary, windows: Sequence[Tensor],
    dtype: torch.dtype,
) -> Checked:  # fmt: skip
    """Compare files, tensors, config, vocabulary and logits. reference: the source in float32, rounded to `dtype`.

    Raises:
        InputError: the first difference, in one line.
    """
    try:
        _check_files(folder, source.folder)
        count = _check_tensors(folder, source, dtype)
        _check_config(folder, source.folder)
        module, tokenizer = _reload(folder)
        vocabulary = Vocabulary("(exported)", int(module.get_output_embeddings().weight.shape[0]), tokenizer)
        check_vocabulary(vocabulary, target)
        return _check_logits(module, real_size(tokenizer), reference, windows, count)
    except InputError as error:
        raise InputError(f"the export is not what was trained, nothing is kept: {error}") from error
    except _UNREADABLE as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the export cannot be read back, nothing is kept: {line}") from error


def check_tied(folder: Path, module: Any, weights: Weights) -> None:
    """Raise InputError where the config ties two tensors that the files hold apart: readers would use one or the other.

    module: the source as transformers loads it.
    """
    if not getattr(module.config.get_text_config(), "tie_word_embeddings", False):
        return
    tied = getattr(type(module), "_tied_weights_keys", None) or {}
    wanted = {name for pair in dict(tied).items() for name in pair}
    found = {name: tensor for name, tensor in weights.tensors() if name in wanted}
    for one, other in dict(tied).items():
        if one in found and other in found and not same_bits(found[one], found[other]):
            raise InputError(f"{folder} holds a {one} of its own while its config ties it to {other}: untie the config")


def _check_files(folder: Path, source: Path) -> None:
    for name in carried_files(source):
        if not (folder / name).is_file():
            raise InputError(f"{name} is missing")
        if (folder / name).read_bytes() != (source / name).read_bytes():
            raise InputError(f"{name} is not the source's")


def _check_tensors(folder: Path, source: Weights, dtype: torch.dtype) -> int:
    """Every tensor bit for bit, in the chosen dtype; returns how many."""
    written = read_weights(folder)
    ours, theirs = written.file_of(), source.file_of()
    if different := sorted(ours.keys() ^ theirs.keys()):
        lacking = [name for name in different if name not in ours]
        said = f"lacks {lacking[0]}" if lacking else f"holds {different[0]}, which the source has not"
        raise InputError(f"it {said} ({len(different)} names differ)")
    read = dict(written.tensors()) if len(written.files) == 1 else None
    for name, tensor in source.tensors():
        mine = read[name] if read is not None else _tensor(written, name)
        if not same_bits(mine, tensor.to(dtype)):
            raise InputError(f"tensor {name} ({tuple(mine.shape)}) is not the source's ({tuple(tensor.shape)})")
    return len(theirs)


def _tensor(weights: Weights, name: str) -> Tensor:
    part = Weights(weights.folder, {weights.file_of()[name]: (name,)}, weights.dtype)
    return next(part.tensors())[1]


def _check_config(folder: Path, source: Path) -> None:
    """As transformers reads them: rope, norms, head size, tying, end tokens and all else."""
    ours, theirs = (AutoConfig.from_pretrained(place).to_dict() for place in (folder, source))
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in _NOT_COMPARED and ours.get(key) != theirs.get(key):
            raise InputError(f"config field {key} reads {ours.get(key)!r}, the source's {theirs.get(key)!r}")
    named = read_object(folder / "config.json").get("architectures")
    if not named:
        raise InputError("config.json names no architectures, which servers go by")


def _reload(folder: Path) -> tuple[Any, Any]:
    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    module, info = loaded
    if extra := check_match("the folder", module, info).extra:
        raise InputError(f"the model has no place for {len(extra)} tensors, first {extra[0]}")
    tokenizer = load_tokenizer(str(folder))
    if tokenizer is None:
        raise InputError("the tokenizer is missing")
    return module.eval(), tokenizer


@torch.no_grad()
def _check_logits(
    module: Any, real: int, reference: CausalModel, windows: Sequence[Tensor], num_tensors: int
) -> Checked:
    largest, mass, tokens = 0.0, 0.0, 0
    for window in windows:
        ids = window[None]
        ours = module(input_ids=ids, use_cache=False).logits[0].float()
        theirs = reference.head(reference.hidden(ids))[0]
        error = (ours - theirs).abs()
        if not bool((error <= TOLERANCE * theirs.abs().clamp(min=1)).all()):
            raise InputError(f"its logits differ from the trained drafter's by {float(error.max()):.3g}")
        if bool((beyond := ours.argmax(-1) >= real).any()):
            place = int(beyond.nonzero()[0])
            raise InputError(
                f"it drafts id {int(ours[place].argmax())}, beyond the tokenizer's {real} ids: train it for longer"
            )
        largest, tokens = max(largest, float(error.max())), tokens + len(window)
        if real < ours.shape[-1]:
            mass = max(mass, float(ours.softmax(-1)[:, real:].sum(-1).max()))
    return Checked(num_tensors, tokens, largest, max(int(reference.vocab_size) - real, 0), mass)
