"""`block`: block verification of one sampled chain (arXiv 2403.10444; math.md section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from exittrain.errors import InputError
from exittrain.law.probabilities import Rows
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.exits import Exit
from exittrain.verify.sampled import acceptance
from exittrain.verify.traversal import Traversal


class Block(Traversal):
    """One coin a node, all independent: the path ends at the last that succeeds, at the root if none does.

    acc_i is `traversal`'s; node i < L has the coin h_i = S_i / (S_i + 1 - acc_i), S_i = sum [acc_i p - q]+, and the
    bonus norm([acc_i p - q]+); the leaf has h_L = acc_L, its bonus p. That is `traversal` on a chain, whose batched
    form it takes.
    """

    name = "block"

    def check_shape(self, trees: TreeBatch) -> None:
        children = trees.child_counts()
        if bool((children > 1).any()):
            tree, node = (int(index) for index in (children > 1).nonzero()[0])
            raise InputError(
                f"verifier 'block' is made for chains, and node {node} of tree {tree} has {int(children[tree, node])} "
                "children: use traversal"
            )

    def exits(self, tree: DraftTree, target_rows: Rows, draft_rows: Rows) -> Iterator[Exit]:
        last, acc = tree.num_nodes, 1
        coins: list[tuple[Any, Rows]] = []
        for node, token in enumerate(tree.token_ids.tolist()[1:]):
            left = np.maximum(acc * target_rows[node] - draft_rows[node], 0)
            total = left.sum()
            coins.append((total / (total + (1 - acc)), left / total) if total > 0 else (0, target_rows[node]))
            acc = acceptance(acc, target_rows[node], draft_rows[node], token)
        coins.append((acc, target_rows[last]))
        failed: Any = 1
        for node in range(last, 0, -1):
            coin, bonus = coins[node]
            yield Exit(node, failed * coin, bonus)
            failed = failed * (1 - coin)
        yield Exit(0, failed, coins[0][1])
