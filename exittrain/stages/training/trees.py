"""Trees to train on: drawn by the current drafter, or read from the shards that `collect` wrote.

The exit law, and so every objective, is one of trees without twins: those of i.i.d. trees are merged as they are drawn.

Shapes: R trees over the sequences of a batch, M nodes with the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exittrain.build.base import DraftSession, TreeShape
from exittrain.build.registry import drawn_by, get_builder
from exittrain.drafters.base import Drafter
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import Part, generator_for
from exittrain.stages.training.sequences import SequenceSet
from exittrain.tree.batch import TreeBatch
from exittrain.tree.merge import merge_batch

MAX_TOKENS = 8192  # padded sequence tokens of one group
MAX_TREES = 1024  # trees of one group
LOGIT_BYTES = 256 << 20  # of one wave's float32 log-probabilities


def max_trees(vocab_size: int, shape: TreeShape) -> int:
    """Trees that may grow side by side: a wave of `budget` nodes a tree holds [trees, nodes, V] log-probabilities."""
    return max(1, min(MAX_TREES, LOGIT_BYTES // (4 * vocab_size * shape.budget)))


def anchor_groups(lengths: Sequence[int], tree_sequence: Tensor, most: int = MAX_TREES) -> Iterator[Tensor]:
    """Rows [R'] of the anchors, grouped so that sequences of like length share a forward and memory stays bounded."""
    members: dict[int, list[int]] = {}
    for row, sequence in enumerate(tree_sequence.tolist()):
        members.setdefault(sequence, []).append(row)
    group: list[int] = []
    num_sequences = 0
    for sequence in sorted(members, key=lambda s: (lengths[s], s)):
        rows = members[sequence]
        for piece in (rows[start : start + most] for start in range(0, len(rows), most)):
            full = (num_sequences + 1) * lengths[sequence] > MAX_TOKENS or len(group) + len(piece) > most
            if group and full:
                yield torch.tensor(group)
                group, num_sequences = [], 0
            group.extend(piece)
            num_sequences += 1
    if group:
        yield torch.tensor(group)


def group_inputs(
    sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, rows: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """(sequences of the group, which of them each tree belongs to, anchors)."""
    used, local = torch.unique(tree_sequence[rows], return_inverse=True)
    return [sequences[i] for i in used.tolist()], local, anchors[rows]


def tree_generators(builder: str, places: Iterable[tuple[str, int]], *parts: Part) -> list[torch.Generator] | None:
    """One generator a tree at (sequence id, anchor), a function of that and of `parts` alone: ranks, neighbours and
    what was drawn before do not matter. None where the builder draws nothing."""
    if drawn_by(builder) == "top":
        return None
    return [generator_for(*parts, *place) for place in places]


def grow_merged(
    session: DraftSession, shape: TreeShape, builder: str, generators: Sequence[torch.Generator] | None, rows: Tensor
) -> TreeBatch:
    """The session's trees, twins merged. generators: of all trees; rows: which of them the session's are."""
    own = None if generators is None else [generators[row] for row in rows.tolist()]
    return merge_batch(get_builder(builder)(session, shape, own).trees)[0]


@torch.no_grad()
def draw_trees(
    drafter: Drafter, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, shape: TreeShape,
    sampling: Sampling, builder: str, generators: Sequence[torch.Generator] | None = None,
) -> TreeBatch:  # fmt: skip
    """The drafter's trees at R anchors, in the order given, drawn in groups of bounded memory; twins are merged.

    generators: `tree_generators`, one an anchor. Raises InputError where a sampled builder gets none.
    """
    groups, drawn = [], []
    most = max_trees(drafter.vocab_size, shape)
    for rows in anchor_groups([len(s) for s in sequences], tree_sequence, most):
        session = drafter.session(*group_inputs(sequences, tree_sequence, anchors, rows), sampling)
        groups.append(rows)
        drawn.append(grow_merged(session, shape, builder, generators, rows))
    return join_trees(drawn, groups)


def join_trees(parts: Sequence[TreeBatch], rows: Sequence[Tensor]) -> TreeBatch:
    """One batch of all parts, part i's trees at places rows[i]."""
    count, size = sum(len(part) for part in parts), max((part.token_ids.shape[1] for part in parts), default=1)
    order = torch.cat(list(rows)).argsort() if rows else torch.zeros(0, dtype=torch.int64)

    def column(name: str) -> Tensor:
        padded = [torch.nn.functional.pad(v, (0, size - v.shape[1])) for v in (getattr(part, name) for part in parts)]
        return torch.cat(padded)[order.to(padded[0].device)]

    if count == 0:
        empty = torch.zeros((0, 1), dtype=torch.int64)
        return TreeBatch(empty, empty, empty, empty.bool(), None, empty.float())
    return TreeBatch(
        column("token_ids"), column("parents"), column("depths"), column("valid"),
        parts[0].drawn, column("draft_logprobs"),
    )  # fmt: skip


def take_trees(trees: TreeBatch, rows: Tensor) -> TreeBatch:
    """The trees at `rows` [R'], on their device, padding that none of them needs cut off."""
    rows = rows.to(trees.token_ids.device)
    valid = trees.valid[rows]
    size = int(valid.sum(1).max()) if len(rows) else 1
    scores = None if trees.draft_logprobs is None else trees.draft_logprobs[rows, :size]
    return TreeBatch(
        trees.token_ids[rows, :size], trees.parents[rows, :size], trees.depths[rows, :size], valid[:, :size],
        trees.drawn, scores,
    )  # fmt: skip


def move_trees(trees: TreeBatch, device: torch.device) -> TreeBatch:
    """The same trees on `device`."""
    scores = None if trees.draft_logprobs is None else trees.draft_logprobs.to(device)
    return TreeBatch(
        trees.token_ids.to(device), trees.parents.to(device), trees.depths.to(device), trees.valid.to(device),
        trees.drawn, scores,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class StoredTrees:
    """Trees from shards: trees [R], anchors [R], edge_logprobs [R, M] of the target; members[i]: the rows of the i-th
    sequence of the set. How the trees were drawn is not recorded."""

    trees: TreeBatch
    anchors: Tensor
    edge_logprobs: Tensor
    members: list[Tensor]

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]], sequences: SequenceSet, temperature: float, target_hash: str
    ) -> StoredTrees:
        """From tree records.

        Raises:
            InputError: another target's or another temperature's scores, or a tree that does not fit its sequence.
        """
        for name, value in (("target_hash", target_hash), ("temperature", temperature)):
            other = next((row[name] for row in rows if row[name] != value), None)
            if other is not None:
                raise InputError(f"the shards have {name} {other}, this arm needs {value}: collect again for it")
        index = {name: i for i, name in enumerate(sequences.ids)}
        rows = [row for row in rows if row["sequence_id"] in index]
        if not rows:
            raise InputError("no shard row belongs to a training sequence: collect again")
        for row in rows:
            if int(sequences.tokens[index[row["sequence_id"]]][row["anchor"]]) != row["token_ids"][0]:
                raise InputError(f"the tree at {row['sequence_id']}:{row['anchor']} has another root: collect again")
        place = torch.tensor([index[row["sequence_id"]] for row in rows])
        members = [(place == i).nonzero().flatten() for i in range(len(sequences))]
        trees, edges = _padded(rows)
        return cls(trees, torch.tensor([row["anchor"] for row in rows]), edges, members)

    def places(self, sequences: SequenceSet, rows: Tensor) -> list[tuple[str, int]]:
        """(sequence id, anchor) of the trees at `rows`."""
        owners = {row: i for i, members in enumerate(self.members) for row in members.tolist()}
        return [(sequences.ids[owners[row]], int(self.anchors[row])) for row in rows.tolist()]

    def choose(self, indices: Sequence[int], per_sequence: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tree_sequence [R] into `indices`, rows [R]): at most `per_sequence` stored trees of each sequence."""
        picked = [
            self.members[i][torch.randperm(len(self.members[i]), generator=generator)[:per_sequence]].sort().values
            for i in indices
        ]
        counts = torch.tensor([len(rows) for rows in picked])
        return torch.repeat_interleave(torch.arange(len(picked)), counts), torch.cat(picked)


def _padded(rows: Sequence[Mapping[str, Any]]) -> tuple[TreeBatch, Tensor]:
    def column(name: str, dtype: torch.dtype, first: list[float] | None = None) -> Tensor:
        values = [torch.tensor([*(first or []), *row[name]], dtype=dtype) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    tokens, parents, depths = (column(name, torch.int64) for name in ("token_ids", "parents", "depths"))
    valid = torch.arange(tokens.shape[1]) < torch.tensor([len(row["token_ids"]) for row in rows])[:, None]
    scores = column("draft_logprob", torch.float32, [0.0])
    trees = TreeBatch(tokens, parents, depths, valid, draft_logprobs=scores)
    return trees, column("target_logprob", torch.float64, [0.0])
