"""LoRA drafters: the adapter alone is trained, saved folders are merged, resume is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exittrain.config.load import load_recipe
from exittrain.drafters.adapter import add_adapter
from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.records.run_folder import RunFolder
from exittrain.stages.context import StageContext, key_parts
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.loop import Hooks, train
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings

IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def target() -> TargetModel:
    made = make_causal_lm(48, 32, 3, 2, 48, seed=1, name="tiny")
    return TargetModel(made.module.requires_grad_(False), None, "tiny", verify=False)


def make(tied: bool = True, dtype: torch.dtype = torch.float32) -> Drafter:
    return CausalDrafter(make_causal_lm(48, 32, 2, 2, 48, tie_embeddings=tied, dtype=dtype, name="draft"))


def trained(drafter: Drafter) -> None:
    """Adapters as after training: both factors far from zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.trainable_parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_at_the_start_nothing_changes_and_only_the_adapter_is_trained() -> None:
    drafter = make()
    before, state = drafter.head(drafter.model.hidden(IDS)), torch.get_rng_state()
    add_adapter(drafter, 4, 8.0, "all-linear", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drafter.head(drafter.model.hidden(IDS)), before)
    names = [name for name, p in drafter.model.module.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 7 and all(".lora_" in name for name in names)  # A and B, layers, linear layers
    assert not any("lm_head" in name for name in names)
    with pytest.raises(InputError, match="an adapter already"):
        add_adapter(drafter, 4, 8.0, "all-linear", seed=0)


@pytest.mark.parametrize(("tied", "targets"), [(True, "all-linear"), (False, ["q_proj", "lm_head"])])
def test_a_saved_drafter_is_merged_and_trains_on(
    target: TargetModel, tmp_path: Path, tied: bool, targets: list[str] | str
) -> None:
    drafter = make(tied)
    names = set(drafter.model.module.state_dict())
    plain = drafter.head(drafter.model.hidden(IDS))
    add_adapter(drafter, 4, 8.0, targets, seed=0)
    trained(drafter)
    ours = drafter.head(drafter.model.hidden(IDS))
    folder = drafter.save(tmp_path / "d")
    assert torch.equal(drafter.head(drafter.model.hidden(IDS)), ours) and not torch.allclose(ours, plain, atol=1e-2)
    again = load_drafter(folder, target)
    assert set(again.model.module.state_dict()) == names and again.model.match is not None
    assert again.model.match.extra == () and all(p.requires_grad for p in again.model.module.parameters())
    torch.testing.assert_close(again.head(again.model.hidden(IDS)), ours, atol=1e-5, rtol=1e-5)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != tied


def test_merging_into_bfloat16_is_one_rounding(tmp_path: Path) -> None:
    """Each weight within half a unit in the last place of the float32 sum: 2^-8 of its power of two."""
    drafter = make(dtype=torch.bfloat16)
    add_adapter(drafter, 4, 8.0, ["q_proj"], seed=0)
    trained(drafter)
    layer = drafter.model.module.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    saved = load_file(drafter.save(tmp_path / "d") / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert saved.dtype == torch.bfloat16
    error = (saved.double() - exact.detach()).abs()
    assert bool((error <= exact.detach().abs() * 2**-8 * (1 + 1e-4) + 1e-7).all()) and float(error.max()) > 0


def test_a_layers_drafter_keeps_its_shared_embeddings(target: TargetModel, tmp_path: Path) -> None:
    drafter = load_drafter("layers:2", target)
    frozen = drafter.frozen_names()
    add_adapter(drafter, 2, 4.0, ["v_proj"], seed=0)
    trained(drafter)
    again = load_drafter(drafter.save(tmp_path / "d"), target)
    assert again.frozen_names() == frozen != ()
    assert again.model.embeddings.weight.data_ptr() == target.embeddings.weight.data_ptr()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], "the head 'lm_head', which is tied to the embedding"),
        (["q_proj", "embed_tokens"], "the embedding 'embed_tokens' is not supported"),
        (["qproj"], "has no layer 'qproj' .*q_proj"),
        (["norm"], "'norm' is no linear layer"),
    ],
)
def test_what_cannot_carry_an_adapter(targets: list[str], message: str) -> None:
    drafter = make()
    with pytest.raises(InputError, match=f"LoRA.*{message}") as caught:
        add_adapter(drafter, 4, 8.0, targets, seed=0)
    assert "\n" not in str(caught.value) and all(p.requires_grad for p in drafter.trainable_parameters())


def run(target: TargetModel, folder: Path, steps: int, stop_at: int | None = None) -> Drafter:
    """`steps` steps of token training of a fresh drafter with an adapter; stop_at: as if killed after that step."""
    rows = [
        {"sequence_id": f"s{i}", "token_ids": list(range(i, i + 9)), "loss_mask": [0] * 2 + [1] * 7} for i in range(8)
    ]
    sequences, drafter = SequenceSet.from_rows(rows), make()
    add_adapter(drafter, 4, 8.0, "all-linear", seed=5)
    settings = LoopSettings(steps=steps, batch_size=4, lr=1e-2, save_every=2)
    task = DrafterTask(drafter, target, sequences, settings, LossSettings())
    if stop_at is not None:
        prepare = task.prepare

        def killed(step: int) -> object:
            if step == stop_at:
                raise KeyboardInterrupt
            return prepare(step)

        task.prepare = killed  # type: ignore[method-assign,assignment]
    train(task, settings, folder, {}, Hooks())
    return drafter


def test_a_resumed_run_is_bit_equal_and_its_checkpoint_holds_the_adapter(target: TargetModel, tmp_path: Path) -> None:
    whole = run(target, tmp_path / "whole", 6)
    base = make().model.module.state_dict()
    for name, tensor in whole.model.module.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(tensor, base[name.replace(".base_layer.", ".")])
    assert any(bool((p != 0).any()) for n, p in whole.model.module.named_parameters() if ".lora_B." in n)
    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path / "cut", 6, stop_at=5)
    (checkpoint,) = sorted((tmp_path / "cut").glob("step-*"))[-1:]
    stored = torch.load(checkpoint / "model.pt", weights_only=True)["parameters"]
    assert stored and all(".lora_" in name for name in stored)
    resumed = run(target, tmp_path / "cut", 6)
    for ours, theirs in zip(resumed.trainable_parameters(), whole.trainable_parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_recipes_without_lora_keep_their_keys_and_with_it_get_others(tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[1] / "fixtures" / "tiny.yaml"
    plain, small, large = (
        StageContext(load_recipe(recipe, changes), RunFolder(tmp_path))
        for changes in ([], ["train.lora.rank=2"], ["train.lora.rank=4", "train.lora.targets=[q_proj]"])
    )
    assert "lora" not in key_parts(plain, "train/token")["section"]
    assert len({context.stage_key("train/token") for context in (plain, small, large)}) == 3
    assert len({context.stage_key("warmup") for context in (plain, small, large)}) == 1
    with pytest.raises(InputError, match=r"targets"):
        load_recipe(recipe, ["train.lora.targets=q_proj"])
