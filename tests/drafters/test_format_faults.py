"""Each way in which a head's folder may be wrong: refused in one line that names the thing; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import block_config, eagle_config, edit_config, edit_tensors, make_head, random_ids, random_tensors

from exittrain.drafters.formats import is_head_folder, read_head, write_head
from exittrain.drafters.formats.tensors import ids_of
from exittrain.errors import InputError

Damage = Callable[[Path], object]


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return lambda folder: edit_tensors(folder, edit)


def config(edit: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edit_config(folder, edit)


def turn_by(data: dict[str, Any], rope: dict[str, Any]) -> None:
    layer = data["transformer_layer_config"]
    layer.pop("rope_parameters", None)
    layer.update(rope_scaling=rope)


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-40])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors is damaged or cut short"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing or cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is missing or cannot be read"),
        (tensors(lambda t: t.pop("lm_head.weight")), "lacks 1 tensors that its config asks for, first lm_head.weight"),
        (
            tensors(lambda t: t.update({"norm.wieght": t.pop("norm.weight")})),
            "first norm.weight; it has 1 with no place in it, first norm.wieght",
        ),
        (
            tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()})),
            r"fc.weight has shape \(32, 64\), its config asks for \(32, 96\)",
        ),
        (tensors(lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int32)})), "norm.weight is torch.int32"),
        (tensors(lambda t: t.update({"fc.bias": torch.ones(32)})), "holds fc.bias, for which its config has no place"),
        (
            tensors(lambda t: t.update({"layers.0.self_attn.q_norm.weight": torch.ones(8)})),
            "holds layers.0.self_attn.q_norm.weight",
        ),
        (tensors(lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.ones(1)})), "up_proj.weight twice"),
        (tensors(lambda t: t.pop("d2t")), r"24 of 64 tokens but does not say which \(d2t\)"),
        (tensors(lambda t: t.update({"d2t": ids_of(t["d2t"])})), "must be 24 different ids from 0 to 63"),
        (tensors(lambda t: t.update({"d2t": t["d2t"].flip(0).contiguous()})), "must be 24 different ids from 0 to 63"),
        (tensors(lambda t: t.update({"d2t": t["d2t"] + 40})), "must be 24 different ids from 0 to 63"),
        (tensors(lambda t: t.update({"d2t": t["d2t"].float()})), "d2t is torch.float32"),
        (tensors(lambda t: t.update({"d2t": torch.zeros(24, dtype=torch.int64)})), "d2t and t2d name different tokens"),
        (tensors(lambda t: t.update({"t2d": t["t2d"].roll(1)})), "d2t and t2d name different tokens"),
        (tensors(lambda t: t.update({"t2d": t["t2d"][:60].contiguous()})), "t2d has 60 entries"),
        (config(lambda c: c.pop("norm_before_residual")), "norm_before_residual is missing"),
        (config(lambda c: c.update(norm_output="yes")), "norm_output is 'yes', no true or false"),
        (config(lambda c: c.update(norm_before_fc=True, fc_norm=True)), "exclude each other"),
        (config(lambda c: c.pop("draft_vocab_size")), "draft_vocab_size is missing"),
        (config(lambda c: c.pop("transformer_layer_config")), "transformer_layer_config is missing"),
        (config(lambda c: c["transformer_layer_config"].pop("hidden_size")), "hidden_size is missing"),
        (config(lambda c: c["transformer_layer_config"].update(hidden_size="wide")), "hidden_size"),
        (config(lambda c: c["transformer_layer_config"].update(model_type="gemma")), "model_type 'gemma'"),
        (config(lambda c: c["transformer_layer_config"].update(rope_theta=77.0)), "contradict rope_theta"),
        (config(lambda c: c["transformer_layer_config"].update(layer_types=["sliding_attention"])), "sliding-window"),
        (config(lambda c: c["transformer_layer_config"].update(num_key_value_heads=0)), "num_key_value_heads is 0"),
        (config(lambda c: c["transformer_layer_config"].update(rms_norm_eps=float("inf"))), "rms_norm_eps is inf"),
        (config(lambda c: c["transformer_layer_config"].update(max_position_embeddings=-1)), "embeddings is -1"),
        (config(lambda c: c["transformer_layer_config"].update(hidden_act="foo")), "hidden_act 'foo' is not known"),
        (config(lambda c: turn_by(c, {"type": "foo", "factor": 2})), "rope_type 'foo' is not known"),
        (config(lambda c: c.update(draft_vocab_size=float("inf"))), "draft_vocab_size is inf, no whole number"),
        (config(lambda c: c.update(draft_vocab_size="24")), "draft_vocab_size is '24', no whole number"),
        (config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2.6, 3, 4])), "a feature layer is 2.6, no whole"),
        (tensors(lambda t: t.update({"lm_head.bias": torch.ones(24)})), "holds lm_head.bias"),
        (config(lambda c: c.update(speculators_model_type="mtp")), "of a form that cannot be read .mtp."),
        (config(lambda c: c.update(quantization_config={"bits": 4})), "is quantised"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = make_head(tmp_path / "head")
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        read_head(folder)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("form", "edit", "message"),
    [
        ("sglang", lambda c: c.update(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
        ("sglang", lambda c: c.update(bias=True), "lacks 1 tensors that its config asks for, first fc.bias"),
        ("sglang", lambda c: c.update(model_type="llama4_text"), "model_type 'llama4_text'"),
        ("sglang", lambda c: c.update(architectures=["LlamaForCausalLMEagle"]), "of a form that cannot be read"),
        ("dflash", lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids is missing"),
        ("dflash", lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
        ("dflash", lambda c: c.pop("block_size"), "block_size is missing"),
        ("dflash", lambda c: c["dflash_config"].update(selector_rank=8), "selector_rank, which is not supported"),
        ("dflash", lambda c: c.update(is_causal=True), "attends causally"),
        ("dflash", lambda c: c.update(architectures=["DFlash2DraftModel"]), "of a form that cannot be read"),
    ],
)
def test_what_is_wrong_in_other_forms(
    tmp_path: Path, form: str, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = make_head(tmp_path / "head", form, block_config() if form == "dflash" else eagle_config())
    edit_config(folder, edit)
    assert is_head_folder(folder)
    with pytest.raises(InputError, match=message) as caught:
        read_head(folder)
    assert "\n" not in str(caught.value)


def test_a_block_drafter_for_a_target_of_another_depth_is_refused(tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", "dflash", block_config())
    assert read_head(folder, 6).config == read_head(folder).config
    with pytest.raises(InputError, match="made for a target of 6 layers, not of 8"):
        read_head(folder, 8)


def test_a_block_drafter_that_predicts_from_its_anchor_is_refused(tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", "speculators", block_config())
    edit_config(folder, lambda data: data.update(sample_from_anchor=True))
    with pytest.raises(InputError, match="sample_from_anchor is not supported"):
        read_head(folder)


def test_a_pruned_vocabulary_needs_a_head_of_its_own(tmp_path: Path) -> None:
    """The target's output head has V rows: sharing it with D columns cannot be."""
    folder = make_head(tmp_path / "head", "speculators", block_config(draft_vocab_size=24))
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(InputError, match=r"first lm_head\.weight"):
        read_head(folder)
    made = block_config(draft_vocab_size=24)
    kept = {name: tensor for name, tensor in random_tensors(made).items() if name != "lm_head.weight"}
    with pytest.raises(InputError, match=r"first lm_head\.weight"):
        write_head(folder, made, kept, random_ids(made), "some/target")


@pytest.mark.parametrize(
    ("change", "ids", "message"),
    [
        (lambda t: t.pop("norm.weight"), ..., "lacks 1 tensors .* first norm.weight"),
        (lambda t: t.update({"fc.bias": torch.ones(32)}), ..., "holds fc.bias"),
        (lambda t: t.update({"other": torch.ones(3)}), ..., "a tensor other that its config does not know"),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), ..., r"norm.weight has shape \(31,\)"),
        (lambda t: None, None, "does not say which"),
        (lambda t: None, torch.arange(24).flip(0), "24 different ids"),
        (lambda t: None, torch.arange(41, 65), "24 different ids from 0 to 63"),
    ],
)
def test_what_does_not_fit_is_not_written(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], ids: Any, message: str
) -> None:
    made = eagle_config()
    given = random_tensors(made)
    change(given)
    with pytest.raises(InputError, match=message):
        write_head(tmp_path, made, given, random_ids(made) if ids is ... else ids, "some/target")
    assert list(tmp_path.iterdir()) == []
