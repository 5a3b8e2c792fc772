"""The target's features as a head reads them (cases 62, 63, 65)."""

from __future__ import annotations

import pytest
import torch
from tiny_eagle import all_nodes, random_ids, random_trees, tiny_head, tiny_target, training_inputs, unrolled

from exittrain.errors import InputError
from exittrain.models.features import LayerTap, default_layers


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_slot_is_the_output_of_its_layer(target, layer):
    """Row 63: first, middle, last; index j is the output of decoder layer j - 1, Transformers' hidden_states[j]."""
    sequence = random_ids(9)[0]
    seen = []
    hook = target.module.model.layers[layer - 1].register_forward_hook(
        lambda module, inputs, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    plain = target.module(sequence[None], output_hidden_states=True).hidden_states[layer][0]
    hook.remove()
    drafter = tiny_head(target)
    slot = target.states(drafter.feature_layers).of(sequence)[1].unflatten(-1, (3, 32))[:, layer - 1]
    assert torch.equal(plain, seen[0].view_as(plain))
    torch.testing.assert_close(slot, plain)
    assert not torch.allclose(slot, target.states((1, 2, 3)).of(sequence)[1].unflatten(-1, (3, 32))[:, layer % 3])


def test_stored_states_give_the_models_own_law(target):
    """Row 62."""
    sequences = random_ids(12, 5, 9)
    hidden, _ = target.states((1, 2, 3)).batch(sequences)
    for row, sequence in enumerate(sequences):
        logits = target.module(sequence[None]).logits[0]
        torch.testing.assert_close(target.head(hidden[row, : len(sequence)]).softmax(-1), logits.softmax(-1))


def test_layers_that_cannot_be_read_are_refused(target):
    for layer in (0, 4, 9):
        with pytest.raises(InputError, match=f"feature layer {layer} asked of tiny: hidden states 1 to 3"):
            LayerTap(target, (1, layer))
    assert default_layers(30) == (2, 15, 27)


def forward(lengths):
    """Logits of the last of several forwards of these lengths, text and trees."""
    target = tiny_target()
    drafter = unrolled(tiny_head(target, style="qwen3", num_layers=2), 3)
    for length in lengths:
        sequences = random_ids(length, length // 2)
        fields = all_nodes(random_trees(sequences, [0, 1], [3, 2]), [0, 1], [3, 2])
        layout = drafter.lay_out(training_inputs(target, drafter, sequences, **fields))
        result = torch.cat([drafter.head(part) for part in drafter.states(layout)])
    return result.detach()


def test_forwards_of_other_lengths_leave_no_trace():
    """Row 65: lengths 12, 7, 12 against one forward of a target and a head that have run nothing else."""
    assert torch.equal(forward([12, 7, 12]), forward([12]))
