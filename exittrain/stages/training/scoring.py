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

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}  # of float32 logits held at once: what caches, and kernels, like
KEEP_BYTES = 256 << 20  # of float32 logits that may stay in memory for a second use

Head = Callable[[Tensor], Tensor]  # hidden [..., H] -> raw float32 logits [..., V]


@dataclass(frozen=True, eq=False)
class Edges:
    """The drafted nodes of R trees as edges out of their parents, and what a model has to be run on to score them.

    rows [P]: flat index (tree * M + node) of the nodes whose distribution is wanted, ascending; nodes [E]: flat index
    of each drafted node, in the order of its parent's row; row_of [E]: that row's place in `rows`, ascending; tokens
    [E]. inner: the trees without the nodes that are no rows (leaves: their token is read at their parent), M' wide;
    places [P]: flat index (tree * M' + node) of each row there. shape: (R, M).
    """

    rows: Tensor
    nodes: Tensor
    row_of: Tensor
    tokens: Tensor
    inner: TreeBatch
    places: Tensor
    shape: tuple[int, int]


def tree_edges(trees: TreeBatch, rows: Tensor | None = None) -> Edges:
    """Edges of all trees. rows [R, M] bool: whose distribution is wanted, default (and least): nodes with a child.

    With a node its ancestors must be wanted.
    """
    count, size = trees.token_ids.shape
    wanted = trees.has_children() if rows is None else rows
    flat_rows = wanted.flatten().nonzero().flatten()
    nodes = (trees.valid & (trees.depths > 0)).flatten().nonzero().flatten()
    parents = (nodes // size) * size + trees.parents.flatten()[nodes]
    parents, order = parents.sort(stable=True)
    nodes = nodes[order]
    inner, place = _only(trees, wanted)
    places = (flat_rows // size) * inner.token_ids.shape[1] + place.flatten()[flat_rows]
    row_of = torch.searchsorted(flat_rows, parents)
    return Edges(flat_rows, nodes, row_of, trees.token_ids.flatten()[nodes], inner, places, (count, size))


def _only(trees: TreeBatch, wanted: Tensor) -> tuple[TreeBatch, Tensor]:
    """The trees' roots and wanted nodes alone, in their order, and each node's new column [R, M]."""
    keep = trees.valid & (wanted | (trees.depths == 0))
    counts = keep.sum(1, keepdim=True)
    size = int(counts.max()) if len(trees) else 1
    order = keep.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
    valid, place = torch.arange(size, device=keep.device) < counts, keep.cumsum(1) - 1

    def taken(values: Tensor) -> Tensor:
        return torch.where(valid, values.gather(1, order), 0)

    parents = place.gather(1, taken(trees.parents).clamp(min=0))
    depths = taken(trees.depths)
    parents = torch.where(valid & (depths > 0), parents, 0)
    parents[:, 0] = -1
    return TreeBatch(taken(trees.token_ids), parents, depths, valid), place


def row_chunks(rows: Tensor, vocab_size: int, count: int | None = None) -> list[tuple[int, int]]:
    """[start, stop) ranges of the rows (or of `count` others, on the same device) whose float32 logits stay under
    CHUNK_BYTES each."""
    step = max(1, CHUNK_BYTES.get(rows.device.type, CHUNK_BYTES["cuda"]) // (4 * vocab_size))
    count = len(rows) if count is None else count
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def edge_chunks(edges: Edges, vocab_size: int) -> Iterator[tuple[int, int, slice]]:
    """`row_chunks` of the rows, each with the slice of edges that leave those rows."""
    chunks = row_chunks(edges.rows, vocab_size)
    if not chunks:
        return
    stops = torch.tensor([stop for _, stop in chunks], device=edges.row_of.device)
    first = 0
    for (start, stop), last in zip(chunks, torch.searchsorted(edges.row_of, stops).tolist(), strict=True):
        yield start, stop, slice(first, last)
        first = last


@torch.no_grad()
def score_edges(
    head: Head, hidden: Tensor, edges: Edges, sampling: Sampling, vocab_size: int, keep: bool = False
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Log-probabilities of the drafted tokens under a model (math.md section 2: log p_par(v)(x_v)).

    hidden [P, H]: the model's last hidden states at the rows. Returns [R, M] float64, 0 at roots and padding, and with
    `keep` the rows' raw logits [P, V] float32 if they fit KEEP_BYTES, else None.
    """
    keep = keep and len(hidden) * vocab_size * 4 <= KEEP_BYTES
    values, kept = [], []
    for start, stop, part in edge_chunks(edges, vocab_size):
        logits = head(hidden[start:stop])
        values.append(process_logits(logits, sampling)[edges.row_of[part] - start, edges.tokens[part]])
        if keep:
            kept.append(logits)
    count, size = edges.shape
    result = torch.zeros(count * size, dtype=torch.float64, device=hidden.device)
    if values:
        result[edges.nodes] = torch.cat(values).double()
    return result.view(edges.shape), torch.cat(kept) if kept else None
