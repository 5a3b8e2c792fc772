"""Verifiers by name."""

from __future__ import annotations

from exittrain.errors import InputError, nearest
from exittrain.verify.base import Verifier
from exittrain.verify.block import Block
from exittrain.verify.greedy import Greedy
from exittrain.verify.predraw import Predraw
from exittrain.verify.residual import Residual
from exittrain.verify.rrs import Rrs
from exittrain.verify.rrs_wor import RrsWor
from exittrain.verify.tev import Tev
from exittrain.verify.traversal import Traversal

FIXED: tuple[Verifier, ...] = (Tev(), Predraw(), Residual(), Greedy())
SAMPLED: tuple[Verifier, ...] = (Rrs(), RrsWor(), Traversal(), Block())
VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in (*FIXED, *SAMPLED)}


def get_verifier(name: str) -> Verifier:
    """The verifier of that name; InputError with the nearest one otherwise."""
    if name not in VERIFIERS:
        raise InputError(f"no verifier {name!r}{nearest(name, list(VERIFIERS))} (known: {', '.join(VERIFIERS)})")
    return VERIFIERS[name]
