"""The contexts of all tasks together: one figure a temperature beside the tasks' own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from exittrain.stages.evaluation.results import ContextResult
from exittrain.stages.evaluation.setup import Cell, Results

ALL_TASKS = "all tasks"


def with_pooled(results: Results) -> tuple[dict[Cell, dict[str, ContextResult]], dict[Cell, ContextResult]]:
    """`results.contexts` and `results.oracles`, and where a temperature has several tasks a cell ALL_TASKS of them all:
    every context weighs the same, and a sequence is still a unit of the bootstrap."""
    contexts, oracles = dict(results.contexts), dict(results.oracles)
    for temperature in dict.fromkeys(cell.temperature for cell in results.contexts):
        cells = [cell for cell in results.contexts if cell.temperature == temperature]
        if len(cells) < 2:
            continue
        whole = Cell(ALL_TASKS, temperature)
        drafters = [name for name in results.contexts[cells[0]] if all(name in results.contexts[c] for c in cells)]
        contexts[whole] = {name: _joined({c: results.contexts[c][name] for c in cells}) for name in drafters}
        if all(cell in results.oracles for cell in cells):
            oracles[whole] = _joined({cell: results.oracles[cell] for cell in cells})
    return contexts, oracles


def _joined(parts: Mapping[Cell, ContextResult]) -> ContextResult:
    ids = tuple(f"{cell.task}:{name}" for cell, part in parts.items() for name in part.sequence_ids)
    anchors = tuple(anchor for part in parts.values() for anchor in part.anchors)
    return ContextResult(ids, anchors, np.concatenate([part.reach for part in parts.values()]))
