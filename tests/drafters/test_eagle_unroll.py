"""What an EAGLE head computes in training is what it computes when it drafts (cases 64 and 1, groups C and D)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_eagle import FLAGS, all_nodes, random_ids, random_trees, tiny_head, tiny_target, training_inputs, unrolled
from transformers import DynamicCache

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.tree.draft_tree import DraftTree

STEPS = 4
EVEN = list(range(0, 48, 2))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def logprobs(drafter, states):
    """log q [N, V] as a session gives them."""
    return drafter.logits(states).log_softmax(-1)


def assert_same(ours, theirs):
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)
    torch.testing.assert_close(ours.exp(), theirs.exp(), atol=1e-5, rtol=0)
    finite = theirs > -torch.inf
    torch.testing.assert_close(ours[finite], theirs[finite], atol=1e-4, rtol=1e-5)


def drafted_along_the_text(drafter, sequences):
    """log q by (sequence, anchor, step), from one session that drafts the text's own tokens at every anchor."""
    contexts = [(s, a) for s, sequence in enumerate(sequences) for a in range(1, len(sequence))]
    rows, anchors = (torch.tensor(part) for part in zip(*contexts, strict=True))
    session = drafter.session(sequences, rows, anchors, Sampling())
    found = [session.root()]
    for step in range(1, STEPS):
        ends = torch.tensor([len(sequences[s]) for s, _ in contexts])
        valid = (anchors + step < ends)[:, None]
        tokens = [[int(sequences[s][min(a + step, len(sequences[s]) - 1)])] for s, a in contexts]
        slots = torch.full((len(contexts), 1), step - 1)
        found.append(session.expand(slots, torch.tensor(tokens), valid)[:, 0])
    return {(s, a, k): found[k][r] for r, (s, a) in enumerate(contexts) for k in range(STEPS)}


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("style", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_step_is_what_drafting_computes(target, style, num_layers, flags):
    """Row 64: step k in training against step k of a real session on the same prefix."""
    drafter = unrolled(tiny_head(target, EVEN, style=style, num_layers=num_layers, **FLAGS[flags]), STEPS)
    sequences = random_ids(11, 4, 7)
    layout = drafter.lay_out(training_inputs(target, drafter, sequences))
    ours = logprobs(drafter, drafter.states(layout)[0])
    drafted = drafted_along_the_text(drafter, sequences)
    steps = layout.weights.log().div(torch.tensor(0.8).log()).round().long().tolist()
    expected = [drafted[s, p - k, k] for (s, p), k in zip(layout.target_rows.tolist(), steps, strict=True)]
    assert {0, 1, 2, 3} == set(steps)
    assert_same(ours, torch.stack(expected))


def node_logprobs(drafter, sequences, rows, anchors, trees):
    """log q [N+1, V] of each tree, from sessions that expand one node a wave."""
    result = []
    for row, anchor, tree in zip(rows, anchors, trees, strict=True):
        session = drafter.session(sequences, torch.tensor([row]), torch.tensor([anchor]), Sampling())
        found = [session.root()[0]]
        for node in range(1, tree.num_nodes + 1):
            wave = tree.parents[node].view(1, 1), tree.token_ids[node].view(1, 1), torch.ones(1, 1, dtype=torch.bool)
            found.append(session.expand(*wave)[0, 0])
        result.append(torch.stack(found))
    return result


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("style", "flags"), [("llama", "plain"), ("qwen3", "norm output"), ("llama", "biases")])
def test_tree_nodes_are_what_drafting_computes(target, style, num_layers, flags):
    """Several trees a sequence, several sequences of different lengths, none on one of them; text rows beside them."""
    more = {"mlp_bias": True} if style == "llama" else {}
    drafter = tiny_head(target, EVEN, style=style, num_layers=num_layers, **FLAGS[flags], **more)
    sequences, rows, anchors = random_ids(11, 4, 7, 5), [0, 0, 0, 1, 3, 3], [1, 10, 4, 2, 4, 1]
    trees = random_trees(sequences, rows, anchors)
    layout = drafter.lay_out(training_inputs(target, drafter, sequences, **all_nodes(trees, rows, anchors)))
    text, nodes = drafter.states(layout)
    ours = logprobs(drafter, nodes)[layout.node_rows]
    assert_same(ours, torch.cat(node_logprobs(drafter, sequences, rows, anchors, trees)))
    alone = drafter.states(drafter.lay_out(training_inputs(target, drafter, sequences)))[0]
    torch.testing.assert_close(text, alone, atol=1e-5, rtol=1e-5)


