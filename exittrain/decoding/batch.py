"""Rows decoded together: the caches they stand on and the five stages of a round.

Shapes: B rows, M = N+1 nodes with the root, D depth, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.build.base import Builder, Draft, TreeShape
from exittrain.decoding.clock import Clock, TimedSession
from exittrain.decoding.result import Round
from exittrain.decoding.row import Row
from exittrain.drafters.base import Drafter
from exittrain.law.sampling import Sampling
from exittrain.models.cache import TreeCache, pad_paths
from exittrain.models.features import LayerTap
from exittrain.models.target import TargetModel
from exittrain.tree.batch import TreeBatch
from exittrain.verify.base import Verifier, expected_block_lengths
from exittrain.verify.fixed import FixedVerifier
from exittrain.verify.registry import get_verifier


@dataclass(frozen=True)
class Plan:
    """What every round does. drafter None: plain decoding, a tree is its root alone and nothing is built."""

    target: TargetModel
    drafter: Drafter | None
    builder: Builder
    shape: TreeShape
    verifier: Verifier
    sampling: Sampling
    max_positions: int
    record_coverage: bool = False
    synchronize: bool = False


class Batch:
    """Rows on their way, all standing right before their last committed token: it is the root of the next tree.

    The target has cached everything before the root.
    """

    def __init__(self, plan: Plan, rows: list[Row]) -> None:
        self.plan, self.rows = plan, rows
        self.clock = Clock(plan.target.device, plan.synchronize)
        self._cache = TreeCache(plan.target, len(rows))
        self._tap = LayerTap(plan.target, () if plan.drafter is None else plan.drafter.feature_layers)
        prompts = [torch.tensor(row.prompt, dtype=torch.int64) for row in rows]
        with self._tap:
            self._cache.extend([prompt[:-1] for prompt in prompts])
        self._state = None if plan.drafter is None else plan.drafter.start(prompts, self._tap.take())
        self.clock.lap("score")
        for row in rows:
            row.prefill_seconds = self.clock.seconds["score"] / len(rows)

    def round(self) -> int:
        """Draft, build, score, verify, commit; rows that end leave. Returns the number of new tokens."""
        self.clock.start()
        draft = self._draft()
        with self._tap:
            logits = self.plan.target.head(self._cache.score(draft.trees))
        features = self._tap.take()
        self.clock.lap("score")
        verdict = self.plan.verifier.verify_batch(
            draft.trees, logits, self.plan.sampling, self._generators(), draft.draft_rows
        )
        nodes, bonus = verdict.nodes.tolist(), verdict.bonus_tokens.tolist()
        self.clock.lap("verify")
        expected: list[tuple[float, float]] | None = None
        if self.plan.record_coverage:
            expected = self._expected(draft, logits)
            self.clock.skip()
        return self._commit(draft, nodes, bonus, features, expected)

    def _draft(self) -> Draft:
        if self._state is None:
            roots = [row.last_token for row in self.rows]
            return roots_only(torch.tensor(roots, device=self.plan.target.device))
        session = TimedSession(self._state.session(self.plan.sampling), self.clock)
        self.clock.lap("draft")
        draft = self.plan.builder(session, self.plan.shape, self._generators())
        room = [self.plan.max_positions - row.length for row in self.rows]
        if min(room) < draft.trees.max_depth:
            draft = cut_to_depth(draft, room)
        self.clock.lap("build")
        return draft

    def _generators(self) -> list[torch.Generator]:
        return [row.generator for row in self.rows]

    def _expected(self, draft: Draft, logits: Tensor) -> list[tuple[float, float]]:
        """(coverage, the verifier's own expected block length) of each tree, given the tree."""
        trees, sampling = draft.trees, self.plan.sampling
        ceiling = get_verifier("tev").exit_probabilities(trees, logits, sampling)  # the exit law: 1 + C, twins merged
        exits = ceiling  # the law of every fixed verifier
        if not isinstance(self.plan.verifier, FixedVerifier):
            exits = self.plan.verifier.exit_probabilities(trees, logits, sampling, draft.draft_rows)
        coverage = (ceiling * trees.depths).sum(1).tolist()
        return list(zip(coverage, expected_block_lengths(exits, trees).tolist(), strict=True))

    def _commit(
        self, draft: Draft, nodes: list[int], bonus: list[int], features: Tensor | None,
        expected: list[tuple[float, float]] | None,
    ) -> int:  # fmt: skip
        trees = draft.trees
        parents, tokens, slots = torch.stack([trees.parents, trees.token_ids, draft.slots]).tolist()
        sizes = trees.valid.sum(1).tolist()
        paths = [path_to(node, parents[b]) for b, node in enumerate(nodes)]
        blocks = [[*(tokens[b][i] for i in path), bonus[b]] for b, path in enumerate(paths)]
        used = [row.take(block) for row, block in zip(self.rows, blocks, strict=True)]
        stay = [b for b, row in enumerate(self.rows) if row.finish_reason is None]
        if stay:
            self._cache.accept(paths)
            if self._state is not None:
                kept = [[slots[b][i] for i in path] for b, path in enumerate(paths)]
                self._state.advance(kept, blocks, None if features is None else along_paths(features, paths))
            if len(stay) < len(self.rows):
                self._select(stay)
        rows = self.rows
        self.rows = [rows[b] for b in stay]
        self.clock.lap("commit")
        seconds = {stage: spent / len(rows) for stage, spent in self.clock.seconds.items()}
        for b, row in enumerate(rows):
            coverage, length = (None, None) if expected is None else expected[b]
            row.rounds.append(Round(len(blocks[b]), used[b], sizes[b] - 1, coverage, length, seconds))
        return sum(used)

    def _select(self, stay: list[int]) -> None:
        index = torch.tensor(stay)
        self._cache.select_rows(index)
        if self._state is not None:
            self._state.select_rows(index)


def along_paths(features: Tensor, paths: list[list[int]]) -> Tensor:
    """[B, W, F] of features [B, M, F]: each row's root, then its path's nodes, right-padded with the root."""
    columns = pad_paths([[0, *path] for path in paths], features.device).clamp(min=0)
    return features.gather(1, columns[..., None].expand(-1, -1, features.shape[-1]))


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from depth 1 down to `node`; empty for the root."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def roots_only(roots: Tensor) -> Draft:
    """B trees of no drafted node over roots [B]."""
    zero = torch.zeros_like(roots)[:, None]
    trees = TreeBatch(roots[:, None], zero - 1, zero, zero == 0, drawn="top")
    return Draft(trees, zero)


def cut_to_depth(draft: Draft, limits: list[int]) -> Draft:
    """The trees without the nodes deeper than each row's limit: what still fits before the last position.

    A limit is known before the tree is drawn, so a sampled tree cut to it is still exactly sampled; the draft rows of
    its new leaves are read by nobody.
    """
    deepest = torch.tensor(limits, device=draft.trees.depths.device)[:, None]
    return draft.keep(draft.trees.depths <= deepest)[0]
