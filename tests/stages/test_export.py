"""Exports: what is written equals what was trained, servers' readers load it, and a failed check leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import make_target
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exittrain.drafters.calibration import Calibration, Choice
from exittrain.drafters.load import load_drafter
from exittrain.errors import InputError
from exittrain.models.sums import FILES
from exittrain.models.target import TargetModel
from exittrain.records.files import sha256
from exittrain.stages.export import hf
from exittrain.stages.export.hf import export_hf
from exittrain.stages.export.output import NOTE
from exittrain.stages.export.run import FORMS, check_form, export_drafter
from exittrain.stages.export.source import ExportSource, of_folder

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    """A trained-like drafter's folder, with a calibration beside it."""
    model = TargetModel.from_pretrained(target)
    made = load_drafter("layers:1", model)
    with torch.no_grad():
        for parameter in made.trainable_parameters():
            parameter += 0.01
    folder = made.save(tmp_path / "arm" / "last")
    choice = Choice(1.0, 6, "sampled_wor", 3, 2, "2-ary", "traversal", 1.5, None, None, None)
    Calibration(model.fingerprint(), load_drafter(folder, model).fingerprint(), 0, 1.0, "here", (choice,)).save(folder)
    (folder / FILES).unlink()  # tests change it: as from elsewhere, where nobody knows its sums
    return folder


