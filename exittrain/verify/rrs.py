"""`rrs`: recursive rejection sampling over i.i.d. children (SpecInfer, arXiv 2305.09781; math.md section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exittrain.law.probabilities import Rows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.exits import Exit, children_of
from exittrain.verify.rejections import Floats, Tries, walked_exits
from exittrain.verify.sampled import SampledVerifier, acceptance, rejected


class Rrs(SampledVerifier):
    """From the root down: accept child x with min(1, p(x)/q(x)); on rejection p <- norm([p - q]+), q unchanged."""

    name = "rrs"
    drawn = ("iid",)
    inherited = False

    def exits(self, tree: DraftTree, target_rows: Rows, draft_rows: Rows) -> Iterator[Exit]:
        tokens, children = tree.token_ids.tolist(), children_of(tree)
        come: list[Any] = [1] + [0] * tree.num_nodes
        for node in range(tree.num_nodes + 1):
            waiting, target, draft = come[node], target_rows[node], draft_rows[node]
            for child in children[node]:
                chance = acceptance(1, target, draft, tokens[child])
                come[child], waiting = waiting * chance, waiting * (1 - chance)
                _, target, draft = rejected(1, target, draft, tokens[child], tree.drawn)
            yield Exit(node, waiting, target)

    def exits_of(self, tries: Tries, width: int) -> Floats:
        return walked_exits(tries, width)
