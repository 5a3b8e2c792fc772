"""The objectives against their formulas, written out node by node; losses against plain ones."""

from __future__ import annotations

import math
import random

import pytest
import torch
from enumeration import random_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.errors import InputError
from exittrain.law.exit_law import batch_exit_law, edge_logprobs
from exittrain.law.losses import ROW_LOSSES, RowLoss, cross_entropy_rows, draft_logprobs, kl, lk, target_logprobs, tv
from exittrain.law.objectives import OBJECTIVES, Objective, node_terms, weight_at
from exittrain.law.sampling import Sampling, process_logits
from exittrain.tree.batch import TreeBatch

VOCAB, DEPTH = 5, 3


def case(seed: int = 0) -> tuple[TreeBatch, torch.Tensor, torch.Tensor]:
    """Trees, target logits and draft logits [B, M, V]."""
    rng = random.Random(seed)
    trees = TreeBatch.from_trees([random_tree(rng, VOCAB, DEPTH, rng.randrange(10)) for _ in range(8)])
    shape = (2, *trees.token_ids.shape, VOCAB)
    target, draft = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double() * 2
    return trees, target, draft


def by_hand(name: str, normaliser: str, trees: TreeBatch, target: torch.Tensor, draft: torch.Tensor) -> float:
    """math.md section 8, one node at a time."""
    total, nodes, weights = 0.0, 0, 0.0
    for row, tree in enumerate(trees.trees()):
        p, q = target[row].log_softmax(-1), draft[row].log_softmax(-1)
        reach = [1.0]
        for node in range(1, tree.num_nodes + 1):
            reach.append(reach[int(tree.parents[node])] * math.exp(p[tree.parents[node], tree.token_ids[node]]))
        for node in range(tree.num_nodes + 1):
            nodes += node > 0
            carried = sum(math.exp(p[node, tree.token_ids[child]]) for child in tree.children(node))
            exit_, depth = reach[node] * (1 - carried), int(tree.depths[node])
            weight = {"exit": exit_, "exit_depth": exit_ * depth, "reach": reach[node], "exit_kl": exit_}.get(
                name, reach[node]
            )
            if name.endswith("_kl") or name.startswith("accept_"):
                if depth == DEPTH:
                    continue
                accepted = sum(min(math.exp(a), math.exp(b)) for a, b in zip(p[node], q[node], strict=True))
                kl = float((p[node].exp() * (p[node] - q[node])).sum())
                loss = {"accept_tv": 1 - accepted, "accept_lk": -math.log(accepted)}.get(name, kl)
            elif node == 0 or name == "token":
                continue
            else:
                loss = -float(q[tree.parents[node], tree.token_ids[node]])
            total, weights = total + weight * loss, weights + weight
    return total / {"nodes": nodes, "weights": weights or 1, "anchors": len(trees)}[normaliser]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("normaliser", ["nodes", "weights", "anchors"])
def test_objectives_are_their_formulas(name: str, normaliser: str) -> None:
    trees, target, draft = case()
    law = batch_exit_law(trees, edge_logprobs(trees, target.log_softmax(-1)))
    terms = node_terms(name, trees, law, normaliser, depth_limit=DEPTH)
    assert not terms.row_weights.requires_grad
    assert (terms.row_weights[~trees.valid] == 0).all() and (terms.edge_weights[~trees.valid] == 0).all()
    assert (terms.row_loss is None) == (OBJECTIVES[name].on != "rows")
    rows = on_logits(ROW_LOSSES[terms.row_loss or "kl"])(target.flatten(0, 1), draft.flatten(0, 1))
    edges = -edge_logprobs(trees, draft.log_softmax(-1))
    total = (terms.row_weights.flatten() * rows).sum() + (terms.edge_weights * edges).sum()
    assert float(total) / (terms.denominator or 1) == pytest.approx(
        by_hand(name, normaliser, trees, target, draft), abs=1e-9
    )


def test_exit_depth_and_reach_both_sum_to_coverage() -> None:
    trees, target, _ = case(1)
    law = batch_exit_law(trees, edge_logprobs(trees, target.log_softmax(-1)))
    for name in ("exit_depth", "reach"):
        weights = node_terms(name, trees, law).edge_weights.sum(1)
        torch.testing.assert_close(weights, law.coverage, atol=1e-9, rtol=0)


def test_denominators_of_halves_add_up() -> None:
    trees, target, _ = case(2)
    edges = edge_logprobs(trees, target.log_softmax(-1))
    halves = [
        TreeBatch(trees.token_ids[s], trees.parents[s], trees.depths[s], trees.valid[s])
        for s in (slice(0, 3), slice(3, 8))
    ]
    for normaliser in ("nodes", "weights", "anchors"):
        whole = node_terms("exit_kl", trees, batch_exit_law(trees, edges), normaliser).denominator
        parts = [
            node_terms("exit_kl", half, batch_exit_law(half, part), normaliser).denominator
            for half, part in zip(halves, (edges[:3], edges[3:]), strict=True)
        ]
        assert sum(parts) == pytest.approx(whole)


