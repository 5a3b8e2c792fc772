"""`exittrain export` of EAGLE heads and block drafters: of a run, of a folder, and refusals with exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from head_folders import block_config, eagle_config, edit_config, edit_tensors, make_head
from tiny_target import make_target
from transformers import AutoConfig, AutoModelForCausalLM

from exittrain.cli.main import main
from exittrain.drafters.load import load_drafter
from exittrain.models.target import TargetModel
from exittrain.records.run_folder import RunFolder
from exittrain.stages.conversations.store import TokenSequence, write_sequences


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("models") / "target")
    config = AutoConfig.from_pretrained(folder)
    config.update({"num_hidden_layers": 6})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def heads(target: Path, tmp_path: Path) -> Path:
    """Two heads of that target: `e3` and `block`."""
    sizes = {"vocab_size": 257, "max_positions": 512}
    make_head(tmp_path / "e3", config=eagle_config(**sizes, draft_vocab_size=100))
    make_head(tmp_path / "block", config=block_config(**sizes, draft_vocab_size=257, mask_token_id=255))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["export", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("head", "form"), [("e3", "speculators"), ("e3", "sglang"), ("block", "speculators"), ("block", "dflash")]
)
def test_a_folder_for_its_target(
    capsys: pytest.CaptureFixture[str], heads: Path, target: Path, monkeypatch: pytest.MonkeyPatch, head: str, form: str
) -> None:
    monkeypatch.chdir(heads)
    code, out, err = call(capsys, str(heads / head), "--target", str(target), "--to", form)
    assert (code, out) == (0, f"{head}-{form}\n"), err
    assert "bit for bit; read back by a reader of its own" in err and err.count("\n") == 1
    assert sorted(path.name for path in heads.iterdir()) == sorted(["block", "e3", f"{head}-{form}"])


def test_an_arm_of_a_run(capsys: pytest.CaptureFixture[str], heads: Path, target: Path) -> None:
    folder = heads / "mine"
    recipe = {
        "name": "mine",
        "target": {"model": str(target)},
        "drafter": {"kind": "eagle3"},
        "data": {"train": {"kind": "prompts", "path": "everyday"}},
        "train": {"arms": {"token": {}, "reach_kl": {"objective": "reach_kl"}}},
    }
    record, drafter = RunFolder(folder), load_drafter(heads / "e3", TargetModel.from_pretrained(target))
    drafter.save(record.stage("train/reach_kl") / "last")
    record.finish("train/reach_kl", "key")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ids = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    write_sequences(folder / "data" / "heldout.parquet", [TokenSequence("a", ids, [1] * 300, 0, "test")])
    code, out, err = call(capsys, str(folder), "--to", "sglang", "--dtype", "bfloat16")
    assert (code, out) == (0, f"{folder / 'export' / 'reach_kl-sglang'}\n") and "rounded to bfloat16" in err
    note = json.loads((folder / "export" / "reach_kl-sglang" / "exittrain-export.json").read_text())
    assert note["source"]["arm"] == "reach_kl" and note["format"] == "sglang"


def cut_short(head: Path) -> None:
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:-9])


def no_damage(head: Path) -> None:
    pass


def rename_key(head: Path) -> None:
    edit_tensors(head, lambda tensors: tensors.update({"nrm": tensors.pop("norm.weight")}))


def wrong_shape(head: Path) -> None:
    edit_tensors(head, lambda tensors: tensors.update({"norm.weight": torch.ones(3)}))


def missing_flag(head: Path) -> None:
    edit_config(head, lambda data: data.pop("norm_before_residual"))


def flag_on(head: Path) -> None:
    edit_config(head, lambda data: data.update(norm_before_residual=True))


@pytest.mark.parametrize(
    ("head", "arguments", "damage", "expected"),
    [
        ("e3", [], no_damage, "is exported with --to speculators, --to sglang, --to dflash"),
        ("e3", ["--to", "dflash"], no_damage, "EAGLE-3 heads go --to speculators or --to sglang"),
        ("block", ["--to", "sglang"], no_damage, "block drafters go --to dflash or --to speculators"),
        ("e3", ["--to", "speculator"], no_damage, "did you mean 'speculators'?"),
        ("e3", ["--to", "sglang", "--dtype", "int8"], no_damage, "give float32, bfloat16, float16"),
        ("e3", ["--to", "sglang"], cut_short, "model.safetensors is damaged or cut short"),
        ("e3", ["--to", "sglang"], rename_key, "lacks 1 tensors that its config asks for, first norm.weight; it has 1"),
        ("e3", ["--to", "sglang"], wrong_shape, "norm.weight has shape (3,), its config asks for (32,)"),
        ("e3", ["--to", "sglang"], missing_flag, "norm_before_residual is missing"),
        ("e3", ["--to", "sglang"], flag_on, "SGLang would leave out norm_before_residual without a word"),
    ],
)  # fmt: skip
def test_refusals(
    capsys: pytest.CaptureFixture[str], heads: Path, target: Path, head: str, arguments: list[str],
    damage: Callable[[Path], object], expected: str,
) -> None:  # fmt: skip
    damage(heads / head)
    before = sorted(heads.iterdir())
    place = str(heads / "new" / "out")
    code, out, err = call(capsys, str(heads / head), "--target", str(target), *arguments, "--output", place)
    assert (code, out) == (2, "") and err.count("\n") == 1 and expected in err, err
    assert sorted(heads.iterdir()) == before
