"""Looking ahead wave by wave equals plain forwards, for many contexts over few cached sequences."""

from __future__ import annotations

import torch
from tiny_models import node_probs, plain_probs

from exittrain.law.sampling import Sampling
from exittrain.tree.batch import TreeBatch


def expand_by_depth(session, trees):
    """Feed whole trees level by level; yields (tree, node, log-probabilities)."""
    batch = TreeBatch.from_trees(trees)
    slots, next_slot = torch.zeros_like(batch.token_ids), 1
    for depth in range(1, batch.max_depth + 1):
        at_depth = (batch.depths == depth) & batch.valid
        width = int(at_depth.sum(1).max())
        parent_slots, tokens = torch.zeros(len(trees), width, dtype=torch.int64), torch.full((len(trees), width), 63)
        valid = torch.zeros(len(trees), width, dtype=torch.bool)
        for r in range(len(trees)):
            for place, node in enumerate(at_depth[r].nonzero().flatten().tolist()):
                parent_slots[r, place] = slots[r, batch.parents[r, node]]
                tokens[r, place], valid[r, place] = batch.token_ids[r, node], True
                slots[r, node] = next_slot + place
        logprobs = session.expand(parent_slots, tokens, valid)
        assert logprobs.dtype == torch.float32 and logprobs.shape == (len(trees), width, 64)
        for r, place in valid.nonzero().tolist():
            yield r, int((slots[r] == next_slot + place).nonzero()), logprobs[r, place]
        next_slot += width


def test_waves_equal_plain_forwards(model, forest):
    sequences, trees, rows, anchors = forest([5, 9, 14], [7, 3, 6, 0, 5, 1, 4])
    session = model.session(sequences, rows, anchors, Sampling())
    assert session.root_tokens.tolist() == [int(tree.token_ids[0]) for tree in trees]
    plain = [node_probs(model, sequences[rows[r]][: anchors[r] + 1], tree) for r, tree in enumerate(trees)]
    torch.testing.assert_close(session.root().exp(), torch.stack([p[0] for p in plain]), atol=1e-5, rtol=0)
    seen = 0
    for r, node, logprobs in expand_by_depth(session, trees):
        torch.testing.assert_close(logprobs.exp(), plain[r][node], atol=1e-5, rtol=0)
        seen += 1
    assert seen == sum(tree.num_nodes for tree in trees)


def test_sampling_is_applied(model):
    session = model.session([torch.tensor([3, 4])], torch.tensor([0]), torch.tensor([1]), Sampling(0.5, top_k=3))
    assert int(torch.isfinite(session.root()).sum()) == 3
    top = plain_probs(model, [3, 4]).topk(3).indices.sort().values
    assert torch.isfinite(session.root()[0]).nonzero().flatten().tolist() == top.tolist()
