"""Files an installed exittrain reads: recipes, prompts, benchmarks, suites, published figures, batch scripts."""

from __future__ import annotations

from pathlib import Path

import exittrain
from exittrain.errors import InputError, nearest

_PACKAGE = Path(exittrain.__file__).resolve().parent
_IS_CHECKOUT = (
    _PACKAGE.parent / "pyproject.toml"
).is_file()  # else the parent is site-packages, with other people's data/
ROOTS = (_PACKAGE.parent,) if _IS_CHECKOUT else (_PACKAGE / "_share",)


def share_path(relative: str) -> Path:
    """The file or folder `relative` ("recipes/quickstart.yaml", "data/prompts", "eval/benchmarks", ...).

    Raises:
        InputError: no such file, with the nearest name of the same folder.
    """
    for root in ROOTS:
        if (root / relative).exists():
            return root / relative
    folder, _, name = relative.rpartition("/")
    raise InputError(f"no {relative!r} in exittrain's files{nearest(name, share_names(folder))}")


def share_names(folder: str) -> list[str]:
    """Sorted names of the entries in a shared folder; empty when there is no such folder."""
    return sorted({entry.name for root in ROOTS if (root / folder).is_dir() for entry in (root / folder).iterdir()})