def test_only_wanted_nodes_are_read_in_their_order(target):
    drafter, sequences = tiny_head(target), random_ids(9, 6)
    rows, anchors = [0, 1, 0], [3, 5, 8]
    fields = all_nodes(random_trees(sequences, rows, anchors), rows, anchors)
    every = drafter.states(drafter.lay_out(training_inputs(target, drafter, sequences, **fields)))[1]
    some = torch.arange(1, len(every), 3)
    fewer = drafter.lay_out(training_inputs(target, drafter, sequences, **fields | {"places": fields["places"][some]}))
    torch.testing.assert_close(drafter.states(fewer)[1], every[some])


def path_state(drafter, features, sequence, anchor, tokens):
    """The state [H] at the end of one path, by the network alone, a token a call."""
    network, cache = drafter.network, DynamicCache()
    base = network.hidden(sequence[None, 1 : anchor + 1], None, None, cache, network.fuse(features[None, :anchor]))
    state = base[:, -1:]
    for step, token in enumerate(tokens):
        mask = torch.zeros(1, 1, 1, anchor + step + 1)
        state = network.hidden(token.view(1, 1), torch.tensor([[anchor + step]]), mask, cache, state)
    return state[0, 0]


@pytest.mark.parametrize(("style", "num_layers"), [("llama", 1), ("qwen3", 2)])
def test_gradients_of_trees_are_those_of_their_paths(target, style, num_layers):
    drafter = tiny_head(target, style=style, num_layers=num_layers, fc_norm=True)
    sequences, rows, anchors = random_ids(9, 6), [0, 0, 1, 1], [2, 7, 5, 1]
    trees = random_trees(sequences, rows, anchors)
    inputs = training_inputs(target, drafter, sequences, **all_nodes(trees, rows, anchors))
    parameters = list(drafter.trainable_parameters())
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(sum(t.num_nodes + 1 for t in trees), drafter.network.hidden_size, generator=generator)

    def gradients(loss):
        return torch.autograd.grad(loss, parameters, allow_unused=True)  # norm and lm_head come with `head`

    packed = gradients((drafter.states(drafter.lay_out(inputs))[1] * weights).sum())
    summed = [torch.zeros_like(p) for p in parameters]
    paths = [(r, node) for r, tree in enumerate(trees) for node in range(tree.num_nodes + 1)]
    for (r, node), weight in zip(paths, weights, strict=True):
        tokens = trees[r].token_ids[trees[r].path(node)]
        state = path_state(drafter, inputs.features[rows[r]], sequences[rows[r]], anchors[r], tokens)
        for total, part in zip(summed, gradients((state * weight).sum()), strict=True):
            total += 0 if part is None else part
    for ours, theirs in zip(packed, summed, strict=True):
        ours = torch.zeros_like(theirs) if ours is None else ours
        torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_are_those_whose_predicted_token_is_trained(target, steps):
    """Row 1: two spans, a span of one token, a batch of two. No row could predict the first two tokens."""
    drafter = unrolled(tiny_head(target), steps, 0.5)
    spans = ["0001111001", "110001"]
    trained = [torch.tensor([c == "1" for c in span]) for span in spans]
    sequences = random_ids(10, 6)
    layout = drafter.lay_out(training_inputs(target, drafter, sequences, trained))
    rows = [
        (s, token - 1, step)
        for s, span in enumerate(spans) for token in range(len(span)) for step in range(steps)
        if span[token] == "1" and token - 2 - step >= 0
    ]  # fmt: skip
    assert layout.target_rows.tolist() == [[s, p] for s, p, _ in rows]
    assert layout.labels.tolist() == [int(sequences[s][p + 1]) for s, p, _ in rows]
    assert layout.weights.dtype == torch.float32 and layout.weights.tolist() == [0.5**step for _, _, step in rows]
    assert layout.target_rows.dtype == layout.labels.dtype == torch.int64


