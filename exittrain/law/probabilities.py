"""What callers hand in as probabilities, checked once: rows that are distributions, of a copy, in float64 or exact."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exittrain.errors import InputError
from exittrain.tree.draft_tree import DraftTree

Rows = NDArray[Any]  # [N+1, V] float64, or dtype object holding Fractions
ROW_SUM_TOLERANCE = 1e-4  # float32 softmax over a large vocabulary stays well inside; half precision does not


def checked_rows(
    tree: DraftTree, probs: Any, name: str = "target_probs", needed: NDArray[np.bool_] | None = None
) -> Rows:
    """probs [N+1, V] (list, numpy, torch; any device and dtype) as fresh rows that sum to one.

    name: what the caller calls them, for the errors. needed: [N+1] bool, the rows that are read; the others come back
    as zeros, whatever they held (None: all are read).

    Float64, or exact where the entries are Fractions: every verifier is generic over the two. Raises InputError on a
    wrong shape, a token outside the vocabulary, NaN or infinity, a negative entry, a row that does not sum to one.
    """
    rows = _as_array(probs, name)
    num_rows = tree.num_nodes + 1
    if rows.ndim != 2 or rows.shape[0] != num_rows or rows.shape[1] == 0:
        raise InputError(
            f"{name} has shape {tuple(rows.shape)}; this tree needs [{num_rows}, V], a row a node, root first"
        )
    outside = (tree.token_ids[1:] >= rows.shape[1]).nonzero().flatten()
    if outside.numel():
        node = int(outside[0]) + 1
        raise InputError(
            f"node {node} has token {int(tree.token_ids[node])}; {name} has a vocabulary of {rows.shape[1]}"
        )
    needed = np.ones(num_rows, dtype=bool) if needed is None else needed
    rows[~needed] = Fraction(0) if rows.dtype == object else 0.0
    if rows.dtype != object and not np.isfinite(rows).all():
        raise InputError(f"{name} holds NaN or infinity at node {_first_row(~np.isfinite(rows))}")
    if (rows < 0).any():
        raise InputError(
            f"{name} is negative at node {_first_row(rows < 0)}; give probabilities, not log-probabilities"
        )
    sums = rows.sum(axis=1, keepdims=True)
    off = (abs(sums - 1) > ROW_SUM_TOLERANCE) & needed[:, None]
    if off.any():
        node = _first_row(off)
        raise InputError(
            f"{name} sums to {float(sums[node, 0]):.6g} at node {node}; rows must sum to 1 (softmax in float32)"
        )
    rows[needed] = rows[needed] / sums[needed]
    return rows


def _as_array(values: Any, name: str) -> Rows:
    if isinstance(values, torch.Tensor):
        return np.array(values.detach().to("cpu", torch.float64).numpy())
    if isinstance(values, list | tuple) and any(isinstance(row, torch.Tensor) for row in values):
        values = [row.detach().to("cpu", torch.float64).numpy() for row in values]
    try:
        array = np.array(values)
        if array.dtype == object and all(isinstance(entry, Fraction | int) for entry in array.flat):
            return np.array(array + Fraction(0), dtype=object)
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} is no table of numbers; give [N+1, V] probabilities, one row a node") from None


def _first_row(bad: NDArray[Any]) -> int:
    return int(np.argwhere(bad)[0][0])
