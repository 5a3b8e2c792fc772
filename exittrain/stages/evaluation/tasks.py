"""What is measured on: a run's held-out sequences, or the prompts of a benchmark, as token ids of the target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from exittrain.law.seeding import generator_for
from exittrain.stages.conversations.store import TokenSequence
from exittrain.stages.prompts import load_prompts

HELDOUT = "heldout"
Render = Callable[[list[tuple[str, str]]], list[int]]  # (role, content) turns to the prompt's ids


@dataclass(frozen=True)
class EvalPrompt:
    """id: unique in its task; token_ids: up to where the answer's first token goes."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HeldoutSequence:
    """token_ids [T]; anchors: positions whose next token is a response token, where trees may grow."""

    id: str
    token_ids: Tensor
    anchors: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, eq=False)
class Task:
    """source: which prompts these are, for tables and provenance; sequences: empty for a benchmark."""

    name: str
    prompts: tuple[EvalPrompt, ...]
    source: str
    sequences: tuple[HeldoutSequence, ...] = ()

    def fingerprint(self) -> str:
        """sha256 over ids and tokens: two tasks of one name with other prompts never share a result."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:  # every piece's key asks for it
        parts = [[p.id, p.token_ids] for p in self.prompts]
        parts += [[s.id, tuple(s.token_ids.tolist()), s.anchors] for s in self.sequences]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Context:
    """Position `anchor` of sequence `sequence` (an index): a tree's root."""

    sequence: int
    anchor: int


def heldout_task(rows: Sequence[TokenSequence], count: int | None) -> Task:
    """The run's held-out data ; the first `count` prompts are decoded, all give contexts."""
    sequences = []
    for row in rows:
        # Not the first token: an EAGLE head has nothing to read there, and all drafters are compared at one set.
        anchors = tuple(a for a in range(1, len(row.loss_mask) - 1) if row.loss_mask[a + 1])
        if anchors:
            ids = torch.tensor(row.token_ids, dtype=torch.int64)
            sequences.append(HeldoutSequence(row.sequence_id, ids, anchors, row.prompt_len))
    # A window of plain text has a prompt of one token; two are what every kind of drafter can start from.
    prompts = tuple(EvalPrompt(s.id, tuple(s.token_ids[: max(s.prompt_len, 2)].tolist())) for s in sequences)
    return Task(HELDOUT, prompts[:count], "held-out data of the run", tuple(sequences))


def benchmark_task(name: str, render: Render, count: int | None, seed: int) -> Task:
    """First turns of a benchmark or JSONL file, rendered by the target's chat template."""
    prompts = load_prompts(name, count, seed)
    rendered = tuple(EvalPrompt(p.id, tuple(render(p.messages))) for p in prompts)
    return Task(name, rendered, ", ".join(sorted({p.source for p in prompts})))


def answered(task: Task, answers: Mapping[str, Sequence[int]]) -> Task:
    """A benchmark with the target's own answers as sequences: trees may then grow anywhere in them."""
    sequences = tuple(
        HeldoutSequence(
            p.id, torch.tensor([*p.token_ids, *answers[p.id]]),
            tuple(range(len(p.token_ids) - 1, len(p.token_ids) + len(answers[p.id]) - 1)), len(p.token_ids),
        )
        for p in task.prompts
        if answers.get(p.id)
    )  # fmt: skip
    return replace(task, sequences=sequences)


def choose_contexts(
    sequences: Sequence[HeldoutSequence], count: int, seed: int, last_anchor: int | None = None
) -> list[Context]:
    """`count` contexts (all when there are fewer), spread evenly over the sequences; sorted by sequence and anchor.

    last_anchor: the last position from which a tree still fits the target's positions; None where all fit.

    Each sequence shuffles its anchors with a seed of its own and gives them in turn, so more contexts only ever add to
    fewer, and a sequence's choice does not depend on the others.
    """
    turns: list[tuple[int, int, int]] = []
    for index, sequence in enumerate(sequences):
        anchors = [anchor for anchor in sequence.anchors if last_anchor is None or anchor <= last_anchor]
        order = torch.randperm(len(anchors), generator=generator_for(seed, "eval", "contexts", sequence.id))
        turns += [(turn, index, anchors[place]) for turn, place in enumerate(order.tolist())]
    return [Context(index, anchor) for index, anchor in sorted((i, a) for _, i, a in sorted(turns)[:count])]
