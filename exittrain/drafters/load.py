"""One way to every drafter: a saved folder, any causal LM, layers of the target, an EAGLE head or block drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from exittrain.drafters.assemble import assemble_head
from exittrain.drafters.base import DRAFTER_FILE, SCHEMA_VERSION, Drafter
from exittrain.drafters.calibration import Calibration
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.formats import is_head_folder
from exittrain.drafters.layers import copy_layers, share_with_target
from exittrain.drafters.vocabulary import shared_size
from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.models.target import TargetModel


def load_drafter(
    source: str | Path,
    target: TargetModel,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    share_embeddings: bool = True,
) -> Drafter:
    """A drafter for `target`, on its device, trainable, in `dtype` (default: the target's).

    source: a folder written by `Drafter.save`, any source `CausalModel.from_pretrained` takes, `layers:4` (the
    target's first 4) or `layers:0,5,29` (those); a folder or hub id may also be of an EAGLE-3 head or block drafter in
    any form that `formats.read_head` reads. A folder's calibration comes along. Raises InputError where it (or its
    calibration) cannot be read, or where its vocabulary is not the target's, naming ids that differ.
    """
    if str(source).startswith("layers:"):
        return copy_layers(target, _parse_layers(str(source)), dtype, share_embeddings)
    head = _head_folder(source)
    if head is not None:
        kept = tuple(_read_note(head).get("frozen") or ())
        return assemble_head(head, target, dtype or target.dtype, kept)
    model = CausalModel.from_pretrained(
        source,
        dtype=dtype or target.dtype,
        attention=attention or target.module.config._attn_implementation,
        device=target.device,
    )
    size = shared_size(model, target)
    model.module.requires_grad_(True)
    note = _read_note(Path(source))
    kind = str(note.get("kind", "causal_lm"))
    drafter = CausalDrafter(
        model, kind, target.fingerprint(), Calibration.load(source), target.vocab_size,
        None if size is None else torch.arange(size, device=target.device),
    )  # fmt: skip
    frozen = set(note.get("frozen") or ())
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if frozen and drafter.kind == "layers":
        share_with_target(model, target)
    return drafter


def _head_folder(source: str | Path) -> Path | None:
    """The folder of a head, of the hub's where `source` is the id of one; None for anything else."""
    if Path(source).exists() or Path(source).is_absolute() or str(source).count("/") != 1:
        return Path(source) if is_head_folder(source) else None
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(str(source), "config.json"))
        if not is_head_folder(config.parent):
            return None
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin", "*.txt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None  # no such id, or no way to it: loading it as a model says so in one line


def _parse_layers(spec: str) -> int | list[int]:
    text = spec.removeprefix("layers:")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{spec!r} is no drafter; write layers:4 (the first 4) or layers:0,5,29") from error
    return numbers[0] if len(numbers) == 1 else numbers


def _read_note(folder: Path) -> dict[str, Any]:
    file = folder / DRAFTER_FILE
    if not file.exists():
        return {}
    try:
        note = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise InputError(f"{file} cannot be read; save the drafter again") from error
    if not isinstance(note, dict) or note.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{file} has another schema than {SCHEMA_VERSION}; save the drafter with this version")
    if not isinstance(note.get("frozen") or [], list):
        raise InputError(f"{file} has no list of names in 'frozen'; save the drafter again")
    return note
