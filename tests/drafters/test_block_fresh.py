"""Block drafters made, saved and read back; the start of training; numbers at the edge."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tiny_block import IDS, block_config, tiny_block, training_inputs, with_anchors
from tiny_eagle import random_ids, tiny_target

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.drafters.block.drafter import BlockDrafter
from exittrain.drafters.block.fresh import make_block
from exittrain.drafters.block.network import BlockNetwork
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.sums import FILES
from exittrain.models.target import TargetModel


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def tied_target():
    """As small models are: one matrix for embeddings and head, a final norm of 3."""
    model = make_causal_lm(64, 32, 4, 2, 48, seed=2)
    with torch.no_grad():
        model.module.model.embed_tokens.weight.mul_(20)
        model.module.model.norm.weight.fill_(3.0)
    return TargetModel(model.module.requires_grad_(False), name="tied")


def step_zero(drafter, lengths=(30, 20, 30)):
    """(summed loss over its rows, rows, logits) of random text, labels outside the draft vocabulary left out."""
    inputs = training_inputs(drafter, random_ids(*lengths, vocab_size=drafter.vocab_size))
    layout = drafter.lay_out(inputs)
    logits = drafter.head(drafter.states(layout)[0])
    labels = layout.labels
    if drafter.draft_ids is not None:
        known = torch.isin(labels, drafter.draft_ids)
        logits, labels = logits[known], torch.searchsorted(drafter.draft_ids, labels[known])
    return torch.nn.functional.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("make", [tiny_target, tied_target])
@pytest.mark.parametrize("size", [None, 24])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_loss_starts_near_ln_d(make, size, num_layers):
    """Row 72."""
    target = make()
    ids = None if size is None else torch.arange(size) * 2
    drafter = make_block(target, block_config(target, size, num_layers=num_layers), ids)
    loss, logits = step_zero(drafter)
    assert abs(float(loss.detach()) - math.log(size or target.vocab_size)) < 1
    assert logits.std() > 0.05  # small, but there


def test_a_fresh_drafter_is_its_seed_and_leaves_the_global_state(target):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (make_block(target, block_config(target), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    assert {p.dtype for p in one.trainable_parameters()} == {torch.float32} and one.frozen_names() == ()
    assert one.kind == "block" and one.feature_layers == (1, 3) and one.max_depth == 4


def test_a_fresh_drafter_speaks_the_targets_rows(target):
    ids = torch.tensor(IDS)
    drafter = make_block(target, block_config(target, len(IDS)), ids)
    assert torch.equal(drafter.network.lm_head.weight, target.output.weight[ids])
    norm = drafter.network.norm.weight / target.module.model.norm.weight
    torch.testing.assert_close(norm, norm[:1].expand(32))
    assert "lm_head.weight" not in make_block(target, block_config(target)).network.state_dict()


@pytest.mark.parametrize("parts", [{}, {"draft_ids": IDS, "num_layers": 2, "attention_bias": True}])
def test_saved_and_loaded_is_bit_equal(target, tmp_path, parts):
    drafter = tiny_block(target, **parts)
    folder = drafter.save(tmp_path / "drafter")
    drafter.save(folder)  # over an existing one
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", FILES, "exittrain.json", "model.safetensors"]
    again = load_drafter(folder, target)
    assert isinstance(again, BlockDrafter) and again.network.config == drafter.network.config
    assert again.fingerprint() == drafter.fingerprint() and again.target_fingerprint == target.fingerprint()
    ours, theirs = (
        one.logits(one.states(one.lay_out(training_inputs(one, random_ids(9, 6))))[0]) for one in (drafter, again)
    )
    assert ours.shape[1] == 48 and torch.equal(ours, theirs)
    if "draft_ids" in parts:
        assert ours.isfinite().any(0).nonzero().flatten().tolist() == IDS


def test_the_fingerprint_is_of_config_ids_and_weights(target):
    ids = torch.tensor(IDS)
    drafter = make_block(target, block_config(target, len(IDS)), ids)
    before = drafter.fingerprint()
    others = [
        BlockDrafter(drafter.network, target, ids + 1),
        make_block(target, block_config(target, len(IDS), mask_token_id=5), ids),
    ]
    with torch.no_grad():
        drafter.network.fc.weight[0, 0] += 1
    assert len({before, drafter.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_what_does_not_fit_the_target_is_refused(target):
    network = BlockNetwork(block_config(target, len(IDS)))
    with pytest.raises(InputError, match="vocabulary of size 48; tiny has 50"):
        BlockDrafter(network, tiny_target(50), torch.tensor(IDS))
    with pytest.raises(InputError, match="does not say which"):
        BlockDrafter(network, target)
    with pytest.raises(InputError, match="7 different ids"):
        BlockDrafter(network, target, torch.tensor(IDS[:-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [None, IDS])
def test_loss_and_gradient_stay_finite_at_extreme_logits(dtype, ids):
    drafter = with_anchors(tiny_block(tiny_target(), ids, num_layers=2), 8)
    drafter.module.to(dtype)
    with torch.no_grad():
        drafter.network.norm.weight.mul_(1e6)
    loss, logits = step_zero(drafter, (9, 1, 5))
    assert logits.abs().max() > 1e5 and loss.isfinite()
    loss.backward()
    for name, parameter in drafter.module.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("ids", [None, [0, 1, 2, 4, 7]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, top_k=5)])
def test_best_first_on_marginals_is_the_brute_force_top(ids, sampling):
    """DDTree (arXiv 2604.12989): the N prefixes of the largest products of the places' marginals."""
    drafter, depth = tiny_block(tiny_target(9), ids), 3
    prompt = random_ids(6, vocab_size=9)
    args = (prompt, torch.tensor([0]), torch.tensor([5]), sampling)
    session = drafter.session(*args)
    one = torch.ones(1, 1, dtype=torch.int64)
    marginals = [session.root()[0]] + [session.expand(one * k, one, one.bool())[0, 0] for k in range(depth - 1)]
    scores = {
        path: sum(float(marginals[k][token]) for k, token in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(9), repeat=length)
    }
    for budget in (1, 7, 40):
        draft = get_builder("best_first")(drafter.session(*args), TreeShape(budget, depth, 9))
        tree = draft.trees.trees()[0]
        paths = []
        for node in range(1, len(tree.token_ids)):
            path, at = [], node
            while at > 0:
                path.insert(0, int(tree.token_ids[at]))
                at = int(tree.parents[at])
            paths.append(tuple(path))
        best = sorted(scores.values(), reverse=True)[:budget]
        assert len(set(paths)) == budget
        torch.testing.assert_close(torch.tensor([scores[path] for path in paths]), torch.tensor(best))
