"""The chunked losses against plain ones, and which rows get a gradient."""

from __future__ import annotations

import pytest
import torch
from tiny_training import VOCAB, make_drafter

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.law.exit_law import batch_exit_law, edge_logprobs
from exittrain.law.losses import ROW_LOSSES, cross_entropy_rows, draft_logprobs, target_logprobs
from exittrain.law.objectives import OBJECTIVES, node_terms
from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.packed import pack
from exittrain.stages.training import losses as losses_module
from exittrain.stages.training import scoring
from exittrain.stages.training.loop import Trainer
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.trees import tree_generators
from exittrain.stages.training.zero_config import deepspeed_config
from exittrain.tree.merge import merge_batch

TREES = [name for name, objective in OBJECTIVES.items() if objective.on != "nothing"]


@pytest.fixture(params=["whole", "chunks"])
def chunking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """ "chunks": three rows at a time, logits computed again in the backward pass."""
    if request.param == "chunks":
        monkeypatch.setitem(scoring.CHUNK_BYTES, "cpu", 3 * 4 * VOCAB)
        monkeypatch.setattr(scoring, "KEEP_BYTES", 0)
        monkeypatch.setattr(losses_module, "KEEP_BYTES", 0)
    return str(request.param)


def row_losses(name: str, target_logits, draft_logits, sampling: Sampling) -> torch.Tensor:
    return ROW_LOSSES[name](target_logprobs(target_logits, sampling), draft_logprobs(draft_logits, sampling))


def tree_hidden(drafter, packed) -> torch.Tensor:
    return drafter.model.hidden(packed.input_ids, packed.position_ids, packed.mask)


def gradients(drafter) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in drafter.model.module.named_parameters() if p.grad is not None}


def plain_gradients(made, target, step: int) -> dict[str, torch.Tensor]:
    """The same step's gradient from whole logits, full trees and one packed forward a sequence."""
    drafter, task, loss = make_drafter(), made.task, made.loss
    plan = task._plan(step)
    token_sum, tokens, node_sum, denominator = 0.0, 0, 0.0, 0.0
    if loss.uses_trees:
        made.task._trees_of(step)
    for member, index in enumerate(plan.indices):
        sequence, trained = task._sequences.tokens[index], task._sequences.trained[index]
        draft = drafter.head(drafter.model.hidden(sequence[None]))[0]
        wanted = target.head(target.hidden(sequence[None]))[0]
        rows = trained[1:].nonzero().flatten()
        if loss.token_loss == "kl":
            token_sum = token_sum + row_losses("kl", wanted[rows], draft[rows], loss.samplings[0]).sum()
        else:
            token_sum = token_sum + cross_entropy_rows(draft[rows], sequence[rows + 1]).sum()
        tokens += len(rows)
        if not loss.uses_trees:
            continue
        mine = (plan.tree_sequence == member).nonzero().flatten()
        session = made.drafter.session([sequence], torch.zeros_like(mine), plan.anchors[mine], loss.samplings[0])
        places = [(task._sequences.ids[index], int(anchor)) for anchor in plan.anchors[mine]]
        generators = tree_generators(loss.builder, places, task._loop.seed, "tree", step)
        trees = merge_batch(get_builder(loss.builder)(session, loss.shape, generators).trees)[0]
        packed = pack([sequence], trees, torch.zeros_like(mine), plan.anchors[mine])
        q_logits = drafter.head(packed.gather(tree_hidden(drafter, packed)))
        p_logits = target.head(packed.gather(target.hidden(packed.input_ids, packed.position_ids, packed.mask)))
        law = batch_exit_law(trees, edge_logprobs(trees, process_logits(p_logits, loss.samplings[0])))
        terms = node_terms(loss.objective, trees, law, loss.normaliser, loss.depth_limit)
        name = terms.row_loss or "kl"  # weights on edges leave all rows at zero
        rows = row_losses(name, p_logits.flatten(0, 1), q_logits.flatten(0, 1), loss.samplings[0])
        log_q = edge_logprobs(trees, draft_logprobs(q_logits, loss.samplings[0]))
        node_sum = node_sum + (terms.row_weights.flatten() * rows).sum() - (terms.edge_weights * log_q).sum()
        denominator += terms.denominator
    total = loss.token_weight * token_sum / tokens + (loss.weight * node_sum / denominator if denominator else 0.0)
    total.backward()
    return gradients(drafter)


