"""EAGLE heads made, named, saved and read back."""

from __future__ import annotations

import pytest
import torch
from tiny_eagle import head_config, random_ids, tiny_head, tiny_target, training_inputs

from exittrain.drafters.eagle.drafter import EagleDrafter
from exittrain.drafters.eagle.fresh import make_eagle
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.formats import read_head
from exittrain.errors import InputError
from exittrain.models.sums import FILES
from exittrain.models.target import TargetModel

IDS = [0, 3, 4, 9, 17, 40, 47]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def logits(drafter, target):
    layout = drafter.lay_out(training_inputs(target, drafter, random_ids(9, 6)))
    return drafter.logits(drafter.states(layout)[0])


def test_a_fresh_head_is_its_seed_and_leaves_the_global_state(target):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (make_eagle(target, head_config(target), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    assert {p.dtype for p in one.trainable_parameters()} == {torch.float32} and one.frozen_names() == ()


def test_a_fresh_head_speaks_the_targets_rows(target):
    ids = torch.tensor(IDS)
    drafter = make_eagle(target, head_config(target, len(IDS)), ids)
    assert torch.equal(drafter.network.lm_head.weight, target.output.weight[ids])
    norm = drafter.network.norm.weight / target.module.model.norm.weight
    torch.testing.assert_close(norm, norm[:1].expand(32))


def test_half_precision_targets_get_heads_in_float32(target):
    half = TargetModel(tiny_target().module.to(torch.bfloat16), name="half", verify=False)
    drafter = make_eagle(half, head_config(half))
    assert drafter.dtype == torch.float32 and logits(drafter, half).dtype == torch.float32


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "fc_bias": True, "style": "qwen3", "num_layers": 2}])
def test_saved_and_read_back_is_bit_equal(target, tmp_path, ids, flags):
    """Row 26: shape, and where known ids lie, through a file."""
    drafter = tiny_head(target, ids, **flags)
    folder = drafter.save(tmp_path / "head")
    drafter.save(folder)  # over an existing one
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", FILES, "exittrain.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]
    found = read_head(folder)
    network = EagleNetwork(found.config, target.embeddings)
    network.load_state_dict(found.tensors)
    again = EagleDrafter(network, target, found.draft_ids)
    ours, theirs = logits(drafter, target), logits(again, target)
    assert torch.equal(ours, theirs) and ours.shape[1] == 48
    assert again.fingerprint() == drafter.fingerprint()
    if ids is not None:
        states = torch.randn(3, 32)
        assert torch.equal(again.logits(states)[:, ids], drafter.head(states))
        assert again.logits(states).isneginf().sum() == 3 * (48 - len(ids))


def test_a_fingerprint_follows_weights_and_draft_ids(target):
    drafter, moved = tiny_head(target, IDS), tiny_head(target, [*IDS[:-1], 46])
    first = drafter.fingerprint()
    assert first == tiny_head(target, IDS).fingerprint() != moved.fingerprint()
    with torch.no_grad():
        drafter.network.fc.weight[0, 0] += 1e-3
    assert drafter.fingerprint() != first


def test_heads_of_other_targets_are_refused(target):
    other = tiny_target(vocab_size=40)
    with pytest.raises(InputError, match="made for vocabulary of size 48; tiny has 40"):
        EagleDrafter(EagleNetwork(head_config(target), target.embeddings), other)
    network = EagleNetwork(head_config(target, len(IDS)), target.embeddings)
    for ids in (None, [3, 4], IDS[::-1], [*IDS[:-1], 48]):
        with pytest.raises(InputError, match="d2t"):
            EagleDrafter(network, target, None if ids is None else torch.tensor(ids))


def test_a_head_with_an_id_for_every_column_needs_no_map(target):
    drafter = make_eagle(target, head_config(target), torch.arange(48))
    assert drafter.draft_ids is None and drafter.fingerprint() == make_eagle(target, head_config(target)).fingerprint()
