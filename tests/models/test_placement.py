"""A model whose layers lie in several places gives the numbers of one that is whole."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_run import recipe_of
from tiny_target import make_target
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    T5Config,
)

from exittrain import decode, load_drafter
from exittrain.config.load import load_recipe
from exittrain.drafters.layers import copy_layers
from exittrain.errors import InputError
from exittrain.models.placement import DISK, Spread, device_map, layers_name, process_gpus, process_spread
from exittrain.models.target import TargetModel
from exittrain.records.run_folder import RunFolder
from exittrain.runtime import ranks
from exittrain.stages.context import StageContext
from exittrain.stages.run import run_stage

CPU = (torch.device("cpu"),)
GPUS = (torch.device("cuda", 1), torch.device("cuda", 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("spread") / "target")


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, stored in bfloat16, in a folder of its own."""
    place = tmp_path_factory.mktemp("spread") / "qwen"
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(place)
    return place


def room_for(folder: Path, layers: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the ends and of so many layers."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    whole = sum(p.numel() * p.element_size() for p in model.parameters()) + 4096  # rotary tables
    each = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    return whole - (len(model.model.layers) - layers) * each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_layers_on_disk(four_layers: Path, layers: int, dtype: torch.dtype) -> None:
    """States, features, logits, identity and a cached tree are those of the whole model."""
    whole = TargetModel.from_pretrained(four_layers, dtype)
    spread = TargetModel.from_pretrained(
        four_layers, dtype, spread=Spread(CPU, {"cpu": room_for(four_layers, layers, dtype)})
    )
    places = [parameter.device.type for parameter in spread.module.model.layers.parameters()]
    assert places.count("meta") == (4 - layers) * 11 and spread.device.type == "cpu"
    ids = torch.arange(12)[None]
    assert torch.equal(spread.hidden(ids), whole.hidden(ids))
    assert torch.equal(spread.head(spread.hidden(ids)), whole.head(whole.hidden(ids)))
    for ours, theirs in zip(spread.states((1, 3)).of(ids[0]), whole.states((1, 3)).of(ids[0]), strict=True):
        assert torch.equal(ours, theirs)
    assert spread.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("form", ["experts", "bin"])
def test_layers_that_the_files_hold_in_another_form(form: str, four_layers: Path, tmp_path: Path) -> None:
    """Experts stored one by one, and files that are no safetensors: a copy lies on disk while the model lives."""
    if form == "bin":
        model = AutoModelForCausalLM.from_pretrained(four_layers)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        model.config.save_pretrained(tmp_path)
    else:
        config = Qwen3MoeConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=128,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    copies = Path(tempfile.gettempdir())
    before, whole = set(copies.glob("exittrain-layers-*")), TargetModel.from_pretrained(tmp_path)
    spread = TargetModel.from_pretrained(tmp_path, spread=Spread(CPU, {"cpu": room_for(tmp_path, 1)}))
    assert any(parameter.device.type == "meta" for parameter in spread.module.parameters())
    ids = torch.arange(12)[None]
    assert torch.equal(spread.hidden(ids), whole.hidden(ids))
    assert spread.fingerprint() == whole.fingerprint()
    (made,) = set(copies.glob("exittrain-layers-*")) - before
    assert list(made.iterdir())
    del spread
    gc.collect()
    assert not made.exists()


def test_decoding_and_drafters_of_its_layers(folder: Path) -> None:
    whole = TargetModel.from_pretrained(folder)
    spread = TargetModel.from_pretrained(folder, spread=Spread(CPU, {"cpu": room_for(folder, 1)}))
    answers = []
    for target in (whole, spread):
        drafter = copy_layers(target, [1], share_embeddings=False)
        assert not any(parameter.device.type == "meta" for parameter in drafter.model.module.parameters())
        prompts = [list(b"hello"), list(b"to")]
        out = decode(target, drafter, prompts, budget=6, depth=3, max_new_tokens=12, verifier="tev", temperature=0.0)
        answers.append([one.token_ids for one in out])
    assert answers[0] == answers[1]


def test_placement_fills_devices_in_order(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends on the first GPU, every module once, what is left over in host memory and then on disk."""
    config, ends, one = AutoConfig.from_pretrained(four_layers), room_for(four_layers, 0), room_for(four_layers, 1)
    layer = one - ends
    rooms: dict[int | str, int | str] = {1: one + layer // 2, 3: layer, "cpu": layer}
    places = device_map(config, torch.float32, Spread(GPUS, rooms))
    assert places == {
        "model.embed_tokens": 1, "model.norm": 1, "model.rotary_emb": 1, "lm_head": 1,
        "model.layers.0": 1, "model.layers.1": 3, "model.layers.2": "cpu", "model.layers.3": DISK,
    }  # fmt: skip
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (40 << 30, 80 << 30))
    everything = device_map(config, torch.float32, Spread(GPUS))
    assert set(everything.values()) == {1}
    other = GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    names = device_map(other, torch.float32, Spread(GPUS)).keys()
    assert {"transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head", "transformer.h.2"} < names


def test_layers_are_those_of_the_text() -> None:
    """A vision tower that has as many."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower = {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config={**sizes, "vocab_size": 61, "head_dim": 16}, vision_config={**sizes, **tower})
    with torch.device("meta"):
        assert layers_name(AutoModelForCausalLM.from_config(config)) == "model.language_model.layers"


def test_each_process_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of host memory, which the cache of files does not take away, and of what max_memory says of all GPUs."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=80 << 30, free=1 << 30))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (10 << 30, 80 << 30))
    given: dict[int | str, int | str] = {0: "1GiB", 1: "2GiB", 2: "3GiB"}
    ours, theirs = (process_spread(torch.device("cuda", gpu), 2, given).rooms() for gpu in (0, 1))
    assert ours == [(0, 1 << 30), (2, 3 << 30), ("cpu", int((40 << 30) * 0.85))]
    assert theirs[:2] == [(1, 2 << 30), (3, int((10 << 30) * 0.85))]
    with pytest.raises(InputError, match="max_memory names device 7, this process may use 1, 3, cpu"):
        process_spread(torch.device("cuda", 1), 2, {7: "1GiB"}).rooms()
    assert process_spread(torch.device("cpu"), 2, {}).rooms() == [("cpu", int((40 << 30) * 0.6))]


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"embeddings, norm and head take .* GiB, device cpu has .*raise max_memory"):
        TargetModel.from_pretrained(folder, spread=Spread(CPU, {"cpu": 100}))
    with pytest.raises(InputError, match="max_memory names device 7, this process may use cpu"):
        TargetModel.from_pretrained(folder, spread=Spread(CPU, {7: "1GiB"}))
    for bad in ("much", "infGiB", "-1GiB", -1):
        with pytest.raises(InputError, match=f"max_memory of cpu is {bad!r}: a number of bytes, or such as 40GiB"):
            TargetModel.from_pretrained(folder, spread=Spread(CPU, {"cpu": bad}))
    T5Config(num_layers=2).save_pretrained(tmp_path / "t5")
    shutil.copy(folder / "model.safetensors", tmp_path / "t5")
    with pytest.raises(InputError, match="t5 cannot be spread over devices: Unrecognized configuration class"):
        TargetModel.from_pretrained(tmp_path / "t5", spread=Spread(CPU))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="GGUF file, which is read whole: a device map needs a Hugging Face folder"):
        TargetModel.from_pretrained(tmp_path / "model.gguf", spread=Spread(CPU))
    with pytest.raises(InputError, match=r"'target.max_memory' means nothing without 'target.device_map: auto'"):
        load_recipe("quickstart", ["target.max_memory={cpu: 1GiB}"])