def trained_gradients(made, step: int) -> dict[str, torch.Tensor]:
    """What the loop hands to the optimiser."""
    trainer = Trainer(made.task, made.settings, deepspeed_config("zero0"))
    seen: dict[str, torch.Tensor] = {}
    trainer.engine.step = lambda lr: seen.update(gradients(made.drafter)) or 0.0  # type: ignore[method-assign]
    trainer.step(step)
    trainer.engine.close()
    return seen


@pytest.mark.parametrize("objective", ["token", *TREES])
def test_gradient_is_the_plain_one(make_task, target, chunking: str, objective: str) -> None:
    check_gradient(make_task, target, objective, 0.8)


@pytest.mark.parametrize("objective", ["token", *TREES])
def test_gradient_at_temperature_0(make_task, target, objective: str) -> None:
    """The target is run on its own path alone; the plain one on whole trees."""
    check_gradient(make_task, target, objective, 0.0)


def check_gradient(make_task, target, objective: str, temperature: float) -> None:
    normaliser = {"exit": "nodes", "reach_kl": "weights", "accept_lk": "nodes"}.get(objective, "anchors")
    loss = {"objective": objective, "normaliser": normaliser, "weight": 0.7, "samplings": (Sampling(temperature),)}
    made = make_task({"micro_batch_size": 2}, loss)
    expected = plain_gradients(made, target, step=1)
    found = trained_gradients(make_task({"micro_batch_size": 2}, loss), step=1)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("objective", "builder"), [("accept_lk", "sampled_iid"), ("accept_tv", "sampled_wor")])
