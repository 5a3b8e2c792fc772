"""From a name to a model: what works, and one clear line for what does not."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tiny_models import tiny_target

from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.models.loading import load_vocabulary
from exittrain.models.target import TargetModel


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "tiny"
    tiny_target().module.save_pretrained(place)
    return place


def test_a_folder_gives_the_same_numbers_in_both_attentions(folder):
    ids = torch.tensor([[3, 4, 5, 6]])
    sdpa, eager = (TargetModel.from_pretrained(folder, attention=name) for name in ("sdpa", "eager"))
    assert isinstance(sdpa, TargetModel) and sdpa.name == "tiny" and sdpa.tokenizer is None
    assert sdpa.max_positions == 256 and sdpa.eos_token_ids == [2] and sdpa.vocab_size == 64
    assert not any(parameter.requires_grad for parameter in sdpa.module.parameters())
    assert torch.equal(sdpa.hidden(ids), tiny_target().hidden(ids))
    torch.testing.assert_close(sdpa.hidden(ids), eager.hidden(ids), atol=1e-5, rtol=0)


def test_fingerprint_follows_the_numbers_not_the_place(folder):
    model = CausalModel.from_pretrained(folder)
    moved = folder.with_name("elsewhere")
    shutil.move(folder, moved)
    again = CausalModel.from_pretrained(moved, attention="eager")
    before = again.fingerprint()
    assert model.fingerprint() == before == again.fingerprint() and len(before) == 64
    with torch.no_grad():
        again.embeddings.weight[0, 0] += 1
    assert again.fingerprint() != before


def test_eos_ids_come_from_the_generation_config_first(folder):
    model = CausalModel.from_pretrained(folder)
    model.module.generation_config.eos_token_id = [2, 0]
    assert model.eos_token_ids == [2, 0]


def damage_cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_missing(folder):
    (folder / "model.safetensors").unlink()


def damage_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_shape(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_name(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.nrom.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_shard(folder):
    tiny_target().module.save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def index_of(placed):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def damage_index(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def damage_config(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-thing"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "model.safetensors is damaged or cut short"),
        (damage_missing, "model.safetensors is missing"),
        (damage_tensor, "lacks 1 weights, first model.norm.weight"),
        (damage_shape, r"has 1 weights of another shape .* first model.norm.weight \(\(\d+,\), not \(\d+,\)\)"),
        (damage_name, r"lacks 1 weights, first model.norm.weight.*; it has 1 .* no place for, first model.nrom.weight"),
        (damage_shard, r"model-00002-of-\d+.safetensors is missing"),
        (damage_index, "index.json cannot be read"),
        (index_of([1]), "index.json cannot be read"),
        (index_of({"a": None}), "puts a into None, which is no file beside it"),
        (index_of({"a": "../other/model.safetensors"}), "puts a into '../other/model.safetensors', which is no file"),
        (damage_config, "cannot be loaded as a causal LM"),
    ],
)
def test_damaged_folders_are_named_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        CausalModel.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_what_matched_and_what_is_extra_is_said(folder):
    from safetensors.torch import load_file, save_file

    whole = CausalModel.from_pretrained(folder).match
    assert whole.extra == () and str(whole).endswith("tensors matched, none missing, none extra")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.bias": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    more = CausalModel.from_pretrained(folder).match
    assert more.matched == whole.matched == len(tensors) and more.extra == ("model.bias",)
    assert str(more).endswith("none missing, 1 extra and ignored, first model.bias")


def test_a_vocabulary_needs_no_weights(folder):
    assert tuple(load_vocabulary(folder)) == ("tiny", 64, None)
    with pytest.raises(InputError, match="does not exist"):
        load_vocabulary(folder / "absent")


def test_places_that_are_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for source, message in [
        (tmp_path / "absent", "does not exist"),
        ("model.gguf", "does not exist"),
        (tmp_path / "notes.txt", "not a .gguf"),
        (tmp_path, "neither a config.json nor a GGUF file"),
    ]:
        with pytest.raises(InputError, match=message):
            CausalModel.from_pretrained(source)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InputError, match="2 GGUF files, name one"):
        CausalModel.from_pretrained(tmp_path)
    (tmp_path / "b.gguf").unlink()
    with pytest.raises(InputError, match="cannot be loaded"):
        CausalModel.from_pretrained(tmp_path)


def test_a_name_the_hub_cannot_give_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="did you mean 'smollm2-135m'") as caught:
        CausalModel.from_pretrained("smollm2-135")
    assert "\n" not in str(caught.value)


def test_longrope_limits_the_context_to_its_original_length():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    assert tiny_target(rope_parameters=rope).max_positions == 128
