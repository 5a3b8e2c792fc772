"""`exittrain export`: which form a drafter can be written in, and who writes it."""

from __future__ import annotations

from pathlib import Path

from exittrain.drafters.formats import is_head_folder
from exittrain.errors import InputError, nearest
from exittrain.models.sums import check_folder
from exittrain.stages.export.folder import read_object
from exittrain.stages.export.output import Export
from exittrain.stages.export.source import ExportSource

HEAD_FORMS = ("speculators", "sglang", "dflash")
FORMS = ("hf", *HEAD_FORMS)


def check_form(name: str) -> None:
    """Raise InputError for a form that does not exist."""
    if name not in FORMS:
        raise InputError(f"no format {name!r}{nearest(name, list(FORMS))}: --to takes {', '.join(FORMS)}")


def export_drafter(source: ExportSource, output: Path, form: str, dtype: str | None = None) -> Export:
    """Write a drafter in that form. Raises InputError as `export_hf` and `export_head` do, and for a drafter of a kind
    that the form is not for, or whose files are damaged."""
    check_folder(source.folder)
    if (config := source.folder / "config.json").is_file():
        read_object(config)  # of one that cannot be read nobody knows what drafter it is
    head = is_head_folder(source.folder)
    if head and form == "hf":
        raise InputError(
            f"--to hf is for draft LMs: {source.folder} is exported with --to {', --to '.join(HEAD_FORMS)}"
        )
    if not head and form != "hf":
        raise InputError(
            f"--to {form} is for EAGLE heads and block drafters: {source.folder} is a draft LM, exported with --to hf"
        )
    if head:
        from exittrain.stages.export.heads import export_head

        return export_head(source, output, form, dtype)
    from exittrain.stages.export.hf import export_hf

    return export_hf(source, output, dtype)
