"""A model's log-probabilities at the edges of draft trees, from hidden states, a bounded chunk of rows at a time.

Shapes: R trees, M = N+1 nodes padded, P rows (nodes whose distribution is needed), E edges, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.batch import TreeBatch

CHUNK_BYTES = 64 << 20  # of float32 logits held at once
KEEP_BYTES = 256 << 20  # of float32 logits that may stay in memory for a second use

Head = Callable[[Tensor], Tensor]  # hidden [..., H] -> raw float32 logits [..., V]


@dataclass(frozen=True, eq=False)
class Edges:
    """The drafted nodes of a batch of trees as edges out of their parents' rows.

    rows [P]: flat index (tree * M + node) of every row, ascending; nodes [E]: flat index of each drafted node, in the
    order of its parent's row; row_of [E]: that row's place in `rows`, ascending; tokens [E].
    """

    rows: Tensor
    nodes: Tensor
    row_of: Tensor
    tokens: Tensor


def tree_edges(trees: TreeBatch, rows: Tensor | None = None) -> Edges:
    """Edges of all trees. rows [R, M] bool: whose distribution is wanted, default (and least): nodes with a child."""
    size = trees.token_ids.shape[1]
    wanted = trees.has_children() if rows is None else rows
    flat_rows = wanted.flatten().nonzero().flatten()
    nodes = (trees.valid & (trees.depths > 0)).flatten().nonzero().flatten()
    parents = (nodes // size) * size + trees.parents.flatten()[nodes]
    parents, order = parents.sort(stable=True)
    nodes = nodes[order]
    return Edges(flat_rows, nodes, torch.searchsorted(flat_rows, parents), trees.token_ids.flatten()[nodes])


def row_chunks(num_rows: int, vocab_size: int) -> list[tuple[int, int]]:
    """[start, stop) ranges whose float32 logits stay under CHUNK_BYTES each."""
    step = max(1, CHUNK_BYTES // (4 * vocab_size))
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def edge_chunks(edges: Edges, vocab_size: int) -> Iterator[tuple[int, int, slice]]:
    """`row_chunks` of the rows, each with the slice of edges that leave those rows."""
    chunks = row_chunks(edges.rows.numel(), vocab_size)
    if not chunks:
        return
    stops = torch.tensor([stop for _, stop in chunks], device=edges.row_of.device)
    first = 0
    for (start, stop), last in zip(chunks, torch.searchsorted(edges.row_of, stops).tolist(), strict=True):
        yield start, stop, slice(first, last)
        first = last


@dataclass(frozen=True, eq=False)
class Scores:
    """edge_logprobs [R, M] float64: log p of each node's token at its parent, 0 at roots and padding; logits [P, V]
    float32: the raw logits at `edges.rows`, where they were asked for and small enough to keep."""

    edges: Edges
    edge_logprobs: Tensor
    logits: Tensor | None


@torch.no_grad()
def score_edges(
    head: Head,
    hidden: Tensor,
    trees: TreeBatch,
    sampling: Sampling,
    vocab_size: int,
    rows: Tensor | None = None,
    keep: bool = False,
) -> Scores:
    """Log-probabilities of the drafted tokens under a model (math.md section 2: log p_par(v)(x_v)).

    hidden [R, M, H]: the model's last hidden states at the nodes. Only rows with children get logits, unless `rows`
    [R, M] bool asks for more; `keep` keeps those rows' logits if they fit KEEP_BYTES.
    """
    edges = tree_edges(trees, rows)
    flat = hidden.flatten(0, 1)
    keep = keep and edges.rows.numel() * vocab_size * 4 <= KEEP_BYTES
    values, kept = [], []
    for start, stop, part in edge_chunks(edges, vocab_size):
        logits = head(flat[edges.rows[start:stop]])
        values.append(process_logits(logits, sampling)[edges.row_of[part] - start, edges.tokens[part]])
        if keep:
            kept.append(logits)
    result = torch.zeros(trees.token_ids.numel(), dtype=torch.float64, device=hidden.device)
    if values:
        result[edges.nodes] = torch.cat(values).double()
    return Scores(edges, result.view(trees.token_ids.shape), torch.cat(kept) if kept else None)