def test_unknown_names() -> None:
    trees, target, _ = case()
    law = batch_exit_law(trees, edge_logprobs(trees, target.log_softmax(-1)))
    with pytest.raises(InputError, match="no objective 'exitkl', did you mean 'exit_kl'"):
        node_terms("exitkl", trees, law)
    with pytest.raises(InputError, match="no normaliser 'node', did you mean 'nodes'"):
        node_terms("exit", trees, law, "node")


def on_logits(loss: RowLoss):
    """The loss on raw logits of both sides."""

    def rows(target: torch.Tensor, draft: torch.Tensor, sampling: Sampling = Sampling()) -> torch.Tensor:  # noqa: B008
        return loss(target_logprobs(target, sampling), draft_logprobs(draft, sampling))

    return rows


def test_the_tokens_that_can_be_drafted_keep_their_share() -> None:
    """A pruned vocabulary's target is cut, not renormalised: its gradient is q times the mass inside, less p."""
    target, draft = two_rows(8)
    ids = torch.tensor([0, 2])
    columns = draft.detach()[:, ids].requires_grad_()
    p = target.softmax(-1)[:, ids]
    kl(target_logprobs(target, Sampling(), ids), draft_logprobs(columns)).sum().backward()
    torch.testing.assert_close(columns.grad, columns.softmax(-1) * p.sum(-1, keepdim=True) - p)
    assert float(p.sum(-1).max()) < 0.999


def test_weight_schedule() -> None:
    assert [weight_at(step, 10, 2.0, 0.4) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert weight_at(0, 10, 2.0) == weight_at(9, 10, 2.0) == 2.0
    assert weight_at(0, 3, 2.0, 0.1) == 2.0


@given(
    seed=st.integers(0, 10**6),
    sampling=st.sampled_from(
        [Sampling(), Sampling(0.5), Sampling(2.0, top_k=2), Sampling(0.7, top_p=0.6), Sampling(0)]
    ),
)
@settings(max_examples=40, deadline=None)
def test_kl_is_its_sum_and_its_gradient(seed: int, sampling: Sampling) -> None:
    """Gradient: (q - p) / temperature; finite with truncated targets."""
    target, draft = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(seed)).double() * 3
    target.requires_grad_()
    draft.requires_grad_()
    value = on_logits(kl)(target, draft, sampling)
    p, q = process_logits(target.detach(), sampling).exp(), draft_logprobs(draft, sampling).exp().detach()
    for row in range(3):
        wanted = sum(float(x) * math.log(x / y) for x, y in zip(p[row], q[row], strict=True) if x > 0)
        assert float(value[row].detach()) == pytest.approx(wanted, abs=1e-9)
    value.sum().backward()
    scale = 1.0 if sampling.greedy else sampling.temperature
    torch.testing.assert_close(draft.grad, (q - p) / scale, atol=1e-9, rtol=0)
    assert target.grad is None


def test_kl_of_the_same_logits_is_zero_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
        value = on_logits(kl)(logits, logits, Sampling(0.1))
        assert value.dtype == torch.float32 and float(value.abs().max()) < 1e-5


def test_a_target_cut_by_top_p_and_saturated_rows_stay_finite() -> None:
    target = torch.tensor([[500.0, 0.0, -500.0], [1.0, 1.0, -torch.inf]])
    draft = torch.tensor([[-500.0, 0.0, 500.0], [2.0, 0.0, 1.0]], requires_grad=True)
    value = on_logits(kl)(target, draft, Sampling(0.5, top_p=0.9))
    value.sum().backward()
    assert value.isfinite().all() and draft.grad is not None and draft.grad.isfinite().all()


def test_a_token_the_drafter_cannot_say_costs_only_what_the_target_gives_it() -> None:
    draft = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert float(on_logits(kl)(torch.tensor([[0.0, -torch.inf, 0.0]]), draft)) == 0.0
    assert float(on_logits(kl)(torch.tensor([[0.0, 0.0, 0.0]]), draft)) == math.inf


SAMPLINGS = [Sampling(), Sampling(0.5), Sampling(2.0, top_k=2), Sampling(0.7, top_p=0.6), Sampling(0)]


