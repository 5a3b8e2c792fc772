"""The layers: imports point down only, and the pure layers know no files, clocks, configs or global randomness."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "exittrain"
LAYERS = {
    "tree": 0, "law": 0, "verify": 0, "build": 0,
    "models": 1, "drafters": 1,
    "decoding": 2, "records": 2, "runtime": 2,
    "stages": 3, "config": 3,
    "cli": 4,
}  # fmt: skip
FORBIDDEN = {
    0: {
        "transformers",
        "deepspeed",
        "datasets",
        "yaml",
        "pydantic",
        "wandb",
        "peft",
        "time",
        "pathlib",
        "os",
        "random",
    },
    1: {"deepspeed", "yaml", "pydantic", "wandb", "typer", "rich"},
    2: {"pydantic", "typer", "deepspeed"},
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path: Path) -> None:
    layer = LAYERS[path.relative_to(PACKAGE).parts[0]]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "exittrain" and len(parts) > 1 and parts[1] in LAYERS:
            assert LAYERS[parts[1]] <= layer, f"{path.relative_to(PACKAGE)} (L{layer}) imports {name}"
            if parts[1] == "config":
                assert layer >= 3
        assert parts[0] not in FORBIDDEN.get(layer, set()), f"{path.relative_to(PACKAGE)} (L{layer}) imports {name}"


def test_data_eval_recipes_and_slurm_hold_no_python() -> None:
    root = PACKAGE.parent
    assert [path for folder in ("data", "eval", "recipes", "slurm") for path in (root / folder).rglob("*.py")] == []


def test_importing_the_package_and_help_load_no_torch() -> None:
    code = (
        "import sys, exittrain, exittrain.cli.main; "
        "heavy = {'torch', 'transformers', 'deepspeed', 'wandb', 'datasets'} & set(sys.modules); "
        "sys.exit(','.join(heavy) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
