"""Best-first growth, level by level and all contexts at once: the one engine of `best_first`, `beam` and `oracle`.

A pool holds each tree's best N candidates so far in the order (score, then parent's place, then token id), which is
the order in which a heap would pop them. Every wave runs the pool's nodes of one depth through the session and merges
their children in. The pool only fills up with better nodes, so a node once pushed out never returns, and neither do its
children: what stands at the end is exactly the heap's tree.

Shapes: B contexts, M = N+1 places in the pool (0 is the root), W nodes of a wave, K children looked at per node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exittrain.build.base import Draft, DraftSession
from exittrain.law.ranking import top_tokens
from exittrain.tree.batch import TreeBatch


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidates [B, P] in order. scores: cumulative log q, float64, -inf = none; parents: places in the pool."""

    scores: Tensor
    parents: Tensor
    tokens: Tensor
    depths: Tensor
    slots: Tensor
    logprobs: Tensor

    def take(self, order: Tensor) -> Pool:
        return Pool(*(getattr(self, name).gather(1, order) for name in self.__dataclass_fields__))

    def join(self, other: Pool) -> Pool:
        return Pool(*(torch.cat([getattr(self, n), getattr(other, n)], 1) for n in self.__dataclass_fields__))


def grow(session: DraftSession, budget: int, depth: int, width: int, beam: int | None = None) -> Draft:
    """The `budget` best prefixes of at most `depth` tokens, each among the `width` best children of its parent.

    beam: at most this many nodes of a level are expanded; None: all that stand in the pool.
    Nodes come in the pool's order, so the first n of a tree are the tree of budget n.
    """
    roots = session.root_tokens
    logprobs = session.root()[:, None]
    frontier = torch.zeros(len(roots), 1, dtype=torch.int64, device=roots.device)
    in_use = torch.ones_like(frontier, dtype=torch.bool)
    pool, seen = _root_pool(roots), 0
    for level in range(1, depth + 1):
        pool = _merge(pool, _children(pool, frontier, in_use, logprobs, width), budget)
        if level == depth:
            break
        frontier, in_use = _frontier(pool, level, budget, beam)
        num_wave = frontier.shape[1]
        if num_wave == 0:
            break
        parent_slots = pool.slots.gather(1, pool.parents.gather(1, frontier).clamp(min=0))  # padding may name the root
        logprobs = session.expand(parent_slots, pool.tokens.gather(1, frontier), in_use)
        wave = torch.arange(seen + 1, seen + num_wave + 1, device=roots.device).expand_as(frontier)
        slots = pool.slots.scatter(1, frontier, torch.where(in_use, wave, pool.slots.gather(1, frontier)))
        pool, seen = replace(pool, slots=slots), seen + num_wave
    return _draft(pool)


def _root_pool(roots: Tensor) -> Pool:
    zero = torch.zeros(len(roots), 1, dtype=torch.int64, device=roots.device)
    return Pool(zero.double(), zero - 1, roots[:, None].long(), zero, zero, zero.float())


def _children(pool: Pool, frontier: Tensor, in_use: Tensor, logprobs: Tensor, width: int) -> Pool:
    """The candidates [B, W*K] below the frontier [B, W], from its log-probabilities [B, W, V]."""
    values, tokens = top_tokens(logprobs, width)
    values = torch.where(in_use[..., None], values, -torch.inf)
    shape = (len(frontier), -1)
    scores = pool.scores.gather(1, frontier)[..., None] + values.double()
    places = frontier[..., None].expand_as(tokens).reshape(shape)
    depths = pool.depths.gather(1, places) + 1
    return Pool(
        scores.reshape(shape), places, tokens.reshape(shape), depths, torch.full_like(places, -1), values.reshape(shape)
    )


def _merge(pool: Pool, new: Pool, budget: int) -> Pool:
    """The best budget + 1 of both, in order; parents renumbered to their new places."""
    both = pool.join(new)
    # Siblings already stand in token order where they tie, and stable sorts keep them so.
    order = both.parents.argsort(dim=1, stable=True)
    order = order.gather(1, both.scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
    best = both.take(order[:, : budget + 1])
    place_of = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    parents = torch.where(best.parents < 0, -1, place_of.gather(1, best.parents.clamp(min=0)))
    return replace(best, parents=torch.where(best.scores > -torch.inf, parents, 0))


def _frontier(pool: Pool, level: int, budget: int, beam: int | None) -> tuple[Tensor, Tensor]:
    """Places [B, W] of the nodes to expand, in order, and which of them are in use; W is the widest tree's count."""
    chosen = (pool.depths == level) & (pool.scores > -torch.inf)
    chosen[:, budget:] = False  # children of the last place would come after it, and there is no room
    if beam is not None:
        chosen &= chosen.cumsum(1) <= beam
    num_wave = int(chosen.sum(1).max())
    places = chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :num_wave]
    return places, chosen.gather(1, places)


def _draft(pool: Pool) -> Draft:
    valid = pool.scores > -torch.inf
    size = int(valid.sum(1).max())
    valid, pool = valid[:, :size], Pool(*(getattr(pool, name)[:, :size] for name in pool.__dataclass_fields__))
    zero = torch.zeros_like(pool.tokens)
    trees = TreeBatch(
        torch.where(valid, pool.tokens, zero),
        torch.where(valid, pool.parents, zero),
        torch.where(valid, pool.depths, zero),
        valid,
        drawn="top",
        draft_logprobs=torch.where(valid, pool.logprobs, 0.0),
    )
    return Draft(trees, torch.where(valid, pool.slots, -1))
