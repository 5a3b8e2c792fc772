"""The training loss of one micro-batch: whole-vocabulary losses in bounded chunks of rows.

Shapes: T token rows, P node rows, E edges, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exittrain.law.losses import ROW_LOSSES, cross_entropy_rows, draft_logprobs
from exittrain.law.sampling import Sampling
from exittrain.stages.training.scoring import KEEP_BYTES, Edges, Head, edge_chunks, row_chunks

Logits = Callable[[int, int], Tensor]  # rows [start, stop) -> the target's raw logits [stop - start, V]


def chunk_runner(num_rows: int, vocab_size: int) -> Callable[..., Tensor]:
    """How a chunk is run: plainly, or with its logits computed again in the backward pass when all of them would take
    more than KEEP_BYTES."""
    if num_rows * vocab_size * 4 <= KEEP_BYTES:
        return lambda function, *args: function(*args)

    def again(function: Callable[..., Tensor], *args: Any) -> Tensor:
        result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return result

    return again


def row_loss_sum(
    head: Head, hidden: Tensor, target_logits: Logits, sampling: Sampling, vocab_size: int,
    weights: Tensor | None = None, row_loss: str = "kl",
) -> Tensor:  # fmt: skip
    """Sum over rows of weight * loss(p, q), 0-dimensional: hidden [T, H] of the drafter, weights [T] or all one."""
    run, loss_of = chunk_runner(len(hidden), vocab_size), ROW_LOSSES[row_loss]

    def chunk(rows: Tensor, start: int, stop: int) -> Tensor:
        losses = loss_of(target_logits(start, stop), head(rows), sampling)
        return (losses if weights is None else losses * weights[start:stop]).sum()

    return _add([run(chunk, hidden[a:b], a, b) for a, b in row_chunks(hidden, vocab_size)])


def label_loss_sum(head: Head, hidden: Tensor, labels: Tensor, sampling: Sampling, vocab_size: int) -> Tensor:
    """Sum over rows of -log q(label): hidden [T, H], labels [T]."""
    run = chunk_runner(len(hidden), vocab_size)

    def chunk(rows: Tensor, start: int, stop: int) -> Tensor:
        return cross_entropy_rows(head(rows), labels[start:stop], sampling).sum()

    return _add([run(chunk, hidden[a:b], a, b) for a, b in row_chunks(hidden, vocab_size)])


def edge_loss_sum(
    head: Head, hidden: Tensor, edges: Edges, weights: Tensor, sampling: Sampling, vocab_size: int
) -> Tensor:
    """Sum over edges of weight * -log q_par(v)(x_v): hidden [P, H] at `edges.rows`, weights [E] in edge order."""
    run = chunk_runner(len(hidden), vocab_size)

    def chunk(rows: Tensor, start: int, part: slice) -> Tensor:
        logprobs = draft_logprobs(head(rows), sampling)
        return -(logprobs[edges.row_of[part] - start, edges.tokens[part]] * weights[part]).sum()

    return _add([run(chunk, hidden[a:b], a, part) for a, b, part in edge_chunks(edges, vocab_size)])


def _add(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum() if parts else torch.zeros(())
