"""The k best tokens of each row, the same ones whatever the machine: ties go to the smaller token id."""

from __future__ import annotations

import torch
from torch import Tensor


def top_tokens(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids), both [..., k]: the k largest of logprobs [..., V], best first, ties by smaller id.

    k is cut to V. Entries of -inf (tokens of no probability) come last, with id 0: a caller must not select them.
    """
    vocab = logprobs.shape[-1]
    k = min(k, vocab)
    rows = logprobs.reshape(-1, vocab)
    values, ids = rows.sort(dim=-1, descending=True, stable=True) if k == vocab else _partial_sort(rows, k)
    shape = (*logprobs.shape[:-1], k)
    return values.reshape(shape), ids.masked_fill(values == -torch.inf, 0).reshape(shape)


def _partial_sort(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k < V columns of a stable descending sort of rows [R, V] (ids of -inf entries are any)."""
    values, ids = rows.topk(k + 1, dim=-1)
    last = values[:, k - 1 : k]
    # topk chooses freely among tokens tied with the last one kept: those rows take the smallest ids instead.
    tied = ((values[:, k:] == last) & (last > -torch.inf)).any(1).nonzero().flatten()
    values, ids = values[:, :k], ids[:, :k]
    if tied.numel():
        ids = ids.clone()
        ids[tied] = _smallest_ids(rows[tied], values[tied], ids[tied])
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _smallest_ids(rows: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """ids [R, k] with those tied for the last place replaced by the smallest tied ids of rows [R, V]."""
    k, vocab = values.shape[1], rows.shape[1]
    last = values[:, -1:]
    candidates = torch.where(rows == last, torch.arange(vocab, device=rows.device), vocab)
    smallest = candidates.topk(k, dim=-1, largest=False, sorted=True).values
    rank = (torch.arange(k, device=rows.device) - (values > last).sum(1, keepdim=True)).clamp(min=0)
    return torch.where(values > last, ids, smallest.gather(1, rank))