@pytest.fixture
def source(drafter: Path, target: Path) -> ExportSource:
    return of_folder(drafter, str(target))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_everything_is_the_source_bit_for_bit(source: ExportSource, tmp_path: Path, target: Path) -> None:
    done = export_hf(source, tmp_path / "out" / "hf")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (done.folder, source.folder))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "exittrain.json", "calibration.json"):  # fmt: skip
        assert (done.folder / name).read_bytes() == (source.folder / name).read_bytes()
    note = json.loads((done.folder / NOTE).read_text())
    assert set(note["files"]) == {file.name for file in done.folder.iterdir()} - {NOTE, FILES}
    assert all(sha256(done.folder / name) == record["sha256"] for name, record in note["files"].items())
    model = TargetModel.from_pretrained(target)
    again = load_drafter(done.folder, model)
    assert note["fingerprint"] == note["source"]["fingerprint"] == again.fingerprint()
    assert again.calibration is not None and again.calibration.drafter_fingerprint == again.fingerprint()
    assert note["target"]["trained_for"] == model.fingerprint() and note["target"]["name"] == str(target)
    assert note["versions"]["torch"] and note["checked"]["num_tokens"] == done.checked.num_tokens > 512
    assert done.checked.num_tensors == len(theirs) and done.checked.logit_error <= 1e-5 and done.rounded_to is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["hf"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_one_rounding_and_says_so(source: ExportSource, tmp_path: Path, dtype: str) -> None:
    done = export_hf(source, tmp_path / "half", dtype)
    stored = load_file(done.folder / "model.safetensors")
    for name, tensor in load_file(source.folder / "model.safetensors").items():
        assert torch.equal(stored[name], tensor.to(getattr(torch, dtype)))
    config = json.loads((done.folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype and f"rounded to {dtype}" in str(done)
    note = json.loads((done.folder / NOTE).read_text())
    assert note["rounded"] and note["fingerprint"] != note["source"]["fingerprint"]
    assert AutoModelForCausalLM.from_pretrained(done.folder).dtype == getattr(torch, dtype)


def test_transformers_assisted_generation_takes_it(source: ExportSource, target: Path, tmp_path: Path) -> None:
    folder = export_hf(source, tmp_path / "hf").folder
    model, assistant = (AutoModelForCausalLM.from_pretrained(place) for place in (target, folder))
    rounds = []
    assistant.register_forward_hook(lambda *_: rounds.append(1))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in ("Hello there", "def f(x):"):
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        plain, assisted = (
            model.generate(**given, do_sample=False, max_new_tokens=24, pad_token_id=256, **extra)
            for extra in ({}, {"assistant_model": assistant})
        )
        assert torch.equal(plain, assisted)
    assert rounds


def test_rotary_settings_reach_old_and_new_readers(target: Path, tmp_path: Path) -> None:
    """Scaled rope, a head size of its own, several end tokens: read as they were, equal logits past the old length."""
    folder = tmp_path / "scaled"
    shutil.copytree(target, folder)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(target)
    config.update({"rope_parameters": LLAMA3, "head_dim": 24, "rms_norm_eps": 3e-6, "eos_token_id": [256, 7]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    done = export_hf(of_folder(folder, str(target)), tmp_path / "hf")
    plain = json.loads((done.folder / "config.json").read_text())
    assert plain["rope_parameters"] == LLAMA3 and plain["rope_theta"] == 5e5
    assert plain["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert (plain["head_dim"], plain["rms_norm_eps"], plain["eos_token_id"]) == (24, 3e-6, [256, 7])
    for dropped in (["rope_parameters"], ["rope_theta", "rope_scaling"]):  # an old reader's view, and a new one's
        shutil.copytree(done.folder, tmp_path / "view", dirs_exist_ok=True)
        kept = {key: value for key, value in plain.items() if key not in dropped}
        (tmp_path / "view" / "config.json").write_text(json.dumps(kept))
        assert AutoConfig.from_pretrained(tmp_path / "view").rope_parameters == LLAMA3
    assert done.checked.num_tokens > LLAMA3["original_max_position_embeddings"]


def test_shards_stay_shards(drafter: Path, target: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(drafter)
    (drafter / "model.safetensors").unlink()
    model.save_pretrained(drafter, max_shard_size="20KB")
    done = export_hf(of_folder(drafter, str(target)), tmp_path / "hf")
    assert len(list(done.folder.glob("model-*.safetensors"))) == len(list(drafter.glob("model-*.safetensors"))) > 1


def test_shards_that_lie_elsewhere_are_not_written_there(drafter: Path, target: Path, tmp_path: Path) -> None:
    """An index may name any path: an export that followed it would write over what is there."""
    (tmp_path / "elsewhere").mkdir()
    shutil.copyfile(drafter / "model.safetensors", tmp_path / "elsewhere" / "model.safetensors")
    placed = dict.fromkeys(load_file(drafter / "model.safetensors"), "../elsewhere/model.safetensors")
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(InputError, match="which is no file beside it"):
        export_hf(of_folder(drafter, str(target)), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def lose_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))


def rename_key(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.wieght": t.pop("model.norm.weight")}))


def wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(31)}))


def extra_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.bias": torch.ones(3)}))


def other_bit(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * (1 + 1e-7)}))


def untied_head(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def another_eps(folder: Path) -> None:
    edit_config(folder, rms_norm_eps=0.1)


def another_rope(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 123.0}, rope_theta=123.0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_tensor, "lacks model.norm.weight"),
        (rename_key, "lacks model.norm.weight"),
        (wrong_shape, r"tensor model.norm.weight \(\(31,\)\)"),
        (extra_tensor, "holds model.bias, which the source has not"),
        (other_bit, "tensor model.norm.weight"),
        (no_weights, "model.safetensors is missing"),
        (no_config, "config.json"),
        (no_generation_config, "generation_config.json is missing"),
        (no_tokenizer, "tokenizer.json is missing"),
        (another_eps, "rms_norm_eps reads 0.1"),
        (another_rope, "rope_parameters reads"),
    ],
)
def test_what_goes_wrong_in_writing_is_found_and_nothing_kept(
    source: ExportSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None], message: str,
) -> None:  # fmt: skip
    written = hf.write_folder

    def tampered(weights: object, folder: Path, *rest: object) -> None:
        written(weights, folder, *rest)
        damage(folder)

    monkeypatch.setattr(hf, "write_folder", tampered)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=message) as caught:
        export_hf(source, tmp_path / "new" / "out")
    assert "\n" not in str(caught.value) and "nothing is kept" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_tensor, "lacks 1 weights, first model.norm.weight"),
        (rename_key, "lacks 1 weights, first model.norm.weight.*; it has 1 .* no place for, first model.norm.wieght"),
        (wrong_shape, r"first model.norm.weight \(\(31,\), not \(32,\)\)"),
        (extra_tensor, "has 1 tensors its config has no place for, first model.bias"),
        (untied_head, "lm_head.weight of its own"),
        (no_weights, "model.safetensors is missing"),
        (no_config, "no config.json"),
    ],
)
def test_a_damaged_source_is_refused_before_anything_is_written(
    source: ExportSource, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(source.folder)
    with pytest.raises(InputError, match=message) as caught:
        export_hf(source, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_failed_export_leaves_the_earlier_one(
    source: ExportSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_hf(source, tmp_path / "out").folder
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(hf, "write_folder", lambda *_: None)
    with pytest.raises(InputError, match="nothing is kept"):
        export_hf(source, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    monkeypatch.undo()
    assert export_hf(source, folder, "bfloat16").rounded_to == "bfloat16"


def test_what_lies_at_the_output_is_never_lost(
    source: ExportSource, drafter: Path, target: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    other = Path(shutil.copytree(drafter, tmp_path / "other"))
    export_hf(of_folder(other, str(target)), tmp_path / "of-other")
    for place in (taken, tmp_path / "of-other"):
        with pytest.raises(InputError, match="is no earlier export of"):
            export_hf(source, place)
    for place in (drafter, drafter.parent):
        with pytest.raises(InputError, match="is what is exported"):
            export_hf(source, place)
    assert (taken / "mine.txt").read_text() == "mine"
    with pytest.raises(InputError, match="'eagle3' in it, from which vLLM guesses"):
        export_hf(source, tmp_path / "my-Eagle3-draft")


def test_another_tokenizer_or_vocabulary_is_refused(source: ExportSource, drafter: Path, tmp_path: Path) -> None:
    words = json.loads((drafter / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    (one, a), (other, b) = list(vocabulary.items())[5], list(vocabulary.items())[9]
    vocabulary[one], vocabulary[other] = b, a
    (drafter / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(InputError, match=f"differ in 2 token ids \\({a} is"):
        export_hf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("drafts_padding", [False, True])
def test_ids_beyond_the_tokenizer_are_never_drafted(target: Path, tmp_path: Path, drafts_padding: bool) -> None:
    """Both vocabularies padded from 257 to 264; the head either never or always prefers a padding row."""
    config = AutoConfig.from_pretrained(target)
    config.update({"vocab_size": 264, "tie_word_embeddings": False})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        module.lm_head.weight[257:] = 0
        if drafts_padding:  # whatever the state, one of two opposite rows is far above all others
            module.lm_head.weight[257], module.lm_head.weight[258] = torch.ones(32), -torch.ones(32)
    folders = [tmp_path / "padded", tmp_path / "padded-draft"]
    for folder in folders:
        shutil.copytree(target, folder)
        module.save_pretrained(folder)
    source = of_folder(folders[1], str(folders[0]))
    if drafts_padding:
        with pytest.raises(InputError, match=r"drafts id 25[78], beyond the tokenizer's 257 ids"):
            export_hf(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    else:
        checked = export_hf(source, tmp_path / "out").checked
        assert checked.padding_ids == 7 and 0 < checked.padding_mass < 0.1


def test_a_drafter_without_a_tokenizer_gets_the_targets(source: ExportSource, drafter: Path, tmp_path: Path) -> None:
    no_tokenizer(drafter)
    folder = export_hf(source, tmp_path / "out").folder
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == source.target.tokenizer.get_vocab()


@pytest.mark.parametrize("changes", [{"dtype": "bfloat"}, {"kind": "eagle3"}, {"quantization_config": {"bits": 4}}])
def test_what_cannot_be_exported_is_refused(source: ExportSource, tmp_path: Path, changes: dict[str, object]) -> None:
    if "kind" in changes:
        note = json.loads((source.folder / "exittrain.json").read_text())
        (source.folder / "exittrain.json").write_text(json.dumps({**note, **changes}))
    elif "dtype" not in changes:
        edit_config(source.folder, **changes)
    with pytest.raises(InputError, match=r"did you mean 'bfloat16'|of kind 'eagle3'|is quantised"):
        export_hf(source, tmp_path / "out", changes.get("dtype"))


@pytest.mark.parametrize("form", ["speculators", "sglang", "dflash"])
def test_a_draft_lm_has_one_form(source: ExportSource, tmp_path: Path, form: str) -> None:
    with pytest.raises(InputError, match=f"--to {form} is for EAGLE heads .* exported with --to hf") as caught:
        export_drafter(source, tmp_path / "out", form)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    assert export_drafter(source, tmp_path / "out", "hf").folder.is_dir()


def test_forms_are_known_by_name() -> None:
    for form in FORMS:
        check_form(form)
    with pytest.raises(InputError, match=r"no format 'sglan', did you mean 'sglang'\?: --to takes hf, speculators"):
        check_form("sglan")
