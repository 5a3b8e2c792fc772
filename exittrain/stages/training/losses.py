"""The training loss of one micro-batch: whole-vocabulary losses in bounded chunks of rows.

Shapes: T draft rows, U target rows, Q node states, P tree nodes, E edges, H hidden, V target vocabulary, D the tokens
the drafter can draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from exittrain.law.losses import ROW_LOSSES, cross_entropy_rows, draft_logprobs, target_logprobs
from exittrain.law.sampling import Sampling
from exittrain.stages.training.scoring import KEEP_BYTES, Head, row_chunks

Logits = Callable[[int, int], Tensor]  # rows [start, stop) -> the target's raw logits [stop - start, V]


@dataclass(frozen=True, eq=False)
class RowHead:
    """A drafter's head with what its losses need to know. head: states [..., H] -> raw logits [..., D]; draft_ids [D]
    or None (all); vocab_size V."""

    head: Head
    vocab_size: int
    draft_ids: Tensor | None = None

    @property
    def width(self) -> int:
        """D."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def columns(self, tokens: Tensor) -> Tensor:
        """Columns of tokens [...] among the logits, -1 where the drafter cannot draft them."""
        if self.draft_ids is None:
            return tokens
        place = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[place] == tokens, place, -1)


def pair_loss_sum(
    head: RowHead, states: Tensor, target_logits: Logits, target_of: Tensor, sampling: Sampling,
    weights: Tensor | None = None, row_loss: str = "kl",
) -> Tensor:  # fmt: skip
    """Sum over draft rows of weight * loss(p, q), 0-dimensional: states [T, H] of the drafter, target_of [T] ascending
    without gaps: the target row [U] each is compared with; weights [T] or all one.

    Chunks are of draft rows: however many share a target row, memory stays bounded. A target row goes through the
    target's head once for every chunk that needs it, which is seldom more than one.
    """
    if not len(states):
        return states.new_zeros(())
    loss_of, run = ROW_LOSSES[row_loss], _chunk_runner(len(states), head)

    def chunk(rows: Tensor, part: slice, first: int, last: int) -> Tensor:
        wanted = target_logprobs(target_logits(first, last + 1), sampling, head.draft_ids)
        row_of = target_of[part] - first
        if len(rows) != len(wanted) or not _is_range(row_of):
            wanted = wanted[row_of]
        losses = loss_of(wanted, draft_logprobs(head.head(rows), sampling))
        return (losses if weights is None else losses * weights[part]).sum()

    chunks = row_chunks(states, head.vocab_size)
    ends = target_of[torch.tensor([[start, stop - 1] for start, stop in chunks], device=target_of.device)].tolist()
    parts = [(slice(*rows), *targets) for rows, targets in zip(chunks, ends, strict=True)]
    return _add([run(chunk, states[part], part, first, last) for part, first, last in parts])


def mixed_kl_sum(
    head: RowHead, states: Tensor, target_logits: Logits, state_of: Tensor, weights: Tensor, sampling: Sampling
) -> Tensor:
    """Sum over tree nodes of weight * KL(p, q of their state): state_of [P] names each node's state [Q], weights [P].

    What a block drafter says of a place is compared with all nodes there by one row, their weighted mean (the sum of
    KLs is that cross-entropy less a constant): [Q, D] is held, [P, D] is not.
    """
    device = states.device
    label = torch.zeros((len(states), head.width), device=device)
    entropy = torch.zeros((), device=device)
    with torch.no_grad():
        for start, stop in row_chunks(states, head.vocab_size, len(state_of)):
            wanted = target_logprobs(target_logits(start, stop), sampling, head.draft_ids)
            probs = wanted.exp() * weights[start:stop, None]
            entropy += (probs * wanted.masked_fill(probs == 0, 0.0)).sum()
            label.index_add_(0, state_of[start:stop], probs)
    run = _chunk_runner(len(states), head)

    def chunk(rows: Tensor, start: int, stop: int) -> Tensor:
        wanted = label[start:stop]
        return -(wanted * draft_logprobs(head.head(rows), sampling).masked_fill(wanted == 0, 0.0)).sum()

    return _add([run(chunk, states[a:b], a, b) for a, b in row_chunks(states, head.width)]) + entropy


def label_loss_sum(
    head: RowHead, states: Tensor, tokens: Tensor, sampling: Sampling, weights: Tensor | None = None
) -> Tensor:
    """Sum over rows of weight * -log q(token): states [T, H], tokens [T]. What cannot be drafted costs nothing."""
    columns = head.columns(tokens)
    counted = (columns >= 0).to(torch.float32) if weights is None else weights * (columns >= 0)
    columns, run = columns.clamp(min=0), _chunk_runner(len(states), head)

    def chunk(rows: Tensor, start: int, stop: int) -> Tensor:
        return (cross_entropy_rows(head.head(rows), columns[start:stop], sampling) * counted[start:stop]).sum()

    return _add([run(chunk, states[a:b], a, b) for a, b in row_chunks(states, head.width)])


def edge_loss_sum(
    head: RowHead, states: Tensor, state_of: Tensor, tokens: Tensor, weights: Tensor, sampling: Sampling
) -> Tensor:
    """Sum over edges of weight * -log q(token) at the state they leave: states [Q, H]; state_of, tokens, weights [E].
    Tokens that cannot be drafted cost nothing."""
    columns = head.columns(tokens)
    weights = weights * (columns >= 0)
    order = state_of.sort(stable=True).indices
    state_of, columns, weights = state_of[order], columns[order].clamp(min=0), weights[order]
    run = _chunk_runner(len(states), head)

    def chunk(rows: Tensor, start: int, part: slice) -> Tensor:
        logprobs = draft_logprobs(head.head(rows), sampling)
        return -(logprobs[state_of[part] - start, columns[part]] * weights[part]).sum()

    chunks = row_chunks(states, head.width)
    return _add([run(chunk, states[a:b], a, part) for (a, b), part in _parts(chunks, state_of)])


def _chunk_runner(num_rows: int, head: RowHead) -> Callable[..., Tensor]:
    """How a chunk is run: plainly, or with its logits computed again in the backward pass when all of them would take
    more than KEEP_BYTES."""
    if num_rows * head.width * 4 <= KEEP_BYTES:
        return lambda function, *args: function(*args)

    def again(function: Callable[..., Tensor], *args: Any) -> Tensor:
        result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return result

    return again


def _parts(chunks: list[tuple[int, int]], row_of: Tensor) -> list[tuple[tuple[int, int], slice]]:
    """Each chunk of rows with the slice of `row_of` (ascending) that names them; chunks nobody names are left out."""
    stops = torch.tensor([stop for _, stop in chunks], device=row_of.device)
    lasts = torch.searchsorted(row_of, stops).tolist() if chunks else []
    parts = [slice(first, last) for first, last in zip([0, *lasts[:-1]], lasts, strict=True)]
    return [(chunk, part) for chunk, part in zip(chunks, parts, strict=True) if part.stop > part.start]


def _is_range(index: Tensor) -> bool:
    return bool((index == torch.arange(len(index), device=index.device)).all())


def _add(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum() if parts else torch.zeros(())
