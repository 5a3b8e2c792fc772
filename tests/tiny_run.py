"""The tiny recipe on a little text of its own: what tests of whole runs share. `tiny_run` of conftest.py is one."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exittrain.config.schema import Recipe

TINY = Path(__file__).resolve().parent / "fixtures/tiny.yaml"
SMALL = [
    "target.scratch.steps=3", "warmup.steps=2", "train.steps=2", "train.save_every=1", "eval.prompts_per_task=2",
    "eval.contexts=8", "eval.max_new_tokens=6", "eval.temperatures=[1.0]", "eval.speed=false",
]  # fmt: skip


def make_corpus(folder: Path) -> Path:
    """A dozen files of the standard library: enough text, quickly tokenised."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in [*sorted((library / "json").glob("*.py")), library / "textwrap.py"]:
        shutil.copy(file, folder)
    return folder


def recipe_of(corpus: Path, *overrides: str) -> Recipe:
    """The tiny recipe on `corpus`, with SMALL and the given overrides."""
    from exittrain.config.load import load_recipe

    local = [f"target.scratch.corpus={corpus}", f"data.train.path={corpus}"]
    return load_recipe(TINY, [*local, *SMALL, *overrides])
