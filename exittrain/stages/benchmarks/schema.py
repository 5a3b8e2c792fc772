"""The shape of what `exittrain bench --json` writes, as types: what a clock measured, and on what."""

from __future__ import annotations

from typing import Any, Literal

from exittrain.stages.evaluation.schema import Part

SCHEMA_VERSION: Literal[1] = 1


class Comparison(Part):
    """Two ways of doing the same work. Both milliseconds are medians; ratio: the first over the second."""

    name: str
    baseline: str
    milliseconds: float
    baseline_milliseconds: float
    ratio: float


class RuleTime(Part):
    """One verifier in one cell. milliseconds: every measured round, from logits to (node, bonus) of all trees.

    mean_block_length: of the verdicts of those rounds, bonus counted. It shows that trees were followed, no more: the
    draws are few, and the rules do not share them.
    """

    rule: str
    milliseconds: list[float]
    median: float
    mean_block_length: float


class VerifyCell(Part):
    """Every rule on the same trees and logits. inner_nodes: those with children; ratios: medians, by "rule / rule"."""

    device: str
    nodes: int
    depth: int
    inner_nodes: int
    vocab: int
    batch: int
    rules: list[RuleTime]
    ratios: dict[str, float]


class SkippedCell(Part):
    """A cell that was asked for and not measured."""

    device: str
    nodes: int
    vocab: int
    batch: int
    reason: str


class VerifyPart(Part):
    cells: list[VerifyCell]
    skipped: list[SkippedCell]


class BenchResult(Part):
    """provenance: versions, hardware, commit and command line; threads: those torch uses on the CPU."""

    schema_version: Literal[1] = SCHEMA_VERSION
    repeats: int
    threads: int
    verify: VerifyPart | None = None
    models: list[Comparison] | None = None
    provenance: dict[str, Any]
