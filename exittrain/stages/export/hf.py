"""`--to hf`: a draft LM as a plain Hugging Face folder for transformers assisted generation, vLLM and SGLang."""

from __future__ import annotations

from pathlib import Path

import torch

from exittrain.drafters.vocabulary import check_vocabulary
from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.stages.export.check import check_folder, check_tied
from exittrain.stages.export.folder import Weights, read_object, read_weights, write_folder
from exittrain.stages.export.output import (
    Export,
    Identity,
    check_finite,
    check_output,
    chosen_dtype,
    new_folder,
    write_note,
)
from exittrain.stages.export.source import ExportSource, drafter_note


def export_hf(source: ExportSource, output: Path, dtype: str | None = None) -> Export:
    """Write `output`, read it back, compare, and only then let it appear. dtype: None keeps the stored one.

    Raises:
        InputError: the source is no whole draft LM of that target, `output` is taken, or a check failed; what was at
            `output` before is still there, and nothing else is.
    """
    weights = _source(source.folder)
    rounded = chosen_dtype(dtype, weights.dtype)
    check_output(output, source)
    check_finite(weights.tensors(), source.folder, rounded)
    reference = CausalModel.from_pretrained(source.folder, torch.float32)
    if reference.match is not None and reference.match.extra:
        extra = reference.match.extra
        raise InputError(f"{source.folder} has {len(extra)} tensors its config has no place for, first {extra[0]}")
    check_tied(source.folder, reference.module, weights)
    check_vocabulary(reference, source.target)
    tokenizer = reference.tokenizer or source.target.tokenizer
    if tokenizer is None:
        raise InputError(f"neither {source.folder} nor {source.target_source} has a tokenizer")
    windows = source.windows(reference.max_positions)
    if not windows:
        raise InputError(f"there is no text to compare {source.folder} on")
    before = _fingerprint(source.folder, weights.dtype)
    with torch.no_grad():
        for parameter in reference.module.parameters():
            parameter.copy_(parameter.to(rounded))  # what the folder must compute: see check_folder
    with new_folder(output) as folder:
        write_folder(weights, folder, rounded, tokenizer)
        checked = check_folder(folder, weights, reference, source.target, windows, rounded)
        identity = Identity(weights.dtype, rounded, before, _fingerprint(folder, rounded))
        write_note(folder, source, "hf", drafter_note(source.folder), identity, checked)
    return Export(output, None if rounded == weights.dtype else str(rounded).removeprefix("torch."), checked)


def _source(folder: Path) -> Weights:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no drafter's folder: it has no config.json")
    kind = drafter_note(folder).get("kind", "causal_lm")
    if kind not in ("layers", "causal_lm"):
        raise InputError(f"{folder} is a drafter of kind {kind!r}: --to hf is for causal LMs (layers, causal_lm)")
    if read_object(folder / "config.json").get("quantization_config"):
        raise InputError(f"{folder} is quantised: export the weights it was made from")
    return read_weights(folder)


def _fingerprint(folder: Path, dtype: torch.dtype) -> str:
    return CausalModel.from_pretrained(folder, dtype, verify=False).fingerprint()