def test_the_first_step_alone_is_that_of_all_steps(target):
    """Token rows of step 0 and their states, the trees as ever."""
    drafter, sequences = unrolled(tiny_head(target), 3), random_ids(9, 6)
    inputs = training_inputs(target, drafter, sequences, **all_nodes(random_trees(sequences, [1], [3]), [1], [3]))
    whole, first = drafter.lay_out(inputs), drafter.lay_out(replace(inputs, first_step=True))
    of_first = whole.weights == 1
    assert first.weights.tolist() == [1.0] * int(of_first.sum()) and len(first.weights) < len(whole.weights)
    assert torch.equal(first.target_rows, whole.target_rows[of_first])
    (tokens, nodes), (all_tokens, all_nodes_) = drafter.states(first), drafter.states(whole)
    assert torch.equal(tokens, all_tokens[of_first])
    torch.testing.assert_close(nodes, all_nodes_)


def test_gradient_reaches_a_base_row_iff_its_token_is_trained(target, monkeypatch):
    drafter = unrolled(tiny_head(target), 1)
    spans = ["0001111001", "110001"]
    trained = [torch.tensor([c == "1" for c in span]) for span in spans]
    layout = drafter.lay_out(training_inputs(target, drafter, random_ids(10, 6), trained))
    kept, plain = [], drafter.network.hidden

    def hidden(*arguments):
        kept.append(plain(*arguments))
        kept[-1].retain_grad()
        return kept[-1]

    monkeypatch.setattr(drafter.network, "hidden", hidden)
    states = drafter.states(layout)[0]
    torch.nn.functional.cross_entropy(drafter.head(states), layout.labels).backward()
    reached = kept[0].grad.abs().sum(-1) > 0
    expected = [[span[c + 2 : c + 3] == "1" for c in range(9)] for span in spans]
    assert reached.tolist() == expected and any(map(any, expected))


@pytest.mark.parametrize("lengths", [(6, 4), (1, 1), (2,)])
def test_every_parameter_takes_part_without_rows(target, lengths):
    drafter = tiny_head(target, norm_before_fc=True, num_layers=2)
    sequences = random_ids(*lengths)
    nothing = [torch.zeros(len(s), dtype=torch.bool) for s in sequences]
    layout = drafter.lay_out(training_inputs(target, drafter, sequences, nothing))
    tokens, nodes = drafter.states(layout)
    assert len(tokens) == len(nodes) == len(layout.labels) == len(layout.node_rows) == len(layout.weights) == 0
    (drafter.head(tokens).sum() + drafter.head(nodes).sum()).backward()
    for name, parameter in drafter.module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_tree_of_roots_alone_and_none_at_all(target):
    drafter, sequences = tiny_head(target), random_ids(6, 5)
    roots = [DraftTree([int(sequences[1][3])], [-1])]
    layout = drafter.lay_out(training_inputs(target, drafter, sequences, **all_nodes(roots, [1], [3])))
    expected = node_logprobs(drafter, sequences, [1], [3], roots)[0]
    assert_same(logprobs(drafter, drafter.states(layout)[1]), expected)


def test_a_tree_at_the_first_token_is_refused(target):
    drafter, sequences = tiny_head(target), random_ids(6)
    fields = all_nodes(random_trees(sequences, [0], [0]), [0], [0])
    with pytest.raises(InputError, match="at least two tokens"):
        drafter.lay_out(training_inputs(target, drafter, sequences, **fields))
    with pytest.raises(InputError, match="at least two tokens"):
        drafter.session(sequences, torch.tensor([0]), torch.tensor([0]), Sampling())


def test_neighbours_change_nothing(target):
    """A sequence's rows beside longer and shorter ones are its rows alone."""
    drafter = unrolled(tiny_head(target), 3)
    sequences = random_ids(4, 12, 7)
    layout = drafter.lay_out(training_inputs(target, drafter, sequences))
    together = drafter.states(layout)[0]
    for row, sequence in enumerate(sequences):
        alone = drafter.states(drafter.lay_out(training_inputs(target, drafter, [sequence])))[0]
        torch.testing.assert_close(together[layout.target_rows[:, 0] == row], alone, atol=1e-5, rtol=1e-5)
