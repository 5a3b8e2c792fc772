"""`predraw`: a target token drawn at every node, followed while a child carries it (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exittrain.law.probabilities import Rows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.draws import Uniform, pick
from exittrain.verify.exits import Exit, children_of
from exittrain.verify.fixed import FixedVerifier, RowReader


class Predraw(FixedVerifier):
    """The token that leaves the tree is the bonus. What nodes off the walk would draw is never read, so never drawn."""

    name = "predraw"

    def draw(self, tree: DraftTree, rows: RowReader, uniform: Uniform) -> tuple[int, int]:
        tokens, children = tree.token_ids.tolist(), children_of(tree)
        node = 0
        while True:
            drawn = pick(rows[node], uniform())
            carrier = next((child for child in children[node] if tokens[child] == drawn), None)
            if carrier is None:
                return node, drawn
            node = carrier

    def exits(self, tree: DraftTree, rows: Rows) -> Iterator[Exit]:
        tokens, children = tree.token_ids.tolist(), children_of(tree)
        followed: list[Any] = [1] + [0] * tree.num_nodes  # probability that the walk comes to a node
        for node in range(tree.num_nodes + 1):
            left = rows[node].copy()
            for child in children[node]:
                followed[child] = followed[node] * rows[node][tokens[child]]
                left[tokens[child]] = 0
            miss = left.sum()
            if miss > 0:
                yield Exit(node, followed[node] * miss, left / miss)