def test_a_recipe_says_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its results are the same, so no stage is done again for it."""
    monkeypatch.setenv("EXITTRAIN_DEVICE", "cpu")
    room = room_for(folder, 1)
    changes = [f"target.model={folder}", "target.dtype=float32"]
    plain = StageContext(load_recipe("quickstart", changes), RunFolder(tmp_path / "a"))
    spread = StageContext(
        load_recipe("quickstart", [*changes, "target.device_map=auto", f"target.max_memory={{cpu: {room}}}"]),
        RunFolder(tmp_path / "b"),
    )
    assert plain.stage_key("warmup") == spread.stage_key("warmup")
    held = [parameter.device.type for parameter in spread.target().module.parameters()]
    assert 0 < held.count("meta") < len(held)
    drafters = [load_drafter("layers:1", context.target()).fingerprint() for context in (spread, plain)]
    assert drafters[0] == drafters[1]


def test_a_run_with_most_of_its_target_on_disk(tiny_run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    """Collection, training and evaluation write what they wrote before, to the byte."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    made = [
        folder / name for name in ("collect/manifest.json", "train/token/last/model.safetensors", "eval/metrics.json")
    ]
    before = [file.read_bytes() for file in made]
    for name in ("collect", "train", "eval"):
        shutil.rmtree(folder / name)
    room = room_for(folder / "target/model", 1)
    recipe = recipe_of(tiny_corpus, "target.device_map=auto", f"target.max_memory={{cpu: {room}}}")
    context = StageContext(recipe, RunFolder(folder))
    for stage in ("collect", "train", "eval"):
        run_stage(context, stage)
    assert context.target().is_offloaded
    assert [file.read_bytes() for file in made] == before


def test_processes_of_a_node_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_gpus(8, 1, 2) == (1, 3, 5, 7)
    assert process_gpus(8, 0, 1) == tuple(range(8))
    assert process_gpus(1, 0, 4) == (0,)
    assert process_gpus(2, 1, 4) == (0, 1)  # of 8 that four processes have two each of
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.local_size() == 1
    for name, value in {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "7"}.items():
        monkeypatch.setenv(name, value)
    assert ranks.local_size() == 7
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x3),1")
    assert ranks.local_size() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks.local_size() == 4
    with ranks.alone():
        assert ranks.local_size() == 4
