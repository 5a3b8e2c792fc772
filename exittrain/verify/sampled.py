"""What the sampled verifiers share: exact only on trees whose children were drawn from the drafter, in draw order.

A rule reads p (target) and q (what the children were drawn from). In rows form (numpy, float64 or Fractions) it lists
its ways out one rejection after the other, as the papers write it; in batched form it weighs all nodes of all trees
side by side (`rejections.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.probabilities import Rows, checked_rows
from exittrain.law.sampling import Sampling, log_weights
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.base import BatchVerdict, Generators, Verdict
from exittrain.verify.draws import pick, pick_rows, uniform_from, uniforms
from exittrain.verify.exits import Exit, ExitRule
from exittrain.verify.rejections import Floats, Tries, try_children

# How a tree may be drawn: in words, and the builder that draws so.
WAYS_OF_DRAWING = {"iid": ("i.i.d.", "sampled_iid"), "without_replacement": ("without replacement", "sampled_wor")}


class SampledVerifier(ExitRule):
    """Exact on average over trees drawn in one of the ways in `drawn`, and biased on any other: those are refused."""

    drawn: tuple[str, ...]
    inherited: bool  # a node's acc is its own acceptance (leaf to root), or 1 (root to leaf)

    @abstractmethod
    def exits(self, tree: DraftTree, target_rows: Rows, draft_rows: Rows) -> Iterator[Exit]:
        """Every exit, those of no probability included or not. Rows of leaves in draft_rows are zeros."""

    @abstractmethod
    def exits_of(self, tries: Tries, width: int) -> Floats:
        """[B * width] exits of trees side by side from what became of each child's try."""

    def batch_exits(
        self, trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows
    ) -> tuple[Tensor, Tensor]:
        """(exits, cut), both [B, M] float64: left at v, the bonus has the law [w - cut d]+, normalised, where w is v's
        target row (`law.sampling.log_weights`, exp) and d its row of draft_rows.probs; a leaf's cut is 0."""
        shape, device = trees.parents.shape, target_logits.device
        tries = try_children(trees, target_logits, sampling, draft_rows, self.inherited)
        exits = torch.from_numpy(self.exits_of(tries, shape[1]))
        return exits.view(shape).to(device), torch.from_numpy(tries.cut).view(shape).to(device)

    def check(self, drawn: str | None) -> None:
        super().check(drawn)
        if drawn in self.drawn:
            return
        words, builders = zip(*(WAYS_OF_DRAWING[way] for way in self.drawn), strict=True)
        is_drawn = "does not say how it was drawn" if drawn is None else f"is drawn {drawn!r}"
        say = f"make it with drawn={self.drawn[0]!r} if it was, or " if drawn is None else ""
        raise InputError(
            f"verifier {self.name!r} is exact only on trees drawn {' or '.join(words)} from the drafter, and this tree "
            f"{is_drawn}: {say}use tev, predraw or residual, or the builder {' or '.join(builders)}"
        )

    def check_shape(self, trees: TreeBatch) -> None:
        """Raises InputError on trees of a shape that this rule is not made for."""
        return None

    def ways(self, tree: DraftTree, target_probs: Any, draft_probs: Any) -> tuple[DraftTree, Iterator[Exit]]:
        self.check(tree.drawn)
        self.check_shape(TreeBatch.from_trees([tree]))
        target = checked_rows(tree, target_probs)
        if draft_probs is None:
            raise InputError(
                f"verifier {self.name!r} needs draft_probs: [N+1, V], what each node's children were drawn from"
            )
        parents = np.zeros(tree.num_nodes + 1, dtype=bool)
        parents[tree.parents.numpy()[1:]] = True
        draft = checked_rows(tree, draft_probs, "draft_probs", parents)
        if draft.shape != target.shape:
            raise InputError(f"draft_probs has a vocabulary of {draft.shape[1]}; target_probs has {target.shape[1]}")
        if draft.dtype != target.dtype:
            target, draft = target.astype(np.float64), draft.astype(np.float64)
        return tree, self.exits(tree, target, draft)

    def verify(
        self, tree: DraftTree, target_probs: Any, draft_probs: Any = None, generator: torch.Generator | None = None
    ) -> Verdict:
        ways = list(self.ways(tree, target_probs, draft_probs)[1])
        uniform = uniform_from(generator)
        way = ways[pick(np.array([float(way.probability) for way in ways]), uniform())]
        return Verdict(tuple(tree.path(way.node)), pick(way.bonus.astype(np.float64), uniform()))

    def verify_batch(
        self,
        trees: TreeBatch,
        target_logits: Tensor,
        sampling: Sampling,
        generators: Generators,
        draft_rows: DraftRows | None = None,
    ) -> BatchVerdict:
        """One exit a tree from its exit law, then one bonus: two uniforms a tree, one row [V] a tree."""
        rows = self._checked(trees, target_logits, draft_rows)
        exits, cut = self.batch_exits(trees, target_logits, sampling, rows)
        draws = uniforms(len(trees), generators, sampling).to(exits.device)
        nodes = pick_rows(exits, draws[:, 0])
        at = torch.arange(len(trees), device=nodes.device)
        weights = log_weights(target_logits[at, nodes], sampling).exp().double()
        inner = (cut[at, nodes] > 0).nonzero().flatten()
        taken = rows.probs[rows.row_of[inner, nodes[inner]]] * cut[inner, nodes[inner], None]
        left = (weights[inner] - taken).clamp(min=0)
        # Nothing left is the work of rounding alone (the exit's probability is as small): the target's own law then.
        weights[inner] = torch.where(left.sum(1, keepdim=True) > 0, left, weights[inner])
        return BatchVerdict(nodes, pick_rows(weights, draws[:, 1]))

    def exit_probabilities(
        self, trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows | None = None
    ) -> Tensor:
        """Given the tree: twins of an i.i.d. tree are nodes of their own."""
        rows = self._checked(trees, target_logits, draft_rows)
        return self.batch_exits(trees, target_logits, sampling, rows)[0]

    def _checked(self, trees: TreeBatch, target_logits: Tensor, draft_rows: DraftRows | None) -> DraftRows:
        self.check(trees.drawn)
        self.check_shape(trees)
        if draft_rows is None:
            raise InputError(
                f"verifier {self.name!r} needs draft_rows: what the children were drawn from, which the builders "
                "sampled_iid and sampled_wor hand over with the trees"
            )
        if draft_rows.row_of.shape != trees.parents.shape or draft_rows.probs.shape[1] != target_logits.shape[-1]:
            raise InputError(
                f"draft_rows have row_of {tuple(draft_rows.row_of.shape)} and a vocabulary of "
                f"{draft_rows.probs.shape[1]}; these trees need {tuple(trees.parents.shape)} and "
                f"{target_logits.shape[-1]}"
            )
        return draft_rows


def acceptance(acc: Any, target: Rows, draft: Rows, token: int) -> Any:
    """min(1, acc p(x) / q(x)); 0 where q(x) = 0, as such a child was never drawn."""
    if draft[token] <= 0:
        return 0
    wanted = acc * target[token]
    return 1 if wanted >= draft[token] else wanted / draft[token]


def rejected(acc: Any, target: Rows, draft: Rows, token: int, drawn: str | None) -> tuple[Any, Rows, Rows]:
    """(acc, p, q) of a node after one of its children, of this token, was rejected (Traversal, eq. 1 to 3).

    r = [acc p - q]+;  acc <- sum r / (sum r + 1 - acc);  p <- r / sum r;  without replacement q(x) <- 0, renormalised.
    Where r is all zero acc becomes 0 and p stays. The rows given are left as they are.
    """
    left = np.maximum(acc * target - draft, 0)
    total = left.sum()
    acc, target = (total / (total + (1 - acc)), left / total) if total > 0 else (0, target)
    if drawn == "without_replacement":
        draft = draft.copy()
        draft[token] = 0
        rest = draft.sum()
        draft = draft / rest if rest > 0 else draft
    return acc, target, draft