def two_rows(seed: int, rows: int = 3, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits [R, V], the draft's with a gradient."""
    target, draft = torch.randn(2, rows, VOCAB, generator=torch.Generator().manual_seed(seed)).double() * scale
    return target, draft.requires_grad_()


@given(seed=st.integers(0, 10**6), sampling=st.sampled_from(SAMPLINGS))
@settings(max_examples=40, deadline=None)
def test_acceptance_losses_are_their_sums_and_gradients(seed: int, sampling: Sampling) -> None:
    """d TV / d logit y = (q_y / T) * (sum over tokens with q < p of q_x, less 1 if y is one of them); LK's is that over
    alpha (2602.23881)."""
    target, draft = two_rows(seed)
    target.requires_grad_()
    p, q = process_logits(target.detach(), sampling).exp(), draft_logprobs(draft, sampling).exp().detach()
    pairs = zip(p.tolist(), q.tolist(), strict=True)
    alpha = torch.tensor([sum(map(min, *rows)) for rows in pairs], dtype=torch.float64)
    scarce = (q < p).double()
    gradient = q * ((q * scarce).sum(-1, keepdim=True) - scarce) / (1.0 if sampling.greedy else sampling.temperature)
    of_tv, of_lk = on_logits(tv)(target, draft, sampling), on_logits(lk)(target, draft, sampling)
    torch.testing.assert_close(of_tv.detach(), 1 - alpha, atol=1e-12, rtol=0)
    torch.testing.assert_close(of_lk.detach(), -alpha.log(), atol=1e-9, rtol=1e-9)
    (of_tv,) = torch.autograd.grad(of_tv.sum(), draft)
    (of_lk,) = torch.autograd.grad(of_lk.sum(), draft)
    torch.testing.assert_close(of_tv, gradient, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(of_lk, of_tv / alpha[:, None], atol=1e-12, rtol=1e-9)
    assert target.grad is None


def test_tv_is_how_often_a_draw_is_refused() -> None:
    """Draw x from q, accept with probability min(1, p(x) / q(x)): the rule, not the formula."""
    target, draft = two_rows(4, rows=1)
    p, q = process_logits(target[0], Sampling()).exp(), draft_logprobs(draft[0].detach()).exp()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=generator)
    accepted = torch.rand(len(drawn), generator=generator) < (p / q)[drawn]
    assert float(on_logits(tv)(target, draft.detach())) == pytest.approx(1 - float(accepted.double().mean()), abs=0.005)


@pytest.mark.parametrize("loss", [tv, lk])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_acceptance_losses_stay_finite(loss, dtype: torch.dtype, sampling: Sampling) -> None:
    """Logits of +-200 that disagree, that agree, tokens neither may say, a row where they share none."""
    far, inf = 200.0, torch.inf
    target = torch.tensor([[far, -far, -far, -inf], [far, -far, 0.0, -inf], [far, far, -inf, -inf]]).to(dtype)
    draft = torch.tensor([[-far, far, -far, -inf], [far, -far, 0.0, -inf], [-inf, -inf, far, -far]]).to(dtype)
    draft.requires_grad_()
    values = on_logits(loss)(target, draft, sampling)
    values.sum().backward()
    assert values.dtype == torch.float32 and values.isfinite().all() and draft.grad.isfinite().all()
    apart, alike, disjoint = values.tolist()
    assert apart == pytest.approx(1.0 if loss is tv else 400.0 / (sampling.temperature or 1.0), rel=0.01)
    assert abs(alike) < 1e-6
    # Nothing in common: surely refused, and no reason to move.
    assert disjoint == (1.0 if loss is tv else 0.0) and not draft.grad[2].any()
    if loss is lk and sampling.greedy:  # TV's own gradient is gone where acceptance underflows, LK's is not
        torch.testing.assert_close(draft.grad[0], torch.tensor([-1.0, 1.0, 0.0, 0.0], dtype=dtype))


def test_acceptance_losses_of_a_copy_are_nothing() -> None:
    target, _ = two_rows(6, rows=4)
    draft = target.clone().requires_grad_()
    for loss in (tv, lk):
        value = on_logits(loss)(target, draft, Sampling(0.5)).sum()
        (gradient,) = torch.autograd.grad(value, draft)
        assert abs(float(value.detach())) < 1e-12 and gradient.isfinite().all()


def test_cross_entropy() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(6)
    wanted = torch.nn.functional.cross_entropy(logits / 0.5, tokens, reduction="none")
    torch.testing.assert_close(cross_entropy_rows(logits, tokens, Sampling(0.5)), wanted)
    torch.testing.assert_close(
        cross_entropy_rows(logits, tokens, Sampling(0)),
        torch.nn.functional.cross_entropy(logits, tokens, reduction="none"),
    )


def test_another_objective_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row loss and another weight; nothing else has to know."""

    def overlap_miss(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)

    monkeypatch.setitem(ROW_LOSSES, "overlap", overlap_miss)
    monkeypatch.setitem(OBJECTIVES, "reach_overlap", Objective("rows", lambda trees, law: law.reach, "overlap"))
    trees, target, draft = case(3)
    law = batch_exit_law(trees, edge_logprobs(trees, target.log_softmax(-1)))
    terms = node_terms("reach_overlap", trees, law, depth_limit=DEPTH)
    assert terms.row_loss == "overlap"
    assert terms.row_loss == "overlap"
    rows = on_logits(ROW_LOSSES[terms.row_loss])(target.flatten(0, 1), draft.flatten(0, 1))
    assert 0 < float((terms.row_weights.flatten() * rows).sum()) < float(terms.row_weights.sum())
