"""Every ZeRO stage in one process, and one run of two ranks at ZeRO 3: gradients, resuming, what is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_training import make_drafter
from zero_checks import assert_bit_equal, assert_close, assert_equal_steps, in_ranks
from zero_scenarios import DRAFTERS, Scenario, first_step, make, parameters, read_lines, trained

from exittrain.drafters.base import Drafter
from exittrain.drafters.load import load_drafter
from exittrain.errors import InputError
from exittrain.stages.training.loop import Hooks, Trainer, train
from exittrain.stages.training.zero_config import deepspeed_config

STAGES = ("zero1", "zero2", "zero3")
MORE = ("zero1", "zero3-offload", "zero2-offload", "zero1-bf16", "zero2-bf16", "zero3-bf16")
CUT = Scenario(steps=7, stops=(3, 5))


@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=pytest.mark.slow if name in ("lora", "block") else ()) for name in DRAFTERS]
)
def test_stages_and_accumulation_give_the_same_gradients(drafter: str) -> None:
    """cases.md 69: five sequences as one forward, as 2 + 2 + 1, and partitioned (threshold 0: nothing stays whole)."""
    expected = first_step(Scenario(drafter=drafter, micro=5))
    for config in ("zero0", *STAGES, "zero3-offload"):
        assert_equal_steps(first_step(Scenario(config, drafter)), expected)


def test_the_loss_without_trees() -> None:
    expected = first_step(Scenario(objective="token", micro=None))
    assert_equal_steps(first_step(Scenario("zero3", objective="token", micro=1)), expected)


@pytest.mark.parametrize(
    "config",
    ["zero0", "zero2", "zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)],
)
def test_resumed_twice_is_bit_equal(config: str, tmp_path: Path) -> None:
    """cases.md 74 to 76; trees drawn for steps to come are there too (refresh_every 3, stops at 3 and 5)."""
    whole = trained(replace(CUT, config=config, stops=()), tmp_path / "whole")
    parts = trained(replace(CUT, config=config), tmp_path / "parts")
    assert_bit_equal(parts["parameters"], whole["parameters"])
    assert [found["updates"] for found in parts["loaded"]] == [3, 5]
    for found in parts["loaded"]:
        assert found["same"] and found["exp_avg"] > 0 and found["exp_avg_sq"] > 0
    lines = [read_steps(tmp_path / name) for name in ("parts", "whole")]
    assert lines[0] == lines[1] and len(lines[0]) == CUT.steps


def read_steps(folder: Path) -> list[dict[str, float]]:
    names = ("step", "lr", "loss", "grad_norm", "coverage", "num_trees")
    return [{name: line[name] for name in names} for line in read_lines(folder / "lines.json")]


def test_a_checkpoint_fits_every_stage(tmp_path: Path) -> None:
    """Begun at ZeRO 2, gone on with at 3, ended at 0; at one rank the sums are the same to the last bit."""
    whole = trained(replace(CUT, stops=()), tmp_path / "whole")
    for config, stop in (("zero2", 3), ("zero3", 5)):
        trained(replace(CUT, config=config, stops=(stop,), ends=False), tmp_path / "parts")
    assert_bit_equal(trained(replace(CUT, stops=()), tmp_path / "parts")["parameters"], whole["parameters"])


@contextmanager
def running(scenario: Scenario) -> Iterator[tuple[Drafter, Trainer]]:
    drafter, task, settings = make(scenario)
    trainer = Trainer(task, settings, deepspeed_config(scenario.config))
    try:
        yield drafter, trainer
    finally:
        trainer.engine.close()


def test_partitioned_at_rest_and_whole_where_it_is_read() -> None:
    """cases.md 84, the premise: with threshold 0 no parameter is there between steps, trained or frozen."""
    for drafter_kind in ("draft_lm", "lora"):
        with running(Scenario("zero3", drafter_kind)) as (drafter, trainer):
            trainer.step(0)
            trainer.step(1)
            assert {p.numel() for p in drafter.module.parameters()} == {0}
            with trainer.engine.whole():
                assert all(p.numel() for p in drafter.module.parameters())
            assert {p.numel() for p in drafter.module.parameters()} == {0}


@pytest.mark.parametrize("kind", ["draft_lm", "lora", "eagle3", "block"])
@pytest.mark.parametrize("config", ["zero1", "zero3", pytest.param("zero3-bf16", marks=pytest.mark.slow)])
def test_what_is_saved_is_what_was_trained(kind: str, config: str, tmp_path: Path) -> None:
    """cases.md 83, 84, 86: best (saved on the way) and last (after it) are whole and load with equal logits."""
    scenario = Scenario(config, kind, steps=2)
    drafter, task, settings = make(scenario)
    settings = replace(settings, eval_every=1)
    scores, live = iter([1.0, 2.0]), []

    def save_best() -> None:
        drafter.save(tmp_path / "best")
        live.append(some_logits(drafter))

    hooks = Hooks(evaluate=lambda: {"score": next(scores)}, save_best=save_best)
    train(task, settings, tmp_path / "run", deepspeed_config(config), hooks)
    drafter.save(tmp_path / "last")
    for name, expected in (("best", live[-1]), ("last", some_logits(drafter))):
        again = load_drafter(tmp_path / name, task._target, drafter.dtype)
        assert all(p.numel() for p in again.module.parameters())
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if kind == "lora" else {"rtol": 0, "atol": 0}  # merged: rounding
        if not (kind == "lora" and config == "zero3-bf16"):  # there it is a unit in each weight's last place
            torch.testing.assert_close(some_logits(again), expected, **tolerance)
    torch.testing.assert_close(some_logits(drafter), live[-1], rtol=0, atol=0)


def some_logits(drafter: Drafter) -> torch.Tensor:
    """What the drafter says after two contexts."""
    from exittrain.law.sampling import Sampling

    sequences, anchors = [torch.arange(9), torch.arange(3, 10)], torch.tensor([5, 4])
    return drafter.session(sequences, torch.tensor([0, 1]), anchors, Sampling()).root().float()


def test_the_target_and_torch_stay_as_they_are() -> None:
    """cases.md 87: nothing of DeepSpeed reaches the models that are beside it, loaded before or after."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    linear = torch.nn.functional.linear
    with running(Scenario("zero3")) as (_, trainer):
        target = trainer.task._target
        before = {name: p.clone() for name, p in target.module.named_parameters()}
        trainer.step(0)
        assert torch.nn.functional.linear is linear and not is_deepspeed_zero3_enabled()
        assert_bit_equal(dict(target.module.named_parameters()), before)
        fresh = make_drafter()
        assert all(p.numel() and not hasattr(p, "ds_id") for p in fresh.module.parameters())
    other = make_drafter()
    assert_bit_equal(parameters(fresh), parameters(other))


