"""exittrain: train draft models for speculative decoding on the trees they will really draw, and prove the gain.

Public names are loaded on first use, so that `import exittrain` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exittrain.build.registry import get_builder as get_builder
    from exittrain.decoding.loop import decode as decode
    from exittrain.drafters.load import load_drafter as load_drafter
    from exittrain.errors import InputError as InputError
    from exittrain.law.exit_law import exit_law as exit_law
    from exittrain.law.sampling import Sampling as Sampling
    from exittrain.models.target import TargetModel as TargetModel
    from exittrain.tree.draft_tree import DraftTree as DraftTree
    from exittrain.verify.registry import get_verifier as get_verifier

_HOMES = {
    "DraftTree": "exittrain.tree.draft_tree",
    "InputError": "exittrain.errors",
    "Sampling": "exittrain.law.sampling",
    "TargetModel": "exittrain.models.target",
    "decode": "exittrain.decoding.loop",
    "exit_law": "exittrain.law.exit_law",
    "get_builder": "exittrain.build.registry",
    "get_verifier": "exittrain.verify.registry",
    "load_drafter": "exittrain.drafters.load",
}
__all__ = [
    "DraftTree",
    "InputError",
    "Sampling",
    "TargetModel",
    "decode",
    "exit_law",
    "get_builder",
    "get_verifier",
    "load_drafter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'exittrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
