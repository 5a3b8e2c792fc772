"""Heads on disk: names and configs of every form, and round trips (what may be wrong: test_format_faults.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import (
    LLAMA3,
    block_config,
    eagle_config,
    edit_config,
    edit_tensors,
    make_head,
    random_ids,
    random_tensors,
    write_form,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exittrain.drafters.formats import is_head_folder, read_head
from exittrain.drafters.formats.tensors import ids_of, offsets_of
from exittrain.drafters.head_config import HeadConfig
from exittrain.errors import InputError

LAYER = [
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]  # fmt: skip
EAGLE = ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
GOLDEN = {
    "speculators": EAGLE + [f"layers.0.{name}" for name in [*LAYER, "hidden_norm.weight"]],
    "sglang": EAGLE + [f"midlayer.{name}" for name in [*LAYER, "hidden_norm.weight"]],
    "dflash": ["fc.weight", "hidden_norm.weight", "norm.weight"]
    + [
        f"layers.{i}.{name}"
        for i in range(2)
        for name in [*LAYER, "self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    ],
}
FORMS = [
    ("speculators", eagle_config),
    ("sglang", eagle_config),
    ("speculators", block_config),
    ("dflash", block_config),
]
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.mark.parametrize("form", list(GOLDEN))
def test_tensor_names_of_every_form(tmp_path: Path, form: str) -> None:
    folder = make_head(tmp_path / "head", form, block_config() if form == "dflash" else eagle_config())
    with safe_open(folder / "model.safetensors", framework="pt") as reader:
        assert sorted(reader.keys()) == sorted(GOLDEN[form]) and reader.metadata() == {"format": "pt"}


def test_tensor_names_of_options(tmp_path: Path) -> None:
    """What each option adds, beside the lists above."""
    pruned = load_file(make_head(tmp_path / "b", config=block_config(draft_vocab_size=24)) / "model.safetensors")
    assert sorted(pruned) == sorted([*GOLDEN["dflash"], "lm_head.weight", "d2t", "t2d"])
    added = {
        "norm_before_fc": {"input_norm.weight": (96,)},
        "fc_norm": {f"fc_norm.{i}.weight": (32,) for i in range(3)},
        "fc_bias": {"fc.bias": (32,)},
        "attention_bias": {f"layers.0.self_attn.{p}_proj.bias": (16 if p in "kv" else 32,) for p in "qkvo"},
        "mlp_bias": {f"layers.0.mlp.{p}_proj.bias": (n,) for p, n in (("gate", 48), ("up", 48), ("down", 32))},
    }
    for option, expected in added.items():
        found = load_file(make_head(tmp_path / option, config=eagle_config(**{option: True})) / "model.safetensors")
        assert {n: tuple(t.shape) for n, t in found.items() if n not in GOLDEN["speculators"]} == expected
    full = load_file(make_head(tmp_path / "full", config=eagle_config(draft_vocab_size=64)) / "model.safetensors")
    assert sorted(full) == sorted(set(GOLDEN["speculators"]) - {"d2t", "t2d"})
    deep = load_file(
        make_head(tmp_path / "deep", config=eagle_config(num_layers=2, style="qwen3")) / "model.safetensors"
    )
    assert deep["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    assert deep["layers.1.self_attn.q_proj.weight"].shape == (32, 32) and "layers.1.hidden_norm.weight" not in deep
    assert deep["layers.1.self_attn.q_norm.weight"].shape == (8,)


@pytest.mark.parametrize(("form", "config"), FORMS)
@pytest.mark.parametrize("changes", [{}, {"rope_parameters": LLAMA3, "head_dim": 24, "hidden_act": "gelu"}])
def test_what_is_written_is_what_is_read(
    tmp_path: Path, form: str, config: Callable[..., HeadConfig], changes: dict[str, Any]
) -> None:
    made = config(**changes)
    tensors, ids = random_tensors(made), random_ids(made)
    read = read_head(write_form(tmp_path / "head", form, made, tensors, ids))
    assert read.config == made and read.form == form and read.extra == () and read.embed_tokens is None
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    assert (read.draft_ids is None and ids is None) or torch.equal(read.draft_ids, ids)


@pytest.mark.parametrize("option", [*FLAGS, "fc_bias", "attention_bias", "mlp_bias"])
def test_every_option_comes_back(tmp_path: Path, option: str) -> None:
    on, off = eagle_config(**{option: True}), eagle_config()
    folders = [make_head(tmp_path / name, config=config) for name, config in (("on", on), ("off", off))]
    assert (folders[0] / "config.json").read_text() != (folders[1] / "config.json").read_text()
    assert [read_head(folder).config for folder in folders] == [on, off]


def test_the_speculators_config_leaves_nothing_to_a_default(tmp_path: Path) -> None:
    eagle = json.loads(
        (make_head(tmp_path / "e", config=eagle_config(rope_parameters=LLAMA3)) / "config.json").read_text()
    )
    assert [eagle[flag] for flag in FLAGS] == [False] * 4
    assert eagle["embed_requires_grad"] is False and eagle["tie_word_embeddings"] is False
    assert eagle["speculators_model_type"] == "eagle3" and eagle["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert (eagle["draft_vocab_size"], eagle["dtype"], eagle["torch_dtype"]) == (24, "float32", "float32")
    stated = eagle["speculators_config"]
    assert stated["verifier"]["name_or_path"] == "some/target" and stated["algorithm"] == "eagle3"
    assert stated["default_proposal_method"] == stated["proposal_methods"][0]["proposal_type"] == "greedy"
    layer = eagle["transformer_layer_config"]
    assert layer["vocab_size"] == 64 and layer["num_hidden_layers"] == 1 and layer["model_type"] == "llama"
    assert layer["rope_parameters"] == LLAMA3 and layer["rope_theta"] == 5e5
    assert layer["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    block = json.loads((make_head(tmp_path / "b", config=block_config()) / "config.json").read_text())
    assert block["speculators_model_type"] == "dflash" and block["sample_from_anchor"] is False
    assert (block["block_size"], block["mask_token_id"], block["aux_hidden_state_layer_ids"]) == (4, 63, [2, 3, 5])
    assert block["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert block["transformer_layer_config"]["model_type"] == "qwen3"
    assert block["transformer_layer_config"]["layer_types"] == ["full_attention"] * 2


def test_layer_ids_change_by_one_at_the_border(tmp_path: Path) -> None:
    flat = json.loads((make_head(tmp_path / "flat", "sglang") / "config.json").read_text())
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert flat["architectures"] == ["LlamaForCausalLMEagle3"] and flat["vocab_size"] == 64
    zlab = json.loads((make_head(tmp_path / "zlab", "dflash", block_config()) / "config.json").read_text())
    assert zlab["dflash_config"] == {"mask_token_id": 63, "target_layer_ids": [1, 2, 4]}
    assert zlab["num_target_layers"] == 6 and zlab["architectures"] == ["DFlashDraftModel"]


def test_feature_layers_that_no_file_names_are_the_servers_default(tmp_path: Path) -> None:
    """Twelve layers: hidden states 2, 6 and 9, whichever server reads it."""
    edit_config(make_head(tmp_path / "flat", "sglang"), lambda data: data.pop("eagle_config"))
    edit_config(make_head(tmp_path / "spec"), lambda data: data.update(eagle_aux_hidden_state_layer_ids=None))
    for name in ("flat", "spec"):
        assert read_head(tmp_path / name, 12).config.feature_layers == (2, 6, 9)
        with pytest.raises(InputError, match="names no feature layers"):
            read_head(tmp_path / name)


def test_offsets_and_ids() -> None:
    offsets = torch.tensor([0, 2, 5])
    assert ids_of(offsets).tolist() == [0, 3, 7] and offsets_of(torch.tensor([0, 3, 7])).tolist() == [0, 2, 5]


def test_the_stored_vocabulary_is_offsets_and_marks(tmp_path: Path) -> None:
    config = eagle_config(vocab_size=8, draft_vocab_size=3)
    folder = write_form(tmp_path / "h", "speculators", config, random_tensors(config), torch.tensor([0, 3, 7]))
    stored = load_file(folder / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64 and stored["d2t"].tolist() == [0, 2, 5]
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero()[:, 0].tolist() == [0, 3, 7]
    assert read_head(folder).draft_ids.tolist() == [0, 3, 7]
    edit_tensors(folder, lambda tensors: tensors.pop("t2d"))  # servers do without
    assert read_head(folder).draft_ids.tolist() == [0, 3, 7]


def test_embeddings_of_its_own_come_along(tmp_path: Path) -> None:
    folder, embeddings = make_head(tmp_path / "head"), torch.randn(64, 32)
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": embeddings}))
    read = read_head(folder)
    assert torch.equal(read.embed_tokens, embeddings) and "embed_tokens.weight" not in read.tensors
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": embeddings[:60]}))
    with pytest.raises(InputError, match=r"embed_tokens.weight has shape \(60, 32\), its config asks for \(64, 32\)"):
        read_head(folder)
    block = make_head(tmp_path / "block", "speculators", block_config())
    edit_tensors(block, lambda tensors: tensors.update({"embed_tokens.weight": embeddings}))
    assert read_head(block).embed_tokens is None and read_head(block).extra == ("embed_tokens.weight",)


def test_extra_tensors_are_named(tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head")
    more = {"verifier_norm.weight": torch.ones(32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(folder, lambda tensors: tensors.update(more))
    assert read_head(folder).extra == tuple(sorted(more))


def test_shards_and_the_eagle_runtime_s_file(tmp_path: Path) -> None:
    whole = read_head(make_head(tmp_path / "a", "sglang"))
    stored = load_file(tmp_path / "a" / "model.safetensors")
    names = sorted(stored)
    placed = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: stored[name] for name in names if placed[name] == file}, tmp_path / "a" / file)
    (tmp_path / "a" / "model.safetensors").unlink()
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    sharded = read_head(tmp_path / "a")
    torch.save(stored, tmp_path / "a" / "pytorch_model.bin")
    for file in (index, *(tmp_path / "a" / file for file in set(placed.values()))):
        file.unlink()
    old = read_head(tmp_path / "a")
    for read in (sharded, old):
        assert all(torch.equal(read.tensors[name], tensor) for name, tensor in whole.tensors.items())
        assert torch.equal(read.draft_ids, whole.draft_ids)
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"pytorch_model.bin is damaged"):
        read_head(tmp_path / "a")


class Unsafe:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    make_head(tmp_path / "a", "sglang")
    (tmp_path / "a" / "model.safetensors").unlink()
    torch.save({"fc.weight": Unsafe(tmp_path / "mark")}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is damaged"):
        read_head(tmp_path / "a")
    assert not (tmp_path / "mark").exists()


def test_an_index_that_names_a_tensor_no_shard_holds(tmp_path: Path) -> None:
    folder = make_head(tmp_path / "a")
    names = [*load_file(folder / "model.safetensors"), "lost.weight"]
    placed = dict.fromkeys(names, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(InputError, match="damaged or cut short"):
        read_head(folder)


def test_head_folders_are_told_from_models(tmp_path: Path) -> None:
    for index, (form, maker) in enumerate(FORMS):
        assert is_head_folder(make_head(tmp_path / str(index), form, maker()))
    other = tmp_path / "model"
    other.mkdir()
    assert not is_head_folder(other) and not is_head_folder(tmp_path / "nowhere")
    for text in ('{"architectures": ["LlamaForCausalLM"]}', "[]", "{", '{"architectures": null}'):
        (other / "config.json").write_text(text)
        assert not is_head_folder(other)
