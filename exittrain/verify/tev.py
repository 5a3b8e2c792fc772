"""`tev`: one draw of the exit node, one draw of the bonus, no walk (tree-exit verification; math.md section 2).

Shapes: B trees, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from exittrain.law.probabilities import Rows
from exittrain.law.sampling import Sampling
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.base import BatchVerdict, Generators
from exittrain.verify.draws import Uniform, pick, pick_rows, uniforms
from exittrain.verify.exits import Exit
from exittrain.verify.fixed import FixedVerifier, RowReader
from exittrain.verify.fixed_batch import fixed_exits, rows_left


class Tev(FixedVerifier):
    """Exit v with w(v) = P(v) rho(v), then the bonus from p_v without v's children."""

    name = "tev"

    def exits(self, tree: DraftTree, rows: Rows) -> Iterator[Exit]:
        reach, left, miss = _node_terms(tree, rows)
        for node in np.flatnonzero(reach * miss):
            yield Exit(int(node), reach[node] * miss[node], left[node] / miss[node])

    def draw(self, tree: DraftTree, rows: RowReader, uniform: Uniform) -> tuple[int, int]:
        reach, left, miss = _node_terms(tree, np.stack([rows[node] for node in range(tree.num_nodes + 1)]))
        node = pick(reach * miss, uniform())
        return node, pick(left[node], uniform())

    def verify_batch(
        self,
        trees: TreeBatch,
        target_logits: Tensor,
        sampling: Sampling,
        generators: Generators,
        draft_rows: DraftRows | None = None,
    ) -> BatchVerdict:
        """All trees at once, twins merged; nodes are numbered as in the trees given. Only the exits' rows are drawn
        from."""
        self.check(trees.drawn)
        draws = uniforms(len(trees), generators, sampling).to(target_logits.device)
        law = fixed_exits(trees, target_logits, sampling)
        exits = pick_rows(law.exits, draws[:, 0])
        bonus = pick_rows(rows_left(law, exits, target_logits, sampling), draws[:, 1])
        return BatchVerdict(law.kept.gather(1, exits[:, None])[:, 0], bonus)


def _node_terms(tree: DraftTree, rows: Rows) -> tuple[Rows, Rows, Rows]:
    """reach [N+1], rows without the children [N+1, V], and what they sum to (the miss) [N+1], of one tree."""
    parents, tokens = tree.parents.numpy()[1:], tree.token_ids.numpy()[1:]
    reach: list[Any] = [1]
    for parent, edge in zip(parents, rows[parents, tokens], strict=True):
        reach.append(reach[parent] * edge)
    left = rows.copy()
    left[parents, tokens] = 0
    return np.array(reach, dtype=rows.dtype), left, left.sum(axis=1)
