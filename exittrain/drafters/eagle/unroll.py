"""The training forward of an EAGLE head: along the text, then level by level as it will draft.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3): from column c on, which reads the true feature of position c
and the token after it, the head runs unroll_steps - 1 further steps on its own states, as it will when it drafts. Such
a step, at text tokens, is a node of a chain that grows from c; so token rows and nodes of draft trees are run by one
and the same rule: a node takes its token and its parent's state, and sees the text up to its root, its ancestors and
itself.

Shapes: S sequences, L tokens of the longest, C = L - 1 base columns (column c: token c + 1, feature of position c), R
trees, M nodes with the root, W nodes of one level in the fullest row, K columns so far, T token rows, P node rows,
H hidden, F features of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from exittrain.drafters.base import Dials, Layout, TrainingInputs
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.errors import InputError
from exittrain.models.grid import Grid
from exittrain.models.masks import additive_mask
from exittrain.models.packed import pad_rows
from exittrain.tree.batch import TreeBatch

TOO_SHORT = "an EAGLE head needs at least two tokens to draft from"


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes of one depth d: input_ids [S, W]; paths [S, W, d + 1]: the column of each one's own state, of its
    parent's, and so on up to its root's, which is a base column. A place without a node holds 0."""

    input_ids: Tensor
    paths: Tensor

    def run(self, network: EagleNetwork, known: Tensor, cache: Any) -> Tensor:
        """States [S, W, H], behind the K columns whose states are known [S, K, H]."""
        roots, width = self.paths[..., -1], known.shape[1] + self.paths.shape[1]
        visible = torch.arange(width, device=known.device) <= roots[..., None]
        mask = additive_mask(visible.scatter_(2, self.paths, True), network.dtype)
        above = known.gather(1, self.paths[..., 1, None].expand(-1, -1, known.shape[-1]))
        return network.hidden(self.input_ids, roots + self.paths.shape[-1] - 1, mask, cache, above)


@dataclass(frozen=True, eq=False)
class Branches:
    """What is run behind the base columns: levels, and the row and column [N] each of the states that are read."""

    levels: tuple[Level, ...]
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class Unroll:
    """One training forward: input_ids [S, C] and features [S, C, F] of the base columns, and what grows from them."""

    input_ids: Tensor
    features: Tensor
    text: Branches
    trees: Branches


def lay_out(inputs: TrainingInputs, dials: Dials, device: torch.device) -> Layout:
    """Arrange one micro-batch (`Drafter.lay_out`). Raises InputError for a tree at anchor 0."""
    if inputs.features is None:
        raise ValueError("an EAGLE head reads features of the target along the sequences")
    tokens, _ = pad_rows([sequence.to(device) for sequence in inputs.sequences])
    # One column at least, so that every parameter takes part even where no sequence has a second token.
    tokens = torch.nn.functional.pad(tokens, (0, max(0, 2 - tokens.shape[1])))
    shape = len(tokens), tokens.shape[1] - 1
    features = inputs.features[:, : shape[1]].to(device)

    steps = 1 if inputs.first_step else dials.unroll_steps
    row, position, step = _token_rows(inputs, steps, device)
    text = _text_branches(tokens, shape, row, position - 1 - step, step, steps)
    forward = Unroll(tokens[:, 1:], features, text, _tree_branches(inputs, shape, device))
    weights = torch.tensor(dials.unroll_decay, device=device).pow(step)
    node_rows = torch.arange(len(forward.trees.rows), device=device)
    return Layout(forward, torch.stack([row, position], 1), tokens[row, position + 1], weights, node_rows)


def states(network: EagleNetwork, forward: Unroll) -> tuple[Tensor, Tensor]:
    """(token states [T, H], node states [P, H]), differentiable."""
    cache: Any = DynamicCache()
    base = network.hidden(forward.input_ids, None, None, cache, network.fuse(forward.features))
    return _grown(network, base, cache, forward.text), _grown(network, base, cache, forward.trees)


def _grown(network: EagleNetwork, base: Tensor, cache: Any, branches: Branches) -> Tensor:
    """States [N, H] that are read of these branches; base [S, C, H] and its cache stay as they are."""
    known, own = base, DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    for level in branches.levels:
        known = torch.cat([known, level.run(network, known, own)], dim=1)
    return known[branches.rows, branches.columns]


def _token_rows(inputs: TrainingInputs, steps: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence, position and step [T] of the rows whose predicted token (position + 1) is trained, in this order.

    Step j of the row that predicts after position p grows from column p - 1 - j, which must exist.
    """
    trained = torch.nn.utils.rnn.pad_sequence(list(inputs.trained), batch_first=True).to(device)
    before = torch.arange(trained.shape[1] - 1, device=device)
    wanted = trained[:, 1:, None] & (before[:, None] > torch.arange(steps, device=device))
    row, position, step = wanted.nonzero(as_tuple=True)
    return row, position, step


def _text_branches(
    tokens: Tensor, shape: tuple[int, int], row: Tensor, column: Tensor, step: Tensor, steps: int
) -> Branches:
    """The text as chains: from each base column on, as many steps as the rows that grow from it need."""
    place = row * shape[1] + column
    deepest = torch.full((shape[0] * shape[1],), -1, device=tokens.device).scatter_reduce(0, place, step, "amax")
    roots = (deepest >= 0).nonzero()[:, 0]
    sequence, base = roots // shape[1], roots % shape[1]
    depths = torch.arange(steps, device=tokens.device).expand(len(roots), -1)
    valid = depths <= deepest[roots][:, None]
    ahead = (base[:, None] + 1 + depths) * valid
    chains = TreeBatch(tokens[sequence[:, None], ahead] * valid, (depths - 1) * valid, depths * valid, valid)
    levels, columns = _levels(chains, sequence, base, shape)
    return Branches(levels, row, columns[torch.searchsorted(roots, place), step])


def _tree_branches(inputs: TrainingInputs, shape: tuple[int, int], device: torch.device) -> Branches:
    trees, rows, anchors, places = inputs.trees, inputs.tree_sequence, inputs.anchors, inputs.places
    if trees is None or rows is None or anchors is None or places is None:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return Branches((), nothing, nothing)
    rows, anchors, places = rows.to(device), anchors.to(device), places.to(device)
    if bool((anchors < 1).any()):
        raise InputError(f"a tree at anchor 0: {TOO_SHORT}")
    levels, columns = _levels(trees, rows, anchors - 1, shape)
    size = trees.token_ids.shape[1]
    tree = places // size
    return Branches(levels, rows[tree], columns[tree, places % size])


def _levels(trees: TreeBatch, rows: Tensor, base: Tensor, shape: tuple[int, int]) -> tuple[tuple[Level, ...], Tensor]:
    """Trees over base columns base [R] of sequences rows [R], depth by depth; shape: (S, C).

    Also returns columns [R, M]: where each node's state will lie in its sequence's row (the root: its base column).
    """
    columns, parents = base[:, None].repeat(1, trees.token_ids.shape[1]), trees.parent_index()
    levels: list[Level] = []
    width = shape[1]
    for depth in range(1, trees.max_depth + 1 if len(trees) else 1):
        tree, node = (trees.valid & (trees.depths == depth)).nonzero(as_tuple=True)
        grid = Grid(rows[tree], shape[0])
        columns[tree, node] = width + grid.place
        width += grid.width
        path, above = [columns[tree, node]], node
        for _ in range(depth):
            above = parents[tree, above]
            path.append(columns[tree, above])
        levels.append(Level(grid.scatter(trees.token_ids[tree, node]), grid.scatter(torch.stack(path, 1))))
    return tuple(levels), columns
