"""Losses of EAGLE heads at known points: untrained, copying the target through a pruned vocabulary, and saturated."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_eagle import (
    all_nodes,
    head_config,
    random_ids,
    random_trees,
    tiny_head,
    tiny_target,
    training_inputs,
    unrolled,
)  # fmt: skip

from exittrain import decode
from exittrain.drafters.eagle.drafter import EagleDrafter
from exittrain.drafters.eagle.fresh import make_eagle
from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel

DRAFTED = torch.tensor([1, 2, 5, 6, 7, 10, 13, 14, 16, 19, 20, 21, 22])  # of 24


def target_probs(target, sequences, layout):
    """[T, V] what the target says where each token row predicts."""
    hidden = target.states((1, 2, 3)).batch(sequences)[0]
    row, position = layout.target_rows.unbind(1)
    return target.head(hidden[row, position]).softmax(-1)


def cross_entropy(drafter, states, probs):
    """-sum_x p(x) log q(x) [T], the target's mass outside of the draft vocabulary left out."""
    wanted = probs if drafter.draft_ids is None else probs[:, drafter.draft_ids]
    return -(wanted * drafter.head(states).log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize(("scale", "final_norm"), [(1.0, 1.0), (8.0, 5.0), (50.0, 5.0)])
@torch.no_grad()
def test_an_untrained_head_starts_near_the_log_of_its_vocabulary(scale, final_norm, pruned):
    """Row 72, whatever the target's output rows and final norm are; every step of the unrolling."""
    target = tiny_target(scale=scale)
    target.module.model.norm.weight.mul_(final_norm)
    ids = torch.arange(0, 48, 2) if pruned else None
    sequences = [(ids[s] if pruned else s) for s in random_ids(30, 20, vocab_size=24 if pruned else 48)]
    for seed in range(3):
        drafter = unrolled(make_eagle(target, head_config(target, None if ids is None else 24), ids, seed), 3)
        layout = drafter.lay_out(training_inputs(target, drafter, sequences))
        states = drafter.states(layout)[0]
        columns = torch.searchsorted(ids, layout.labels) if pruned else layout.labels
        losses = torch.nn.functional.cross_entropy(drafter.head(states), columns, reduction="none")
        for step in range(3):
            of_step = (layout.weights - 0.8**step).abs() < 1e-6
            assert abs(float(losses[of_step].mean()) - math.log(24 if pruned else 48)) < 1


def bigram_target():
    """Its next-token law depends on the last token alone, and never leaves DRAFTED."""
    model = make_causal_lm(24, 32, 4, 4, 48, tie_embeddings=False, max_positions=128)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embeddings, output = model.embeddings.weight, model.output.weight
        embeddings.copy_(torch.randn(embeddings.shape, generator=generator))
        embeddings[:, 0] = 1.0  # shared by all, so that rows against it are never said
        output.copy_(0.3 * torch.randn(output.shape, generator=generator))
        outside = torch.ones(24, dtype=torch.bool).index_fill(0, DRAFTED, False)
        output[outside] = 0.0
        output[outside, 0] = -1000.0
    return TargetModel(model.module.requires_grad_(False), name="bigram")


def copying_head(target):
    """A head that says what `bigram_target` says: attention looks at the own token alone and passes its embedding on.

    Queries and keys are one constant vector, so that the rotation alone decides: the nearest key, the own one, wins.
    """
    config = head_config(target, len(DRAFTED), attention_bias=True, norm_before_residual=True)
    network = EagleNetwork(config, target.embeddings)
    layer = network.layers[0]
    eye = torch.eye(32)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        layer.hidden_norm.weight.zero_()  # nothing of the features, nothing of the parent's state
        layer.self_attn.q_proj.bias.fill_(30.0)
        layer.self_attn.k_proj.bias.fill_(30.0)
        layer.self_attn.v_proj.weight.copy_(torch.cat([eye, 0 * eye], dim=1))
        layer.self_attn.o_proj.weight.copy_(eye)
        network.lm_head.weight.copy_(target.output.weight[DRAFTED])
    return EagleDrafter(network, target, DRAFTED)


@torch.no_grad()
def test_a_copy_through_a_draft_vocabulary_costs_the_targets_entropy():
    """Rows 24 and 26: D < V, and the columns are not the ids."""
    target = bigram_target()
    drafter = unrolled(copying_head(target), 3)
    sequences, rows, anchors = [DRAFTED[s] for s in random_ids(20, 12, vocab_size=len(DRAFTED))], [0, 1, 1], [4, 3, 11]
    trees = random_trees(sequences, rows, anchors)
    for tree in trees:
        tree.token_ids[1:] %= 24
    layout = drafter.lay_out(training_inputs(target, drafter, sequences, **all_nodes(trees, rows, anchors)))
    states, nodes = drafter.states(layout)
    probs = target_probs(target, sequences, layout)
    entropy = -torch.special.xlogy(probs, probs).sum(-1)
    assert entropy.min() > 0.5 and entropy.max() < math.log(13)
    torch.testing.assert_close(cross_entropy(drafter, states, probs), entropy, atol=1e-5, rtol=1e-5)
    assert drafter.logits(states).shape == (len(states), 24)
    assert drafter.logits(states).isfinite().nonzero()[:, 1].unique().tolist() == DRAFTED.tolist()
    scored = torch.cat(
        [target.score_trees(sequences[r], [a], [tree])[0] for r, a, tree in zip(rows, anchors, trees, strict=True)]
    )
    torch.testing.assert_close(drafter.logits(nodes).softmax(-1), scored.exp(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("builder", "verifier", "branching"),
    [("sampled_wor", "traversal", "chain"), ("sampled_iid", "rrs", "chain"), ("sampled_iid", "block", "chain")],
)
def test_a_copy_is_always_accepted(builder, verifier, branching):
    target = bigram_target()
    out = decode(
        target, copying_head(target), [[5, 6, 7]] * 8, builder=builder, verifier=verifier, branching=branching,
        budget=4, depth=4, max_new_tokens=50, eos_token_ids=(),
        generator=[torch.Generator().manual_seed(seed) for seed in range(8)],
    )  # fmt: skip
    assert {r.block_length for one in out for r in one.rounds} == {5}
    assert len({tuple(one.token_ids) for one in out}) == 8 and {t for one in out for t in one.token_ids} <= {
        *DRAFTED.tolist()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_logits_keep_losses_and_gradients_finite(dtype):
    target = tiny_target()
    drafter = unrolled(tiny_head(target, range(0, 48, 2), num_layers=2), 3)
    sequences, rows, anchors = random_ids(12, 8), [0, 1], [5, 3]
    fields = all_nodes(random_trees(sequences, rows, anchors), rows, anchors)
    layout = drafter.lay_out(training_inputs(target, drafter, sequences, **fields))
    with torch.no_grad():
        drafter.network.lm_head.weight.mul_(200 / drafter.head(drafter.states(layout)[0]).abs().max())
        for parameter in drafter.network.parameters():
            parameter.data = parameter.data.to(dtype)
    states, nodes = drafter.states(layout)
    assert states.dtype == dtype and 190 < drafter.head(states).abs().max() < 210
    loss = cross_entropy(drafter, states, target_probs(target, sequences, layout)).sum()
    loss = loss + drafter.head(nodes).logsumexp(-1).sum()
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in drafter.network.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), name
