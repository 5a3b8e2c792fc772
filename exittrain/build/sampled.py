"""Sampled trees: a fixed shape whose children are drawn from the drafter's own distribution (math.md sections 3 and 6).

The shape is fixed before the first draw, the draw order is kept, and what was drawn from is recorded: the three things
without which `rrs`, `rrs_wor`, `traversal` and `block` are biased.
Shapes: B contexts, N drafted nodes of the shape, W nodes of a wave, P of them in use over all contexts, K children at
most, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exittrain.build.base import Draft, DraftSession, TreeShape
from exittrain.build.fill import Path, Wave, fill_shape
from exittrain.build.static import rank_paths
from exittrain.errors import InputError
from exittrain.tree.draft_rows import DraftRows
from exittrain.verify.draws import pick_rows

MAX_WEIGHTS = 2**24  # float64 weights in memory at once: rows of a wide wave are drawn from in turn


@dataclass(frozen=True)
class SampledBuilder:
    """`sampled_iid` and `sampled_wor`: any static shape (`rank_paths`), a child's rank being its place in draw order.

    drawn: "iid" (SpecInfer, arXiv 2305.09781; twins stay separate children and may have children of their own) or
    "without_replacement" (Sequoia, arXiv 2402.12374: a drawn token's weight becomes 0 and the rest is drawn from as it
    stands). Where fewer than k tokens have probability the missing children are left out, with all below them.
    """

    name: str
    drawn: str

    def __call__(
        self, session: DraftSession, shape: TreeShape, generators: Sequence[torch.Generator] | None = None
    ) -> Draft:
        """One tree a context, from one uniform a node of the shape, taken from the context's own generator up front: a
        tree depends on no neighbour, and how far a generator moves on is a function of the shape alone.

        draft_logprobs are log q under the whole recorded row, also without replacement (not renormalised after the
        draws before). Raises InputError without one generator a context, on ranks with gaps, and as `rank_paths`.
        """
        paths = gapless_paths(shape)
        draws = _Draws(self._uniforms(generators, len(session.root_tokens), len(paths) - 1), self.drawn == "iid")
        draft, places = fill_shape(session, paths, self.drawn, draws.fill)
        rows = draws.rows().select(torch.arange(len(places), device=places.device), places)
        return replace(draft, draft_rows=rows)

    def _uniforms(self, generators: Sequence[torch.Generator] | None, num_contexts: int, num_nodes: int) -> Tensor:
        if generators is None:
            raise InputError(f"{self.name} draws its trees: give it generators, one torch.Generator a context")
        if len(generators) != num_contexts:
            raise InputError(f"{self.name} needs one generator a context: {len(generators)} for {num_contexts}")
        draws = [torch.rand(num_nodes, dtype=torch.float64, generator=g, device=g.device).cpu() for g in generators]
        return torch.stack(draws) if draws else torch.zeros((0, num_nodes), dtype=torch.float64)


def gapless_paths(shape: TreeShape) -> list[Path]:
    """`rank_paths(shape)`; InputError where a rank is left out: there is no second draw without a first."""
    paths = rank_paths(shape)
    known = set(paths)
    for path in paths[1:]:
        elder = (*path[:-1], path[-1] - 1)
        if path[-1] > 0 and elder not in known:
            raise InputError(
                f"sampled shape: {list(path)} needs its elder sibling {list(elder)}; ranks count the draws in order"
            )
    return paths


class _Draws:
    """The `Fill` that draws, from uniforms [B, N], and keeps each wave's rows as they were drawn from."""

    def __init__(self, uniforms: Tensor, replaced: bool) -> None:
        self._uniforms, self._replaced = uniforms, replaced
        self._row_of = torch.full((len(uniforms), uniforms.shape[1] + 1), -1)
        self._probs: list[Tensor] = []
        self._seen = 0

    def fill(self, logprobs: Tensor, wave: Wave) -> tuple[Tensor, Tensor]:
        logs = logprobs[wave.in_use]
        probs = logs.exp()  # [P, V] float32
        self._record(probs, wave)
        uniforms = self._uniforms.to(probs.device)[:, [child - 1 for child in wave.children]]
        grid = (*wave.in_use.shape, max(wave.ranks) + 1)  # [B, W, K]: a node's children are the first of its K
        draws = torch.zeros(grid, dtype=torch.float64, device=probs.device)
        draws[:, wave.rows, wave.ranks] = uniforms
        found, weights = draw_tokens(probs, draws[wave.in_use], self._replaced)
        tokens = torch.zeros(grid, dtype=torch.int64, device=probs.device)
        values = torch.full(grid, -torch.inf, device=probs.device)
        tokens[wave.in_use] = found
        values[wave.in_use] = torch.where(weights > 0, logs.gather(1, found), -torch.inf)
        return tokens[:, wave.rows, wave.ranks], values[:, wave.rows, wave.ranks]

    def rows(self) -> DraftRows:
        """Of every node with children that exists; row_of is by place in the shape."""
        probs = torch.cat(self._probs)
        return DraftRows(probs, self._row_of.to(probs.device))

    def _record(self, probs: Tensor, wave: Wave) -> None:
        index = torch.full(wave.in_use.shape, -1)
        index[wave.in_use.cpu()] = torch.arange(self._seen, self._seen + len(probs))
        self._row_of[:, wave.nodes] = index
        self._probs.append(probs)
        self._seen += len(probs)


def draw_tokens(probs: Tensor, uniforms: Tensor, replaced: bool) -> tuple[Tensor, Tensor]:
    """tokens [P, K] from rows probs [P, V] by uniforms [P, K] (inverse CDF in float64), and each one's weight as drawn.

    Not replaced: a drawn token's weight becomes 0 before the next draw. Weight 0: the row had no token left.
    """
    tokens, found = torch.zeros(uniforms.shape, dtype=torch.int64, device=probs.device), torch.zeros_like(uniforms)
    step = max(1, MAX_WEIGHTS // probs.shape[1])
    for start in range(0, len(probs), step):
        part = slice(start, start + step)
        weights = probs[part].double()
        for k in range(uniforms.shape[1]):
            picked = pick_rows(weights, uniforms[part, k])[:, None]
            tokens[part, k], found[part, k] = picked[:, 0], weights.gather(1, picked)[:, 0]
            if not replaced:
                weights.scatter_(1, picked, 0.0)
    return tokens, found


build_sampled_iid = SampledBuilder("sampled_iid", "iid")
build_sampled_wor = SampledBuilder("sampled_wor", "without_replacement")
