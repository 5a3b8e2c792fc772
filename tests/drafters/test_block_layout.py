"""Which places of which blocks are trained on what."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from tiny_block import (
    IDS,
    best_first,
    blocks_of,
    inner_nodes,
    plain_block,
    tiny_block,
    training_inputs,
    with_anchors,
)
from tiny_eagle import random_ids

from exittrain.errors import InputError

# Two spans, one of them a single token; a lone last token; nothing.
TRAINED = [[0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0] * 5]


@pytest.fixture(scope="module")
def sequences():
    return random_ids(12, 6, 5)


@pytest.fixture(scope="module")
def masks():
    return [torch.tensor(row, dtype=torch.bool) for row in TRAINED]


def gradients(drafter, loss):
    drafter.module.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.module.named_parameters()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5 * max(1.0, scale), rtol=1e-4, msg=name)


def test_a_row_is_trained_if_and_only_if_its_token_is(sequences, masks):
    """Row 1: all anchors before a trained token; each of their places that predicts one, and no other."""
    drafter = with_anchors(tiny_block(), 99)
    layout = drafter.lay_out(training_inputs(drafter, sequences, masks))
    expected = Counter(
        (row, anchor, place)
        for row, mask in enumerate(TRAINED)
        for anchor in range(len(mask) - 1)
        for place in range(1, 5)
        if mask[anchor + 1] and anchor + place < len(mask) and mask[anchor + place]
    )
    found = blocks_of(layout, 5, layout.inputs.token_places)
    assert Counter(found) == expected and len(found) > 8
    assert layout.target_rows.tolist() == [[row, anchor + place - 1] for row, anchor, place in found]
    assert layout.target_rows.tolist() == sorted(layout.target_rows.tolist())
    assert layout.labels.tolist() == [int(sequences[row][anchor + place]) for row, anchor, place in found]
    weights = [math.exp(-(place - 1) / 2.0) for _, _, place in found]
    torch.testing.assert_close(layout.weights, torch.tensor(weights))
    assert layout.weights.dtype == torch.float32 and len(layout.node_rows) == 0


@pytest.mark.parametrize("ids", [None, IDS])
def test_the_gradient_is_that_of_the_trained_tokens_alone(sequences, masks, ids):
    drafter = with_anchors(tiny_block(draft_ids=ids, num_layers=2), 99)
    layout = drafter.lay_out(training_inputs(drafter, sequences, masks))
    columns = drafter.vocab_size if ids is None else len(ids)
    labels = layout.labels % columns
    logprobs = drafter.head(drafter.states(layout)[0]).log_softmax(-1)
    ours = gradients(drafter, (layout.weights * logprobs[torch.arange(len(labels)), labels]).sum())
    plain = 0.0
    for row, mask in enumerate(TRAINED):
        for anchor in range(len(mask) - 1):
            if mask[anchor + 1]:
                alone = plain_block(drafter, sequences[row], anchor).log_softmax(-1)
                for place in range(1, min(5, len(mask) - anchor)):
                    label = int(sequences[row][anchor + place]) % columns
                    plain = plain + mask[anchor + place] * math.exp(-(place - 1) / 2.0) * alone[place - 1, label]
    assert_equal(ours, gradients(drafter, plain))


@pytest.mark.parametrize("ids", [None, IDS])
def test_nodes_of_a_depth_share_a_state_and_its_gradient(sequences, masks, ids):
    """The node loss of several trees, two of them at one anchor, equals that of separate forwards block by block."""
    drafter = with_anchors(tiny_block(draft_ids=ids, num_layers=2), 3)
    rows, anchors = [0, 1, 0, 2, 0], [6, 4, 2, 0, 6]
    trees = best_first(drafter, sequences, rows, anchors, budget=11, depth=4, width=3)
    layout = drafter.lay_out(training_inputs(drafter, sequences, masks, **inner_nodes(trees, rows, anchors)))
    states = drafter.states(layout)[1]
    wanted = trees.has_children().nonzero().tolist()
    needed = {(rows[tree], anchors[tree], int(trees.depths[tree, node])) for tree, node in wanted}
    assert len(layout.node_rows) == len(wanted) > len(states) == len(needed)

    logprobs = drafter.head(states).log_softmax(-1)[layout.node_rows]
    weights = torch.arange(1.0, len(wanted) + 1)
    ours = gradients(drafter, (weights * logprobs[:, 3]).sum())
    plain = 0.0
    for weight, (tree, node) in zip(weights, wanted, strict=True):
        alone = plain_block(drafter, sequences[rows[tree]], anchors[tree]).log_softmax(-1)
        plain = plain + weight * alone[int(trees.depths[tree, node]), 3]
    assert_equal(ours, gradients(drafter, plain))


def test_anchors_are_the_same_whatever_the_trees_and_neighbours(sequences):
    drafter = with_anchors(tiny_block(), 3)
    rows, anchors = [0, 1], [5, 2]
    trees = best_first(drafter, sequences, rows, anchors, budget=5, depth=3)
    with_trees = drafter.lay_out(training_inputs(drafter, sequences, **inner_nodes(trees, rows, anchors)))
    without = drafter.lay_out(training_inputs(drafter, sequences))
    for name in ("target_rows", "labels", "weights"):
        assert torch.equal(getattr(with_trees, name), getattr(without, name))
    places = [blocks_of(layout, 5, layout.inputs.token_places) for layout in (with_trees, without)]
    assert places[0] == places[1]
    torch.testing.assert_close(drafter.states(with_trees)[0], drafter.states(without)[0], atol=1e-5, rtol=1e-5)
    alone = drafter.lay_out(training_inputs(drafter, sequences[:1]))
    assert blocks_of(alone, 5, alone.inputs.token_places) == [place for place in places[1] if place[0] == 0]


def test_anchors_are_drawn_without_replacement_and_evenly(sequences, masks):
    drafter, counts, draws = with_anchors(tiny_block(), 2), Counter(), 400
    inputs = training_inputs(drafter, sequences[:1], masks[:1])
    for seed in range(draws):
        inputs.generators[0].manual_seed(seed)
        layout = drafter.lay_out(inputs)
        chosen = {(row, anchor) for row, anchor, _ in blocks_of(layout, 5, layout.inputs.token_places)}
        assert len(chosen) == 2
        counts.update(anchor for _, anchor in chosen)
    places = [anchor for anchor in range(11) if TRAINED[0][anchor + 1]]
    assert sorted(counts) == places
    assert all(abs(counts[place] - 2 * draws / 6) < 45 for place in places)  # 4.5 standard deviations


@pytest.mark.parametrize("ids", [None, IDS])
def test_without_rows_every_parameter_still_takes_part(sequences, ids):
    """As the loss does it for a rank that has nothing to train on: a zero, but a gradient everywhere."""
    drafter = tiny_block(draft_ids=ids)
    nothing = [torch.zeros(2, dtype=torch.bool)]
    layout = drafter.lay_out(training_inputs(drafter, [sequences[0][:2]], nothing))
    token_states, node_states = drafter.states(layout)
    assert token_states.shape == node_states.shape == (0, 32) and layout.target_rows.shape == (0, 2)
    (drafter.head(token_states).sum() * 0.0).backward()
    for name, parameter in drafter.module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_what_follows_the_last_place_cannot_be_trained(sequences, masks):
    drafter = tiny_block()
    trees = best_first(drafter, sequences, [0], [3], budget=6, depth=4, width=1)
    assert trees.max_depth == 4
    wanted = inner_nodes(trees, [0], [3])
    wanted["places"] = torch.arange(5)
    with pytest.raises(InputError, match=r"tree depth 5 .* at most 4"):
        drafter.lay_out(training_inputs(drafter, sequences, masks, **wanted))
