"""`--to hf`: a draft LM as a plain Hugging Face folder for transformers assisted generation, vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exittrain.drafters.vocabulary import check_vocabulary
from exittrain.errors import InputError, nearest
from exittrain.models.causal import CausalModel
from exittrain.models.folders import atomic_folder
from exittrain.records.files import sha256
from exittrain.runtime.provenance import collect_provenance
from exittrain.stages.export.check import Checked, check_folder, check_tied
from exittrain.stages.export.folder import DTYPES, Weights, read_object, read_weights, write_folder, write_object
from exittrain.stages.export.source import ExportSource, drafter_note

NOTE = "exittrain-export.json"
SCHEMA_VERSION = 1
LATER = ("speculators", "sglang", "dflash")  # formats of heads and block drafters
GUESSED = ("eagle3", "eagle-", "dflash", "dspark")  # parts of a path from which vLLM guesses another method


@dataclass(frozen=True)
class Export:
    """A finished folder: what it was rounded to (None: stored as it was), and what was checked."""

    folder: Path
    rounded_to: str | None
    checked: Checked

    def __str__(self) -> str:
        done = self.checked
        stored = f"rounded to {self.rounded_to}, then" if self.rounded_to else "all"
        padding = f"; {done.padding_ids} ids beyond the tokenizer, never the likeliest" if done.padding_ids else ""
        return (
            f"{done.num_tensors} tensors, {stored} bit for bit; read back by transformers, float32 logits within "
            f"{done.logit_error:.1g} on {done.num_tokens} tokens{padding}"
        )


def check_format(name: str) -> None:
    """Raise InputError where nothing can be exported to that format."""
    if name in LATER:
        raise InputError(f"--to {name} is for EAGLE heads and block drafters: draft LMs are exported with --to hf")
    if name != "hf":
        raise InputError(f"no format {name!r}{nearest(name, ['hf', *LATER])}: draft LMs are exported with --to hf")


def export_hf(source: ExportSource, output: Path, dtype: str | None = None) -> Export:
    """Write `output`, read it back, compare, and only then let it appear. dtype: None keeps the stored one.

    Raises:
        InputError: the source is no whole draft LM of that target, `output` is taken, or a check failed; what was at
            `output` before is still there, and nothing else is.
    """
    weights, config = _source(source.folder)
    rounded = _dtype(dtype, weights.dtype)
    _check_output(output, source)
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
    created = [parent for parent in output.absolute().parents if not parent.exists()]
    try:
        with atomic_folder(output.absolute()) as folder:
            write_folder(weights, folder, rounded, tokenizer)
            checked = check_folder(folder, weights, reference, source.target, windows, rounded)
            after = _fingerprint(folder, rounded)
            if rounded == weights.dtype and after != before:
                raise InputError("the export's fingerprint is not the source's, nothing is kept")
            note = _note(source, config, weights.dtype, rounded, (before, after), checked)
            files = {file.name: _record(file) for file in sorted(folder.iterdir())}
            write_object(folder / NOTE, {**note, "files": files})
    except BaseException:
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        raise
    return Export(output, None if rounded == weights.dtype else str(rounded).removeprefix("torch."), checked)


def _source(folder: Path) -> tuple[Weights, Mapping[str, Any]]:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no drafter's folder: it has no config.json")
    drafter_note(folder)  # raises for a kind that is no causal LM
    config = read_object(folder / "config.json")
    if config.get("quantization_config"):
        raise InputError(f"{folder} is quantised: export the weights it was made from")
    return read_weights(folder), config


def _dtype(name: str | None, stored: torch.dtype) -> torch.dtype:
    if name is not None and name not in DTYPES:
        raise InputError(f"--dtype {name!r}{nearest(name, list(DTYPES))}: give {', '.join(DTYPES)}")
    return stored if name is None else DTYPES[name]


def _check_output(output: Path, source: ExportSource) -> None:
    """Refuse a path that servers misread, and a folder that is not an earlier export of this very drafter."""
    place = output.resolve()
    guessed = [part for part in GUESSED if part in str(place).lower()]
    if guessed:
        raise InputError(f"{place} has {guessed[0]!r} in it, from which vLLM guesses a method: choose another --output")
    if place == source.folder.resolve() or source.folder.resolve().is_relative_to(place):
        raise InputError(f"{output} is what is exported: choose another --output")
    if not place.exists():
        return
    earlier = read_object(place / NOTE) if (place / NOTE).is_file() else {}
    if earlier.get("source", {}).get("folder") != str(source.folder.resolve()):
        raise InputError(f"{output} exists and is no earlier export of {source.folder}: choose another --output")


def _fingerprint(folder: Path, dtype: torch.dtype) -> str:
    return CausalModel.from_pretrained(folder, dtype, verify=False).fingerprint()


def _note(
    source: ExportSource, config: Mapping[str, Any], stored: torch.dtype, rounded: torch.dtype,
    fingerprints: tuple[str, str], checked: Checked,
) -> dict[str, Any]:  # fmt: skip
    made = collect_provenance()
    drafter = drafter_note(source.folder)
    return {
        "schema_version": SCHEMA_VERSION,
        "format": "hf",
        "source": {
            "folder": str(source.folder.resolve()),
            "run": None if source.run is None else str(source.run.resolve()),
            "arm": source.arm,
            "kind": drafter.get("kind", "causal_lm"),
            "dtype": str(stored).removeprefix("torch."),
            "fingerprint": fingerprints[0],
        },
        "dtype": str(rounded).removeprefix("torch."),
        "rounded": stored != rounded,
        "fingerprint": fingerprints[1],
        "target": {
            "name": source.target_source,
            "vocab_size": source.target.vocab_size,
            "trained_for": drafter.get("target_fingerprint"),
        },
        "architectures": config.get("architectures"),
        "checked": asdict(checked),
        "versions": made["versions"],
        "commit": None if made["git"] is None else made["git"]["commit"],
    }


def _record(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}
