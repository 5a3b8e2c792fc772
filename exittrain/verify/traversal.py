"""`traversal`: leaf to root, a whole path at a time (Traversal Verification, arXiv 2505.12398; math.md section 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exittrain.law.probabilities import Rows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.exits import Exit, children_of
from exittrain.verify.rejections import Floats, Tries, traversed_exits
from exittrain.verify.sampled import SampledVerifier, acceptance, rejected


class Traversal(SampledVerifier):
    """The first leaf is accepted with its acc; else it goes, its parent's acc, p and q change, so up to the root."""

    name = "traversal"
    drawn = ("iid", "without_replacement")
    inherited = True

    def exits(self, tree: DraftTree, target_rows: Rows, draft_rows: Rows) -> Iterator[Exit]:
        parents, tokens, live = tree.parents.tolist(), tree.token_ids.tolist(), children_of(tree)
        target, draft = list(target_rows), list(draft_rows)
        acc: list[Any] = [1] * len(parents)

        def accept_below(top: int) -> None:
            pending = [top]
            while pending:
                node = pending.pop()
                for child in live[node]:
                    acc[child] = acceptance(acc[node], target[node], draft[node], tokens[child])
                pending += live[node]

        accept_below(0)
        waiting: Any = 1
        while True:
            node = 0
            while live[node]:
                node = live[node][0]
            yield Exit(node, waiting * acc[node], target[node])
            if node == 0:
                return
            waiting = waiting * (1 - acc[node])
            above = parents[node]
            live[above].remove(node)
            acc[above], target[above], draft[above] = rejected(
                acc[above], target[above], draft[above], tokens[node], tree.drawn
            )
            acc[0] = 1
            accept_below(above)

    def exits_of(self, tries: Tries, width: int) -> Floats:
        return traversed_exits(tries, width)
