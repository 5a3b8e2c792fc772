"""The loss of heads, through the task that trains them, against plain sums over rows: shared target rows, many nodes to
one state, a pruned vocabulary, every objective."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_heads import DRAFTED, VOCAB, make_head, make_target
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.drafters.base import Drafter
from exittrain.drafters.block.fresh import make_block
from exittrain.drafters.eagle.fresh import make_eagle
from exittrain.drafters.head_config import config_like
from exittrain.drafters.scratch import make_causal_lm
from exittrain.law.exit_law import batch_exit_law, edge_logprobs
from exittrain.law.losses import ROW_LOSSES, draft_logprobs, target_logprobs
from exittrain.law.objectives import OBJECTIVES, node_terms
from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.target import TargetModel
from exittrain.stages.training import labelled_trees, scoring
from exittrain.stages.training import losses as losses_module
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.loop import Trainer
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import deepspeed_config

SHAPE = TreeShape(budget=7, depth=3, width=3)
KINDS = ["eagle3", "block"]
TREES = [name for name, objective in OBJECTIVES.items() if objective.on != "nothing"]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return make_target()


def make_sequences() -> SequenceSet:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "sequence_id": f"s{i}",
            "token_ids": torch.randint(VOCAB, (length,), generator=generator).tolist(),
            "loss_mask": [0] * 2 + [1] * (length - 2),
        }
        for i, length in enumerate((9, 14, 11))
    ]
    return SequenceSet.from_rows(rows)


def make_task(drafter: Drafter, target: TargetModel, micro: int = 3, **loss) -> DrafterTask:
    settings = LoopSettings(steps=6, batch_size=3, micro_batch_size=micro, lr=1e-2)
    changes = {"shape": SHAPE, "anchors_per_sequence": 3, "samplings": (Sampling(0.8),), **loss}
    return DrafterTask(drafter, target, make_sequences(), settings, LossSettings(**changes))


def test_a_head_unrolls_from_its_part_of_the_steps_on(target: TargetModel) -> None:
    """Steps 0 to 2 of 6, then 3 on: a row a trained token with a token before its feature, then 1 + 0.7 + 0.49."""
    task = make_task(make_head("eagle3", target), target, unroll_from=0.4)
    rows = [[length - 2 - step for length in (9, 14, 11)] for step in range(3)]
    once, unrolled = sum(rows[0]), sum(0.7**step * sum(row) for step, row in enumerate(rows))
    counted = [sum(batch.counts["tokens"] for batch in task.prepare(step)) for step in range(6)]
    assert counted == pytest.approx([once] * 3 + [unrolled] * 3)


def plain_sums(task: DrafterTask, drafter: Drafter, target: TargetModel) -> tuple[Tensor, Tensor]:
    """(token sum, node sum) of step 0, every row and node by itself; the layout is the drafter's own."""
    loss, sampling = task._loss, task._loss.samplings[0]
    plan = task._plan(0)
    trees = task._trees_of(0) if loss.uses_trees else None
    (batch,) = make_task(
        drafter, target, objective=loss.objective, normaliser=loss.normaliser, samplings=loss.samplings
    ).prepare(0)
    token_states, node_states = drafter.states(batch.layout)
    columns = torch.arange(VOCAB) if drafter.draft_ids is None else drafter.draft_ids
    along = [target.head(target.hidden(task._sequences.tokens[i][None]))[0] for i in plan.indices]
    token_sum = torch.zeros(())
    for state, (row, column), weight in zip(token_states, batch.layout.target_rows, batch.layout.weights, strict=True):
        wanted = target_logprobs(along[row][column][None], sampling)[:, columns]
        token_sum = (
            token_sum + weight * ROW_LOSSES["kl"](wanted, draft_logprobs(drafter.head(state)[None], sampling))[0]
        )
    node_sum = torch.zeros(())
    if trees is None:
        return token_sum, node_sum
    logits = torch.zeros(*trees.token_ids.shape, VOCAB)
    for r, tree in enumerate(trees.trees()):
        tokens = task._sequences.tokens[plan.indices[plan.tree_sequence[r]]][: plan.anchors[r] + 1]
        for node in range(tree.num_nodes + 1):
            path = torch.cat([tokens, tree.token_ids[tree.path(node)]])
            logits[r, node] = target.head(target.hidden(path[None]))[0, -1]
    law = batch_exit_law(trees, edge_logprobs(trees, process_logits(logits, sampling)))
    terms = node_terms(loss.objective, trees, law, loss.normaliser, loss.depth_limit)
    place = {}  # (tree, node) -> node state, in the order of the wanted nodes
    wanted_nodes = (terms.row_weights > 0) | trees.has_children() if terms.row_loss else trees.has_children()
    if terms.row_loss:
        wanted_nodes = trees.valid & (trees.depths < loss.depth_limit)
    if sampling.greedy:  # the path alone is laid out
        passed = law.reach > 0
        above = torch.zeros_like(passed)
        tree, node = (passed & (trees.depths > 0)).nonzero(as_tuple=True)
        above[tree, trees.parents[tree, node]] = True
        wanted_nodes &= passed if terms.row_loss else above
    for p, (r, node) in enumerate(wanted_nodes.nonzero().tolist()):
        place[r, node] = node_states[batch.layout.node_rows[p]]
    for (r, node), state in place.items():
        log_q = draft_logprobs(drafter.head(state)[None], sampling)
        if terms.row_loss:
            wanted = target_logprobs(logits[r, node][None], sampling)[:, columns]
            node_sum = node_sum + terms.row_weights[r, node] * ROW_LOSSES[terms.row_loss](wanted, log_q)[0]
        else:
            for child in ((trees.parents[r] == node) & trees.valid[r] & (trees.depths[r] > 0)).nonzero().flatten():
                column = int((columns == trees.token_ids[r, child]).nonzero())
                node_sum = node_sum - terms.edge_weights[r, child] * log_q[0, column]
    return token_sum, node_sum


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", ["token", *TREES])
@pytest.mark.parametrize(("chunks", "temperature"), [(False, 0.8), (True, 0.8), (False, 0.0)])
def test_the_loss_is_the_plain_sum(
    target: TargetModel, kind: str, objective: str, chunks: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradient; `chunks`: two rows at a time, logits computed again in the backward pass."""
    settings = {"objective": objective, "samplings": (Sampling(temperature),)}
    if chunks:
        monkeypatch.setitem(scoring.CHUNK_BYTES, "cpu", 2 * 4 * VOCAB)
        monkeypatch.setattr(scoring, "KEEP_BYTES", 0)
        monkeypatch.setattr(losses_module, "KEEP_BYTES", 0)
    drafter = make_head(kind, target)
    task = make_task(drafter, target, **settings)
    (batch,) = task.prepare(0)
    loss, sums = task.module(batch, {"token": 0.7, "node": 1.3})
    loss.backward()
    found = {name: p.grad.clone() for name, p in drafter.module.named_parameters() if p.grad is not None}
    drafter.module.zero_grad()
    token_sum, node_sum = plain_sums(make_task(drafter, target, **settings), drafter, target)
    (0.7 * token_sum + 1.3 * node_sum).backward()
    assert float(sums["token_loss"]) == pytest.approx(float(token_sum.detach()), rel=1e-4)
    assert objective == "token" or float(sums["node_loss"]) == pytest.approx(
        float(node_sum.detach()), rel=1e-3, abs=1e-5
    )
    assert found
    for name, parameter in drafter.module.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=2e-5)


def own_text(target: TargetModel) -> SequenceSet:
    """Three sequences of the target's own at temperature 0, after two tokens each."""
    rows = []
    for i in range(3):
        tokens = [3 * i + 2, 5 * i + 4]
        while len(tokens) < 14:
            tokens.append(int(target.head(target.hidden(torch.tensor([tokens])))[0, -1].argmax()))
        rows.append({"sequence_id": f"s{i}", "token_ids": tokens, "loss_mask": [0] * 2 + [1] * 12})
    return SequenceSet.from_rows(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("objective", "normaliser"),
    [("reach", "nodes"), ("exit", "weights"), ("reach_kl", "weights"), ("accept_lk", "nodes")],
)
def test_paths_alone_weigh_as_whole_trees_do(
    target: TargetModel, kind: str, objective: str, normaliser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0, in trees so wide that paths go two levels down: counts, sums and gradients."""
    settings = LoopSettings(steps=6, batch_size=3, micro_batch_size=3, lr=1e-2)
    loss = LossSettings(
        objective, normaliser=normaliser, anchors_per_sequence=8, samplings=(Sampling(0.0),), builder="beam",
        shape=TreeShape(budget=200, depth=3, width=16),
    )  # fmt: skip
    found = []
    for label in (labelled_trees._along_paths, labelled_trees._at_all_nodes):
        monkeypatch.setattr(labelled_trees, "_along_paths", label)
        drafter = make_head(kind, target)
        task = DrafterTask(drafter, target, own_text(target), settings, loss)
        (batch,) = task.prepare(0)
        value, sums = task.module(batch, {"token": 0.0, "node": 1.3})
        value.backward()
        gradients = {name: p.grad for name, p in drafter.module.named_parameters() if p.grad is not None}
        found.append((batch.counts, float(sums["node_loss"]), gradients, len(batch.layout.node_rows)))
    (counts, value, gradients, rows), (whole_counts, whole_value, whole_gradients, whole_rows) = found
    assert counts == pytest.approx(whole_counts, rel=1e-6) and counts["exit_mass/depth_2"] > 0
    assert value == pytest.approx(whole_value, rel=1e-4) and rows < whole_rows / 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole_gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_target_whose_layers_are_brought_in_is_run_once(
    target: TargetModel, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path takes a forward a level: more than it saves where each has to bring the weights in."""
    monkeypatch.setattr(TargetModel, "is_offloaded", offloaded)
    task = make_task(make_head("block", target), target, objective="reach_kl", samplings=(Sampling(0.0),))
    (batch,) = task.prepare(0)
    trees = batch.counts["trees"]
    assert len(batch.layout.node_rows) > 3 * trees if offloaded else len(batch.layout.node_rows) < 2 * trees


@pytest.mark.parametrize("kind", KINDS)
def test_splitting_a_batch_changes_nothing(target: TargetModel, kind: str) -> None:
    """The places a sequence is trained at are its own, whatever lies beside it."""
    losses = []
    for micro in (3, 1):
        task = make_task(make_head(kind, target), target, micro, objective="reach_kl")
        batches = task.prepare(0)
        totals = {name: sum(batch.counts[name] for batch in batches) for name in batches[0].counts}
        scales = task.scales(0, totals)
        losses.append(sum(float(task.module(batch, scales)[0].detach()) for batch in batches))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pruned", [True, False])
def test_an_untrained_head_knows_nothing(target: TargetModel, kind: str, pruned: bool) -> None:
    """Cross-entropy of the text at step 0 is ln D within 1 (cases.md 72), and falls."""
    ids = DRAFTED if pruned else None
    config_size = len(DRAFTED) if pruned else VOCAB
    changes = {"block_size": 4, "mask_token_id": 2, "style": "qwen3"} if kind == "block" else {}
    config = config_like(target.config, kind, (1, 2, 3), config_size, **changes)
    drafter = (make_block if kind == "block" else make_eagle)(target, config, ids, 0)
    task = make_task(drafter, target, token_loss="ce", samplings=(Sampling(),))
    (batch,) = task.prepare(0)
    head = losses_module.RowHead(drafter.head, drafter.vocab_size, drafter.draft_ids)
    known = batch.layout.weights * (head.columns(batch.layout.labels) >= 0)
    sums = task.module(batch, {"token": 1.0, "node": 0.0})[1]
    assert abs(float(sums["token_loss"]) / float(known.sum()) - math.log(config_size)) < 1
    trainer = Trainer(task, LoopSettings(steps=30, batch_size=3, lr=1e-2), deepspeed_config("zero0"))
    values = [trainer.step(step)[0]["token_loss"] for step in range(6)]
    trainer.engine.close()
    assert values[-1] < values[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", ["token", "reach_kl", "exit", "accept_tv", "accept_lk"])
@pytest.mark.parametrize("half", [False, True])
def test_extreme_laws_stay_finite(target: TargetModel, kind: str, objective: str, half: bool) -> None:
    """Logits of several hundred on both sides, tokens nobody may draft, probabilities that underflow."""
    sharp = make_causal_lm(VOCAB, 16, 4, 2, 32, tie_embeddings=False, max_positions=64, seed=1)
    sharp.module.load_state_dict(target.module.state_dict())
    with torch.no_grad():
        sharp.module.lm_head.weight.mul_(200)
    extreme = TargetModel(sharp.module.requires_grad_(False), name="sharp", verify=False)
    drafter = make_head(kind, extreme)
    with torch.no_grad():
        drafter.module.lm_head.weight.mul_(20)
        if half:
            drafter.module.to(torch.bfloat16)
    task = make_task(drafter, extreme, objective=objective)
    (batch,) = task.prepare(0)
    loss, _ = task.module(batch, {"token": 1.0, "node": 1.0})
    loss.backward()
    assert float(drafter.head(drafter.states(batch.layout)[0]).abs().max().detach()) > 100
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in drafter.module.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_states_that_are_kept_need_no_target(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compares the time of two arms lets neither pay for the other's features."""
    target = make_target()
    task = make_task(make_head(kind, target), target)
    task.keep_states(range(2))
    monkeypatch.setattr(target, "hidden", lambda *args: pytest.fail("the target ran again"))
    for step in range(2):
        assert all(batch.token_hidden is not None for batch in task.prepare(step))
