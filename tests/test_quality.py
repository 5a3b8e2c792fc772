"""ruff over everything, mypy --strict over the layers L0 to L2 (pyproject.toml says which modules are strict)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STRICT = ("tree", "law", "verify", "build", "models", "drafters", "decoding", "records", "runtime", "errors.py")


def output_of(*arguments: str) -> tuple[int, str]:
    if find_spec(arguments[0]) is None:
        pytest.skip(f"{arguments[0]} is not installed")
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_ruff_check() -> None:
    code, text = output_of("ruff", "check", ".")
    assert code == 0, text


def test_ruff_format() -> None:
    code, text = output_of("ruff", "format", "--check", ".")
    assert code == 0, text


def test_mypy_strict() -> None:
    code, text = output_of("mypy", *(f"exittrain/{name}" for name in STRICT))
    assert code == 0, text
