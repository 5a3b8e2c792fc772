"""Which sequences and anchors a step trains on: functions of (seed, step), so that resuming needs no sampler state.

Shapes: S sequences, b sequences of one step's batch, R anchors over all of them, L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.seeding import generator_for

BUCKET = 16  # batches whose sequences are sorted by length together, so that little is padding


@dataclass(frozen=True, eq=False)
class SequenceSet:
    """S sequences: ids; tokens: 1-D int64 each; trained: 1-D bool each, True where the token is a trained response
    token (predicted from the position before it); num_dropped: rows that had no trained token at all."""

    ids: list[str]
    tokens: list[Tensor]
    trained: list[Tensor]
    num_dropped: int = 0
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", [len(tokens) for tokens in self.tokens])

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], name: str = "the data") -> SequenceSet:
        """From the data stage's rows. The first token is never trained: nothing precedes it.

        Raises:
            InputError: lengths of tokens and mask differ (the row is named), or no row has a trained token.
        """
        ids, tokens, trained = [], [], []
        for row in rows:
            sequence, mask = torch.tensor(row["token_ids"], dtype=torch.int64), torch.tensor(row["loss_mask"]).bool()
            if sequence.shape != mask.shape:
                raise InputError(
                    f"sequence {row['sequence_id']!r} has {len(sequence)} tokens but a loss mask of {len(mask)}"
                )
            mask[:1] = False
            if bool(mask.any()):
                ids.append(str(row["sequence_id"]))
                tokens.append(sequence)
                trained.append(mask)
        if not ids:
            raise InputError(f"{name} has no sequence with a trained token: nothing to learn from")
        return cls(ids, tokens, trained, len(rows) - len(ids))

    def select(self, indices: Sequence[int]) -> SequenceSet:
        """The sequences at `indices`, in that order."""
        return SequenceSet(
            [self.ids[i] for i in indices], [self.tokens[i] for i in indices], [self.trained[i] for i in indices]
        )

    def anchor_mask(self, index: int, max_anchor: int) -> Tensor:
        """1-D bool: positions whose next token is a trained one, none beyond max_anchor, nor the first: an EAGLE head
        has nothing to read there, and all drafters are compared at the same anchors."""
        mask = self.trained[index].roll(-1)
        mask[0] = mask[-1] = False
        mask[max(max_anchor + 1, 0) :] = False
        return mask


@lru_cache(maxsize=4)
def _epoch(lengths: tuple[int, ...], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    generator = generator_for(seed, "order", epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    size, batches = _bucket(len(lengths), batch_size), []
    for start in range(0, len(order), size):
        bucket = sorted(order[start : start + size], key=lambda i: lengths[i])
        batches += [bucket[i : i + batch_size] for i in range(0, len(bucket), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _bucket(count: int, batch_size: int) -> int:
    """A whole number of batches, few enough that an epoch has several buckets: else all epochs had the same batches."""
    return batch_size * max(1, min(BUCKET, count // (4 * batch_size)))


def batch_at(lengths: tuple[int, ...], batch_size: int, seed: int, step: int) -> list[int]:
    """Indices of the sequences of optimiser step `step` (0-based). Each epoch sees every sequence once, batches of like
    length together; the last batch of an epoch may be smaller."""
    per_epoch = -(-len(lengths) // batch_size)
    return _epoch(lengths, batch_size, seed, step // per_epoch)[step % per_epoch]


def choose_anchors(masks: Sequence[Tensor], per_sequence: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most `per_sequence` anchors of each sequence, uniformly without replacement.

    masks: allowed positions of each sequence (1-D bool). Returns (tree_sequence [R], anchors [R]), ascending.
    """
    allowed = torch.nn.utils.rnn.pad_sequence(list(masks), batch_first=True)
    scores = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1.0)
    values, positions = scores.topk(min(per_sequence, allowed.shape[1]), dim=1)
    positions, order = positions.sort(dim=1)
    chosen = values.gather(1, order) >= 0
    tree_sequence, column = chosen.nonzero(as_tuple=True)
    return tree_sequence, positions[tree_sequence, column]


@dataclass(frozen=True, eq=False)
class Plan:
    """One step's batch before it is split: indices [b] into the set; tree_sequence [R] into `indices`; anchors [R];
    stored [R]: rows of the stored trees, when they are not drawn."""

    indices: list[int]
    tree_sequence: Tensor
    anchors: Tensor
    stored: Tensor | None = None

    def share(self, members: Sequence[int]) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """What these members of the batch get: (indices, tree_sequence into them, anchors, rows [R'] of the plan)."""
        place = torch.full((max(len(self.indices), 1),), -1)
        place[torch.tensor(members, dtype=torch.int64)] = torch.arange(len(members))
        local = place[self.tree_sequence]
        rows = (local >= 0).nonzero().flatten()
        return [self.indices[i] for i in members], local[rows], self.anchors[rows], rows


def micro_batches(num_sequences: int, num_micro: int, rank: int, world_size: int) -> list[list[int]]:
    """Members of this rank's `num_micro` micro-batches of a batch of `num_sequences`; some may be empty."""
    own = list(range(rank, num_sequences, world_size))
    size = -(-len(range(0, num_sequences, world_size)) // num_micro)
    return [own[i * size : (i + 1) * size] for i in range(num_micro)]