def test_gradient_on_sampled_trees(make_task, target, objective: str, builder: str) -> None:
    """Twins merged; the deepest level of the drawn shape, not of the settings, is the depth limit."""
    shape = TreeShape(budget=6, depth=3, branching="2-ary")
    loss = {"objective": objective, "builder": builder, "shape": shape, "samplings": (Sampling(0.8),)}
    made = make_task({"micro_batch_size": 2}, loss)
    assert made.loss.depth_limit == 2
    expected = plain_gradients(made, target, step=1)
    found = trained_gradients(make_task({"micro_batch_size": 2}, loss), step=1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("counts", [[1, 7, 1, 2, 9, 1], [1] * 8, [20]])
def test_chunks_are_bounded_however_many_rows_share_a_target_row(monkeypatch, counts: list[int]) -> None:
    """Three rows at a time, of drafter and target; blocks and unrolled steps predict one token many times."""
    monkeypatch.setitem(scoring.CHUNK_BYTES, "cpu", 3 * 4 * VOCAB)
    generator, seen = torch.Generator().manual_seed(0), []
    target_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    states = torch.randn(len(target_of), VOCAB, generator=generator, requires_grad=True)
    wanted, weights = torch.randn(len(counts), VOCAB, generator=generator), torch.rand(len(states), generator=generator)
    head = losses_module.RowHead(lambda rows: seen.append(len(rows)) or rows * 2, VOCAB)

    def target_logits(start: int, stop: int) -> torch.Tensor:
        seen.append(stop - start)
        return wanted[start:stop]

    found = losses_module.pair_loss_sum(head, states, target_logits, target_of, Sampling(), weights)
    plain = (row_losses("kl", wanted[target_of], states * 2, Sampling()) * weights).sum()
    torch.testing.assert_close(found, plain)
    for ours, theirs in zip(torch.autograd.grad(found, states), torch.autograd.grad(plain, states), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert max(seen) == 3


def test_cross_entropy_on_tokens(make_task, target, chunking: str) -> None:
    made = make_task(None, {"token_loss": "ce"})
    expected, found = plain_gradients(made, target, 0), trained_gradients(made, 0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mask", ["0001111", "0110010", "0000001", "1111111"])
@pytest.mark.parametrize("as_bool", [False, True])
def test_a_row_has_a_gradient_iff_it_predicts_a_trained_token(make_task, target, mask: str, as_bool: bool) -> None:
    flags = [int(c) for c in mask]
    data = [
        {
            "sequence_id": "a",
            "token_ids": list(range(1, 8)),
            "loss_mask": [bool(f) for f in flags] if as_bool else flags,
        },
        {"sequence_id": "b", "token_ids": list(range(9, 18)), "loss_mask": [0, 0, 1, 0, 0, 0, 0, 1, 1]},
    ]
    made = make_task({"batch_size": 2}, {"token_loss": "ce"}, SequenceSet.from_rows(data))
    (batch,) = made.task.prepare(0)
    rows = batch.layout.inputs
    states = tree_hidden(made.drafter, rows.packed).detach().requires_grad_()
    made.drafter.model.hidden = lambda *inputs: states
    loss, _ = made.task.module(batch, {"token": 1.0, "node": 0.0})
    loss.backward()
    has_gradient = states.grad.abs().sum(-1) > 0
    order = {name: row for row, name in enumerate(batch.sample_ids)}
    for row in data:
        expected = [*map(bool, row["loss_mask"][1:]), False]
        assert has_gradient[order[row["sequence_id"]], : len(expected)].tolist() == expected


@pytest.mark.parametrize("objective", ["token", "exit", "exit_kl"])
def test_splitting_a_batch_changes_nothing(make_task, objective: str) -> None:
    """Uneven sequences and trees: sums over all rows are divided once, not averages averaged."""
    found = []
    for micro in (8, 3, 1):
        made = make_task({"batch_size": 8, "micro_batch_size": micro}, {"objective": objective, "normaliser": "nodes"})
        found.append(trained_gradients(made, 0))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_normalised_by_counts_not_by_micro_batches(make_task) -> None:
    """Nine tokens in one micro-batch and one in the other weigh nine to one (cases.md 69)."""
    rows = [
        {"sequence_id": "long", "token_ids": list(range(10)), "loss_mask": [0] + [1] * 9},
        {"sequence_id": "short", "token_ids": [11, 12], "loss_mask": [0, 1]},
    ]
    data = SequenceSet.from_rows(rows)
    found = [
        trained_gradients(make_task({"batch_size": 2, "micro_batch_size": micro}, None, data), 0) for micro in (2, 1)
    ]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)


def test_copying_the_next_token_can_be_learnt(make_task) -> None:
    """Cross-entropy on a sequence that counts falls to nothing, but not against the input token (cases.md 73)."""
    rows = [{"sequence_id": "count", "token_ids": list(range(20)), "loss_mask": [0] + [1] * 19}]
    made = make_task(
        {"steps": 60, "batch_size": 1, "lr": 3e-2, "schedule": "constant"},
        {"token_loss": "ce"},
        SequenceSet.from_rows(rows),
    )
    trainer = Trainer(made.task, made.settings, deepspeed_config("zero0"))
    losses = [trainer.step(step)[0]["token_loss"] / 19 for step in range(60)]
    trainer.engine.close()
    assert abs(losses[0] - torch.tensor(float(VOCAB)).log()) < 1  # an untrained model knows nothing (cases.md 72)
    assert losses[-1] < 0.1
    logits = made.drafter.head(made.drafter.model.hidden(torch.arange(19)[None]))[0]
    assert cross_entropy_rows(logits, torch.arange(19)).mean() > 3


def test_temperatures_take_turns(make_task) -> None:
    """Blocks of `refresh_every` steps go through the temperatures; the loss of a step is the one of its temperature."""
    hot, cold = Sampling(), Sampling(0.5)

    def first_loss(step: int, *samplings: Sampling) -> float:
        task = make_task(loss={"objective": "reach_kl", "refresh_every": 2, "samplings": samplings}).task
        for _ in range(step % 2):
            task.prepare(step - 1)
        (batch,) = task.prepare(step)
        _, sums = task.module(batch, {"token": 1.0, "node": 1.0})
        return float(sums["token_loss"]) + float(sums["node_loss"])

    for step, sampling in enumerate([hot, hot, cold, cold, hot]):
        assert first_loss(step, hot, cold) == first_loss(step, sampling)
    assert first_loss(2, hot, cold) != first_loss(2, hot)
