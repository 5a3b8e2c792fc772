"""Known models and how to get them without a hub."""

from __future__ import annotations

from pathlib import Path

KNOWN_MODELS: dict[str, str] = {}


def fetch(name: str, cache_dir: str | Path | None = None) -> Path:
    raise NotImplementedError
