"""Exported heads: what is written equals what was trained, options are carried or refused, the real library agrees
(what goes wrong: test_export_head_faults.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_exports import block, deep_target, eagle, saved_head
from head_folders import LLAMA3, edit_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from exittrain.drafters.formats import read_head
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.load import load_drafter
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.sums import FILES
from exittrain.models.target import TargetModel
from exittrain.records.files import sha256
from exittrain.stages.export.heads import check_carried
from exittrain.stages.export.output import NOTE
from exittrain.stages.export.run import export_drafter
from exittrain.stages.export.source import of_folder

FORMS = [("speculators", eagle()), ("sglang", eagle()), ("speculators", block()), ("dflash", block())]
NAMES = ["speculators-eagle3", "sglang-eagle3", "speculators-block", "dflash-block"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain_config(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """config.json of an exported head with every option off."""
    folder = tmp_path_factory.mktemp("off")
    done = export_drafter(saved_head(folder / "head", eagle(), target), folder / "out", "speculators")
    return dict(json.loads((done.folder / "config.json").read_text()))


@pytest.mark.parametrize(("form", "config"), FORMS, ids=NAMES)
def test_everything_is_the_source_bit_for_bit(target: Path, tmp_path: Path, form: str, config: HeadConfig) -> None:
    source = saved_head(tmp_path / "arm" / "last", config, target)
    done = export_drafter(source, tmp_path / "new" / "out", form)
    model = TargetModel.from_pretrained(target)
    trained, again = (load_drafter(place, model) for place in (source.folder, done.folder))
    assert again.fingerprint() == trained.fingerprint() and again.kind == config.kind
    stored, kept = load_file(done.folder / "model.safetensors"), load_file(source.folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    if form == "speculators" and config.kind == "eagle3":  # the library computes with garbage where it is left out
        assert torch.equal(renamed.pop("embed_tokens.weight"), model.embeddings.weight)
    assert renamed.keys() == kept.keys() and all(torch.equal(renamed[name], kept[name]) for name in kept)
    assert any(name.startswith("midlayer.") for name in stored) == (form == "sglang")
    assert sorted(path.name for path in done.folder.iterdir()) == [
        "config.json", NOTE, FILES, "exittrain.json", "model.safetensors"
    ]  # fmt: skip
    assert (done.folder / "exittrain.json").read_bytes() == (source.folder / "exittrain.json").read_bytes()
    note = json.loads((done.folder / NOTE).read_text())
    assert note["format"] == form and note["source"]["kind"] == config.kind and note["left_out"] == []
    assert note["fingerprint"] == note["source"]["fingerprint"] == again.fingerprint()
    assert note["target"] == {"name": str(target), "vocab_size": 257, "trained_for": model.fingerprint()}
    assert all(sha256(done.folder / name) == record["sha256"] for name, record in note["files"].items())
    assert done.checked.num_tensors == len(stored) - 2 * (config.kind == "eagle3") and done.rounded_to is None
    assert done.checked.logit_error <= 1e-5 * 30 and done.checked.num_laws >= 24 and "reader of its own" in str(done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arm", "new"]


def test_the_flat_config_is_the_servers(target: Path, tmp_path: Path) -> None:
    folder = export_drafter(saved_head(tmp_path / "head", eagle(), target), tmp_path / "out", "sglang").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (257, 100, 1)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert (config["eos_token_id"], config["bos_token_id"], config["tie_word_embeddings"]) == (256, None, False)
    assert "target_hidden_size" not in config and "embed_tokens.weight" not in load_file(folder / "model.safetensors")


def test_the_speculators_config_names_the_target(target: Path, tmp_path: Path) -> None:
    folder = export_drafter(saved_head(tmp_path / "head", eagle(), target), tmp_path / "out", "speculators").folder
    config = json.loads((folder / "config.json").read_text())
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier


@pytest.mark.parametrize(("form", "config"), FORMS, ids=NAMES)
def test_rotary_and_norm_settings_are_carried(target: Path, tmp_path: Path, form: str, config: HeadConfig) -> None:
    """Scaled rope, a head size and an epsilon of its own: equal laws past the original length of 64 positions."""
    changed = {**config.as_dict(), "rope_parameters": LLAMA3, "head_dim": 24, "rms_norm_eps": 1e-3}
    source = saved_head(tmp_path / "head", HeadConfig(**changed), target)
    done = export_drafter(source, tmp_path / "out", form)
    plain = json.loads((done.folder / "config.json").read_text())
    layer = plain.get("transformer_layer_config", plain)
    assert layer["rope_parameters"] == LLAMA3 and layer["rope_theta"] == LLAMA3["rope_theta"]
    assert layer["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert (layer["head_dim"], layer["rms_norm_eps"]) == (24, 1e-3)
    assert done.checked.longest > LLAMA3["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 116),
        ({"rope_type": "yarn", "factor": 4.0}, 116),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
          "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 66),
    ],
)  # fmt: skip
def test_other_ways_to_scale_rotary_positions(target: Path, tmp_path: Path, rope: dict[str, Any], longest: int) -> None:
    source = saved_head(tmp_path / "head", eagle(rope_parameters={**rope, "rope_theta": 1e4}), target)
    assert export_drafter(source, tmp_path / "out", "speculators").checked.longest == longest


def test_text_that_is_too_short_is_gone_over_until_it_is_long(target: Path, tmp_path: Path) -> None:
    rope = {**LLAMA3, "original_max_position_embeddings": 400}
    source = saved_head(tmp_path / "head", eagle(rope_parameters=rope), target)
    done = export_drafter(source, tmp_path / "out", "speculators")
    assert done.checked.longest == 402
    with pytest.raises(InputError, match="no text of 6 tokens"):
        export_drafter(replace(source, token_ids=source.token_ids[:5]), tmp_path / "other", "speculators")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_one_rounding_and_says_so(target: Path, tmp_path: Path, dtype: str) -> None:
    source = saved_head(tmp_path / "head", eagle(), target)
    done = export_drafter(source, tmp_path / "half", "speculators", dtype)
    stored = load_file(done.folder / "model.safetensors")
    embeddings = TargetModel.from_pretrained(target).embeddings.weight
    trained = {**load_file(source.folder / "model.safetensors"), "embed_tokens.weight": embeddings}
    for name, tensor in trained.items():
        wanted = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert torch.equal(stored[name], wanted) and stored[name].dtype == wanted.dtype
    note = json.loads((done.folder / NOTE).read_text())
    assert note["rounded"] and note["fingerprint"] != note["source"]["fingerprint"]
    assert f"rounded to {dtype}" in str(done)
    assert json.loads((done.folder / "config.json").read_text())["torch_dtype"] == dtype
    assert read_head(done.folder).tensors["fc.weight"].dtype == getattr(torch, dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "norm_before_residual": {"norm_before_residual": True}, "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}, "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True}, "style": {"style": "qwen3"}, "layers": {"num_layers": 2},
    "features": {"feature_layers": (1, 4)}, "vocabulary": {"draft_vocab_size": 257},
}  # fmt: skip


@pytest.mark.parametrize("option", list(OPTIONS))
def test_every_option_changes_the_config_and_is_served(
    target: Path, plain_config: dict[str, Any], tmp_path: Path, option: str
) -> None:
    config = eagle(**OPTIONS[option])
    folder = export_drafter(saved_head(tmp_path / "on", config, target), tmp_path / "out", "speculators").folder
    assert read_head(folder).config == config != eagle()
    assert json.loads((folder / "config.json").read_text()) != plain_config


@pytest.mark.parametrize("option", ["fc_norm", "norm_output", "vocabulary", "features"])
def test_options_that_sglang_knows_are_carried(target: Path, tmp_path: Path, option: str) -> None:
    config = eagle(**OPTIONS[option])
    done = export_drafter(saved_head(tmp_path / "head", config, target), tmp_path / "out", "sglang")
    assert read_head(done.folder).config == config


def test_block_drafters_with_a_draft_vocabulary_bring_their_head(target: Path, tmp_path: Path) -> None:
    config = block(draft_vocab_size=100, block_size=5)
    done = export_drafter(saved_head(tmp_path / "head", config, target), tmp_path / "out", "speculators")
    assert {"lm_head.weight", "d2t", "t2d"} <= load_file(done.folder / "model.safetensors").keys()
    assert read_head(done.folder).config == config


@pytest.mark.parametrize(
    ("form", "config", "own", "message"),
    [
        *(
            ("sglang", eagle(**OPTIONS[name]), False, f"SGLang would leave out {said} without a word")
            for name, said in (
                ("norm_before_residual", "norm_before_residual"), ("norm_before_fc", "norm_before_fc"),
                ("attention_bias", "attention_bias"), ("mlp_bias", "mlp_bias"), ("style", "layers of style qwen3"),
                ("layers", "more than one layer"),
            )
        ),
        ("sglang", eagle(feature_layers=(3,)), False, "leave out a single feature layer"),
        ("sglang", eagle(), True, "leave out embeddings of its own"),
        ("sglang", block(), False, "block drafters go --to dflash or --to speculators"),
        ("dflash", eagle(), False, "EAGLE-3 heads go --to speculators or --to sglang"),
        ("dflash", block(draft_vocab_size=100), False, "no place for a draft vocabulary: use --to speculators"),
        ("speculators", eagle(fc_bias=True), False, r"servers leave out fc\.bias"),
        ("sglang", eagle(hidden_act="gelu"), False, "servers compute silu in place of gelu"),
    ],
)  # fmt: skip
def test_what_servers_would_drop_is_refused(form: str, config: HeadConfig, own: bool, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_carried(form, config, own)
    assert "\n" not in str(caught.value)


def test_a_refused_option_leaves_nothing(target: Path, tmp_path: Path) -> None:
    source = saved_head(tmp_path / "head", eagle(norm_before_residual=True), target)
    with pytest.raises(InputError, match="use --to speculators"):
        export_drafter(source, tmp_path / "new" / "out", "sglang")
    with pytest.raises(InputError, match=r"--to hf is for draft LMs: .* --to speculators, --to sglang, --to dflash"):
        export_drafter(source, tmp_path / "new" / "out", "hf")
    assert not (tmp_path / "new").exists()


def test_embeddings_of_its_own_go_along_only_where_servers_take_them(target: Path, tmp_path: Path) -> None:
    source = saved_head(tmp_path / "head", eagle(), target)
    other = torch.randn(257, 32)
    edit_tensors(source.folder, lambda tensors: tensors.update({"embed_tokens.weight": other}))
    done = export_drafter(source, tmp_path / "out", "speculators")
    assert torch.equal(load_file(done.folder / "model.safetensors")["embed_tokens.weight"], other)
    with pytest.raises(InputError, match="embeddings of its own"):
        export_drafter(source, tmp_path / "flat", "sglang")


def test_a_head_of_another_width_brings_embeddings_to_sglang(target: Path, tmp_path: Path) -> None:
    from head_folders import make_head

    folder = make_head(tmp_path / "head", config=eagle(hidden_size=16, intermediate_size=24))
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.randn(257, 16)}))
    done = export_drafter(of_folder(folder, str(target)), tmp_path / "out", "sglang")
    assert json.loads((done.folder / "config.json").read_text())["target_hidden_size"] == 32
    assert load_file(done.folder / "model.safetensors")["embed_tokens.weight"].shape == (257, 16)


def test_foreign_heads_are_exported_and_what_was_left_out_is_noted(target: Path, tmp_path: Path) -> None:
    from head_folders import make_head

    folder = make_head(tmp_path / "head", "sglang", eagle())
    edit_tensors(folder, lambda tensors: tensors.update({"verifier_norm.weight": torch.ones(32)}))
    done = export_drafter(of_folder(folder, str(target)), tmp_path / "out", "speculators")
    assert json.loads((done.folder / NOTE).read_text())["left_out"] == ["verifier_norm.weight"]
    assert "verifier_norm.weight" not in load_file(done.folder / "model.safetensors")


REAL = {
    "full": eagle(draft_vocab_size=257, style="qwen3", norm_output=True),
    "before": eagle(norm_before_residual=True, norm_before_fc=True, attention_bias=True, rope_parameters=LLAMA3),
    "deep": eagle(num_layers=2, fc_norm=True, mlp_bias=True),
    "block": block(), "pruned": block(draft_vocab_size=100, rope_parameters=LLAMA3, attention_bias=True),
}  # fmt: skip


def test_the_real_speculators_library_agrees(target: Path, tmp_path: Path) -> None:
    """Every step of an EAGLE-3 head and every place of a block, by the library that vLLM's format is named after.

    EXITTRAIN_SPECULATORS: a folder made by `pip install --no-deps --target FOLDER speculators==0.9.0`.
    """
    library = os.environ.get("EXITTRAIN_SPECULATORS")
    if not library:
        pytest.importorskip("speculators")
    folders = [
        export_drafter(saved_head(tmp_path / name, config, target), tmp_path / f"{name}-out", "speculators").folder
        for name, config in REAL.items()
    ]
    model = TargetModel.from_pretrained(target)
    tokens = torch.randint(257, (24,), generator=torch.Generator().manual_seed(3))
    features = model.states((2, 3, 5)).of(tokens)[1]
    save_file({"tokens": tokens, "features": features.contiguous()}, tmp_path / "inputs.safetensors")
    (tmp_path / "cases.json").write_text(json.dumps([str(folder) for folder in folders]))
    script = Path(__file__).resolve().parents[1] / "speculators_laws.py"
    path = os.pathsep.join(part for part in (library, os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(tmp_path / "laws.safetensors")
    for index, name in enumerate(REAL):
        logits, anchors = theirs[str(index)], theirs.get(f"{index}.anchors")
        ours = trained_laws(tmp_path / name, model, tokens, REAL[name], anchors)
        laws = logits.transpose(0, 1)[: len(ours)] if anchors is None else logits[:, 1:]
        torch.testing.assert_close(ours, laws.log_softmax(-1), atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def trained_laws(
    folder: Path, model: TargetModel, tokens: Tensor, config: HeadConfig, anchors: Tensor | None
) -> Tensor:
    """[A, K, D] log-probabilities over what it drafts, of the drafter as saved: at every context that the text goes on
    from for two tokens (EAGLE), or at anchors."""
    drafter = load_drafter(folder, model)
    places = 3 if anchors is None else int(config.block_size or 0) - 1
    at = torch.arange(1, len(tokens) - places + 1) if anchors is None else anchors
    session = drafter.session([tokens], torch.zeros_like(at), at, Sampling())
    laws = [session.root()]
    for slot in range(places - 1):
        following = tokens[(at + 1 + slot).clamp(max=len(tokens) - 1)][:, None]
        valid = torch.ones_like(following, dtype=torch.bool)
        laws.append(session.expand(torch.full_like(following, slot), following, valid)[:, 0])
    stacked = torch.stack(laws, dim=1)
    return stacked if drafter.draft_ids is None else stacked[..., drafter.draft_ids]