def test_embeddings_shared_with_the_target_are_not_its_own_afterwards(tmp_path: Path) -> None:
    """A drafter of the target's layers shares its storage: partitioning must free the drafter's view alone."""
    from exittrain.drafters.layers import copy_layers
    from exittrain.stages.training.drafter_loss import LossSettings
    from exittrain.stages.training.drafter_task import DrafterTask

    _, task, settings = make(Scenario(steps=2))
    target, ends = task._target, []
    before = target.fingerprint()
    for config in ("zero0", "zero3"):
        drafter = copy_layers(target, 1)
        shared = DrafterTask(drafter, target, task._sequences, settings, LossSettings(objective="token"))
        train(shared, settings, tmp_path / config, deepspeed_config(config), Hooks())
        ends.append(parameters(drafter))
        target._fingerprint = None
        assert target.fingerprint() == before
    assert_bit_equal(ends[1], ends[0])


def test_gradients_arrive_in_one_order_whatever_a_micro_batch_holds() -> None:
    """DeepSpeed sums them in buckets filled as they come, so another order on another rank would mix them up."""
    for kind in DRAFTERS:
        _, task, _ = make(Scenario(drafter=kind, sequences=3, batch=3, micro=1))
        full, sampling = task.prepare(0), task._loss.sampling_at(0)
        plan = task._plan(0)
        batches = [*full, task._without_trees(plan.indices[:1], sampling, 0), task._without_trees([], sampling, 0)]
        orders = []
        for batch in batches:
            order: list[str] = []
            hooks = [
                p.register_post_accumulate_grad_hook(lambda _, name=name, order=order: order.append(name))
                for name, p in task.module.named_parameters()
                if p.requires_grad
            ]
            task.module(batch, {"token": 1.0, "node": 1.0})[0].backward()
            for hook in hooks:
                hook.remove()
            orders.append(order)
        assert orders[0] and all(order == orders[0] for order in orders), kind


def test_an_infinite_gradient_updates_nothing_at_any_stage() -> None:
    for config in STAGES:
        with running(Scenario(config)) as (drafter, trainer):
            with trainer.engine.whole():
                before = parameters(drafter)
            name, parameter = next(iter(trainer.engine.parameters.items()))
            assert name
            parameter.register_hook(lambda gradient: gradient * float("inf"))
            with pytest.raises(FloatingPointError, match=r"step 1: .*not finite at samples s"):
                trainer.step(0)
            with trainer.engine.whole():
                assert_bit_equal(parameters(drafter), before)


def test_two_ranks_at_zero_3(tmp_path: Path) -> None:
    """Uneven shares, a rank without a sequence, an interruption: gradients and numbers of one rank (cases.md 7, 69, 80,
    81, 88, 90); what two began one ends."""
    uneven, lonely = Scenario("zero3"), Scenario("zero3", "eagle3", sequences=1)
    cut, whole = replace(CUT, config="zero3", stops=(4,), ends=False), replace(CUT, stops=())
    asked = [("first_step", uneven), ("first_step", lonely), ("trained", cut)]
    found = in_ranks(tmp_path, 2, *asked)
    for scenario in (uneven, lonely):
        assert_equal_steps(found[f"first_step {scenario.name}"], first_step(replace(scenario, config="zero0")))
    ended = trained(whole, tmp_path / cut.name)
    assert_close(ended["parameters"], trained(whole, tmp_path / "whole")["parameters"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"fp16": {"enabled": true}}', "asks for fp16"),
        ('{"bf16": {"enabled": true}}', "asks for bf16 at ZeRO 0"),
        (
            '{"bf16": {"enabled": true, "check_grad_overflow": false}, "zero_optimization": {"stage": 1}}',
            "has 'check_grad_overflow' off",
        ),
        ('{"zero_optimization": {"stage": 4}}', "no ZeRO stage of 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "needs ZeRO stage 3"),
        ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}', "only cpu"),
        ('{"gradient_clipping": 1.0, "scheduler": {}}', "sets gradient_clipping, scheduler"),
        ("[3]", "is no JSON object"),
        ("{", "is no JSON:"),
    ],
)
def test_what_a_config_may_not_say(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(text)
    with pytest.raises(InputError, match=complaint) as caught:
        deepspeed_config(str(file))
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)
