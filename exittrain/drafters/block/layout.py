"""Which blocks a training forward runs, and which of their places predict what.

Token rows: blocks at drawn anchors (DFlash, arXiv 2602.06036): place k predicts the text's token at anchor + k with
weight exp(-(k - 1) / decay). Node rows: a block at every tree's anchor; one place of it predicts all nodes of a depth.

Shapes: S sequences, L tokens of the longest, A drawn anchors, R blocks, B tokens of a block, T token rows, P node rows,
Q node states, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.drafters.base import Dials, Layout, TrainingInputs
from exittrain.errors import InputError
from exittrain.models.packed import pad_rows


@dataclass(frozen=True, eq=False)
class Blocks:
    """R blocks that start with tokens roots [R] at anchors [R] of rows [R] of features [S, L, F]; token_places [T] and
    node_places [Q]: flat index (block * B + place) of the states wanted."""

    features: Tensor
    rows: Tensor
    anchors: Tensor
    roots: Tensor
    token_places: Tensor
    node_places: Tensor


def lay_out_blocks(inputs: TrainingInputs, dials: Dials, block_size: int, device: torch.device) -> Layout:
    """As `Drafter.lay_out`, with `Blocks` as inputs; an anchor has one block, whoever asks for it.

    Raises InputError where a node is wanted that lies as deep as a block's last place.
    """
    assert inputs.features is not None, "a block drafter reads the target's features"
    tokens, _ = pad_rows([sequence.to(device) for sequence in inputs.sequences])
    trained = torch.nn.utils.rnn.pad_sequence([row.to(device) for row in inputs.trained], batch_first=True)
    width = tokens.shape[1]
    drawn = _draw_anchors(inputs.trained, inputs.generators, dials.block_anchors, width).to(device)
    starts = [drawn]
    if inputs.tree_sequence is not None and inputs.anchors is not None:
        starts.append(inputs.tree_sequence.to(device) * width + inputs.anchors.to(device))
    if not any(map(len, starts)):  # one block for nothing: every parameter takes part
        starts.append(drawn.new_zeros(1))
    flat, block_of = torch.unique(torch.cat(starts), return_inverse=True)
    rows, anchors = flat // width, flat % width

    target_rows, token_places, weights = _token_rows(trained, drawn, block_of, block_size, dials.block_decay)
    node_places, node_rows = _node_rows(inputs, block_of[len(drawn) :], block_size)
    row, position = target_rows.unbind(1)
    blocks = Blocks(inputs.features.to(device), rows, anchors, tokens[rows, anchors], token_places, node_places)
    return Layout(blocks, target_rows, tokens[row, position + 1], weights, node_rows)


def _draw_anchors(
    trained: Sequence[Tensor], generators: Sequence[torch.Generator] | None, count: int, width: int
) -> Tensor:
    """[A] flat index (sequence * width + position) of at most `count` anchors a sequence, uniformly without replacement
    among the positions before a trained token. Trees play no part: a control without them trains at the same anchors.
    """
    assert generators is not None and len(generators) == len(trained), "one generator a sequence draws its anchors"
    anchors = [torch.zeros(0, dtype=torch.int64)]
    for index, (row, generator) in enumerate(zip(trained, generators, strict=True)):
        places = row[1:].nonzero().flatten().cpu()
        order = torch.randperm(len(places), generator=generator, device=generator.device).cpu()
        anchors.append(index * width + places[order[:count]])
    return torch.cat(anchors)


def _token_rows(
    trained: Tensor, drawn: Tensor, block_of: Tensor, block_size: int, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(target rows [T, 2], flat places [T], weights [T]) of drawn anchors, for those of their places that stand before
    a trained token (trained [S, L] bool)."""
    width = trained.shape[1]
    rows, anchors = (drawn // width)[:, None], (drawn % width)[:, None]
    steps = torch.arange(block_size - 1, device=drawn.device)  # of the token before the predicted one: k - 1
    positions = anchors + steps
    wanted = (positions + 1 < width) & trained[rows, (positions + 1).clamp(max=width - 1)]
    block, step = wanted.nonzero(as_tuple=True)
    target_rows = torch.stack([rows[block, 0], positions[block, step]], dim=1)
    order = (target_rows[:, 0] * width + target_rows[:, 1]).argsort(stable=True)
    places = block_of[block] * block_size + step + 1
    weights = torch.exp(-step.float() / decay)
    return target_rows[order], places[order], weights[order]


def _node_rows(inputs: TrainingInputs, block_of: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(flat places [Q], node rows [P] into them) of the wanted nodes; block_of [trees ...]: each tree's block."""
    if inputs.trees is None or inputs.places is None:
        nothing = block_of.new_zeros(0)
        return nothing, nothing
    depths, places = inputs.trees.depths.to(block_of.device), inputs.places.to(block_of.device)
    after = depths.flatten()[places] + 1
    if len(after) and int(after.max()) >= block_size:
        raise InputError(
            f"tree depth {int(after.max())} is beyond the block drafter's {block_size - 1} places: "
            f"set the tree depth to at most {block_size - 1}"
        )
    wanted = block_of[places // depths.shape[1]] * block_size + after
    node_places, node_rows = torch.unique(wanted, return_inverse=True)
    return node_places, node_rows
