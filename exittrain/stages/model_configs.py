"""config.json of a model by whatever names it, without its weights and without a network.

recipes/configs/ holds what is public of the models that the recipes for GPUs name: `_name_or_path` is the hub id it
stands for, `_source` where it was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exittrain.records.share import share_names, share_path

SHIPPED = "recipes/configs"


def find_config(source: str | None) -> dict[str, Any] | None:
    """The config of a folder, a known model that was fetched, a hub id in the hub's cache, or one of SHIPPED; None when
    it is not known here, or no JSON object."""
    for file in _places(source) if source else ():
        if file is not None and file.is_file():
            return _text_part(_read(file))
    name = f"{source.rpartition('/')[2]}.json" if source else ""
    if name in share_names(SHIPPED):
        shipped = _read(share_path(f"{SHIPPED}/{name}"))
        if shipped is not None and shipped.get("_name_or_path") == source:
            return shipped
    return None


def text_config(config: Mapping[str, Any]) -> Any:
    """The config as transformers understands it, or None for a model it does not know."""
    from transformers import AutoConfig

    values = {name: value for name, value in config.items() if name != "model_type" and not name.startswith("_")}
    try:
        return AutoConfig.for_model(str(config["model_type"]), **values).get_text_config()
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _places(source: str) -> list[Path | None]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from exittrain.models.fetch import cached_folder

    folder = Path(source).expanduser()
    known = cached_folder(source)
    try:
        cached = None if folder.exists() else try_to_load_from_cache(source, "config.json")
    except HFValidationError:  # no hub id: a path that does not exist
        cached = None
    hub = Path(cached) if isinstance(cached, str) else None
    return [folder / "config.json", None if known is None else known / "config.json", hub]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _text_part(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of a model that also sees: what it is as a language model."""
    part = None if config is None else config.get("text_config")
    return part if isinstance(part, dict) else config
