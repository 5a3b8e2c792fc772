"""What every export shares: where it may go, what it notes about itself, and that it appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exittrain.errors import InputError, nearest
from exittrain.models.folders import atomic_folder, standing
from exittrain.records.files import sha256
from exittrain.runtime.provenance import collect_provenance
from exittrain.stages.disk import FILE, check_room, used_bytes
from exittrain.stages.export.folder import DTYPES, read_object, write_object
from exittrain.stages.export.source import ExportSource

if TYPE_CHECKING:
    from exittrain.stages.export.check import Checked
    from exittrain.stages.export.head_check import HeadChecked

NOTE = "exittrain-export.json"
SCHEMA_VERSION = 1
GUESSED = ("eagle3", "eagle-", "dflash", "dspark")  # parts of a path from which vLLM guesses a method


@dataclass(frozen=True)
class Export:
    """A finished folder: what it was rounded to (None: stored as it was), what was checked, and tensors of the source
    that it does not hold."""

    folder: Path
    rounded_to: str | None
    checked: Checked | HeadChecked
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        stored = f"rounded to {self.rounded_to}, then" if self.rounded_to else "all"
        left = f"; left out, as it has no place: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.checked.num_tensors} tensors, {stored} bit for bit; {self.checked}{left}"


@dataclass(frozen=True)
class Identity:
    """Of a drafter before and after: dtypes, and fingerprints in these."""

    stored: torch.dtype
    rounded: torch.dtype
    fingerprint: str
    exported_fingerprint: str

    def __post_init__(self) -> None:
        if self.stored == self.rounded and self.fingerprint != self.exported_fingerprint:
            raise InputError("the export's fingerprint is not the source's, nothing is kept")


def chosen_dtype(name: str | None, stored: torch.dtype) -> torch.dtype:
    """The dtype called `name`; None: the stored one. Raises InputError for an unknown name."""
    if name is not None and name not in DTYPES:
        raise InputError(f"--dtype {name!r}{nearest(name, list(DTYPES))}: give {', '.join(DTYPES)}")
    return stored if name is None else DTYPES[name]


def check_output(output: Path, source: ExportSource, method: str | None = None, more_bytes: int = 0) -> None:
    """Refuse a path that servers misread, a folder that is not an earlier export of this very drafter, and a disk
    without room for it.

    method: the part of GUESSED from which vLLM would guess rightly, if any; more_bytes: of what is written beside the
    source's own files.
    """
    place = _place(output)
    guessed = [part for part in GUESSED if part in str(place).lower() and part != method]
    if guessed:
        raise InputError(f"{place} has {guessed[0]!r} in it, from which vLLM guesses a method: choose another --output")
    exported = source.folder.resolve()
    if exported.is_relative_to(place) or place.is_relative_to(exported):
        raise InputError(f"{output} is what is exported, or in it: choose another --output")
    needed = used_bytes(source.folder) + more_bytes + 4 * FILE
    check_room(place.parent, needed, "the export", "choose another --output")
    there = standing(place)
    if not there.exists():
        return
    earlier = read_object(there / NOTE).get("source") if (there / NOTE).is_file() else None
    if not isinstance(earlier, dict) or earlier.get("folder") != str(exported):
        raise InputError(f"{output} exists and is no earlier export of {source.folder}: choose another --output")


def _place(output: Path) -> Path:
    """Where `output` is: a link there is followed, not replaced."""
    try:
        return output.resolve()
    except RuntimeError:
        raise InputError(f"{output} is a link that leads back to itself: choose another --output") from None


def check_finite(tensors: Iterable[tuple[str, Tensor]], source: Path, rounded: torch.dtype) -> None:
    """Refuse a tensor with NaN or infinity, in the source or once it is rounded: a comparison on some text need not
    come across it."""
    for name, tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{source}: tensor {name} holds NaN or infinity: export an earlier drafter")
        if not bool(torch.isfinite(tensor.to(rounded)).all()):
            short = str(rounded).removeprefix("torch.")
            raise InputError(f"{source}: tensor {name} outgrows {short}: export with another --dtype")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `output` when the block ends well; otherwise nothing is left of it,
    nor of parent folders that were made for it."""
    place = _place(output)
    created = [parent for parent in place.parents if not parent.exists()]
    try:
        with atomic_folder(place) as folder:
            yield folder
    except BaseException:
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        raise


def write_note(
    folder: Path, source: ExportSource, form: str, drafter: Mapping[str, Any], identity: Identity,
    checked: Checked | HeadChecked, **more: Any,
) -> None:  # fmt: skip
    """NOTE, with bytes and sums of every other file. drafter: the source's exittrain.json."""
    made = collect_provenance()
    stored, rounded = (str(dtype).removeprefix("torch.") for dtype in (identity.stored, identity.rounded))
    note = {
        "schema_version": SCHEMA_VERSION,
        "format": form,
        "source": {
            "folder": str(source.folder.resolve()),
            "run": None if source.run is None else str(source.run.resolve()),
            "arm": source.arm,
            "kind": drafter.get("kind", "causal_lm"),
            "dtype": stored,
            "fingerprint": identity.fingerprint,
        },
        "dtype": rounded,
        "rounded": stored != rounded,
        "fingerprint": identity.exported_fingerprint,
        "target": {
            "name": source.target_source,
            "vocab_size": source.target.vocab_size,
            "trained_for": drafter.get("target_fingerprint"),
        },
        "architectures": read_object(folder / "config.json").get("architectures"),
        "checked": asdict(checked),
        "versions": made["versions"],
        "commit": None if made["git"] is None else made["git"]["commit"],
        "files": {file.name: _record(file) for file in sorted(folder.iterdir())},
        **more,
    }
    write_object(folder / NOTE, note)


def _record(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}
