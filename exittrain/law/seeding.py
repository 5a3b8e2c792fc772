"""Every random stream gets its own seed, derived from what it is for, so that no stream depends on another's length."""

from __future__ import annotations

import hashlib

import torch

Part = str | int | float | bool | None


def seed_for(*parts: Part) -> int:
    """A 63-bit seed from plain values such as (seed, "collect", sequence_id): sha256 of their repr.

    Raises TypeError on anything else (the repr of a tensor is abridged, and two would share a seed).
    """
    for part in parts:
        if type(part) not in (str, int, float, bool, type(None)):
            raise TypeError(f"a seed is made of str, int, float, bool or None, got {type(part).__name__}")
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def generator_for(*parts: Part, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator on `device`, seeded by `seed_for(*parts)`."""
    return torch.Generator(device=device).manual_seed(seed_for(*parts))
