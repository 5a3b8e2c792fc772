"""`residual`: children tried one after the other against what is left of the target (math.md section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exittrain.law.probabilities import Rows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.draws import Uniform, pick
from exittrain.verify.exits import Exit, children_of
from exittrain.verify.fixed import FixedVerifier, RowReader


class Residual(FixedVerifier):
    """At each node a child of token x is accepted with p(x); if not, p(x) becomes 0 and p is renormalised."""

    name = "residual"

    def draw(self, tree: DraftTree, rows: RowReader, uniform: Uniform) -> tuple[int, int]:
        tokens, children = tree.token_ids.tolist(), children_of(tree)
        node = 0
        while True:
            left, accepted = rows[node], None
            for child in children[node]:
                if uniform() < left[tokens[child]]:
                    accepted = child
                    break
                _reject(left, tokens[child])
            if accepted is None:
                return node, pick(left, uniform())
            node = accepted

    def exits(self, tree: DraftTree, rows: Rows) -> Iterator[Exit]:
        tokens, children = tree.token_ids.tolist(), children_of(tree)
        come: list[Any] = [1] + [0] * tree.num_nodes
        for node in range(tree.num_nodes + 1):
            left, waiting = rows[node], come[node]
            for child in children[node]:
                chance = left[tokens[child]]
                come[child] = waiting * chance
                waiting = waiting - come[child]
                if waiting <= 0:
                    break
                _reject(left, tokens[child])
            if waiting > 0:
                yield Exit(node, waiting, left)


def _reject(left: Rows, token: int) -> None:
    """p(token) <- 0, then p renormalised, in place. A certain token is never rejected, so something is left."""
    left[token] = 0
    left /= left.sum()
