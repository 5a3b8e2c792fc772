"""`exittrain export`: of a run's arm and of a drafter's folder; refusals in one line with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from tiny_target import make_target

from exittrain.cli.main import main
from exittrain.drafters.load import load_drafter
from exittrain.models.target import TargetModel
from exittrain.records.run_folder import RunFolder
from exittrain.stages.conversations.store import TokenSequence, write_sequences


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run as far as exporting looks at it: a recipe, held-out tokens, a warm start and two arms."""
    root = tmp_path_factory.mktemp("runs")
    target, folder = make_target(root / "target"), root / "mine"
    recipe = {
        "name": "mine",
        "target": {"model": str(target)},
        "drafter": {"layers": 1},
        "data": {"train": {"kind": "prompts", "path": "everyday"}},
        "train": {"arms": {"token": {}, "reach_kl": {"objective": "reach_kl"}}},
    }
    places = {"warmup": "drafter", "train/token": "last", "train/reach_kl": "last"}
    drafter, record = load_drafter("layers:1", TargetModel.from_pretrained(target)), RunFolder(folder)
    for stage, place in places.items():
        with torch.no_grad():
            for parameter in drafter.trainable_parameters():
                parameter += 0.01
        drafter.save(record.stage(stage) / place)
        record.finish(stage, "key")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ids = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    write_sequences(folder / "data" / "heldout.parquet", [TokenSequence("a", ids, [1] * 300, 0, "test")])
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["export", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_an_arm_of_a_run(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    code, out, err = call(capsys, str(run))
    assert code == 0 and out == f"{run / 'export' / 'reach_kl-hf'}\n", err
    assert "tensors, all bit for bit" in err and "on 300 tokens" in err and err.count("\n") == 1
    code, out, _ = call(capsys, str(run), "--arm", "warmup", "--to", "hf", "--output", str(run.parent / "warm"))
    assert code == 0 and (run.parent / "warm" / "exittrain-export.json").is_file()
    shown = [(run / "export/reach_kl-hf" / "model.safetensors"), run.parent / "warm" / "model.safetensors"]
    assert shown[0].read_bytes() != shown[1].read_bytes()


def test_a_folder_for_its_target(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drafter, target = str(run / "train" / "token" / "last"), str(run.parent / "target")
    code, out, err = call(capsys, drafter, "--target", target, "--dtype", "bfloat16")
    assert (code, out) == (0, "token-last-hf\n") and "rounded to bfloat16" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token-last-hf"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["RUN", "--to", "speculators"], "--to speculators is for EAGLE heads and block drafters"),
        (["RUN", "--to", "hff"], "did you mean 'hf'?"),
        (["RUN", "--arm", "reach"], "did you mean 'reach_kl'?"),
        (["RUN", "--target", "x"], "a run knows its target"),
        (["RUN", "--dtype", "int8"], "give float32, bfloat16, float16"),
        (["RUN/train/token/last"], "needs the target it drafts for"),
        (["RUN/train/token/last", "--target", "T", "--arm", "token"], "--arm is for a run"),
        (["RUN/train"], "is a folder without recipe.yaml"),
        (["nowhere"], "no recipe 'nowhere'"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    places = [word.replace("RUN", str(run)) for word in arguments]
    code, out, err = call(capsys, *places, "--output", str(tmp_path / "out"))
    assert (code, out) == (2, "") and err.count("\n") == 1 and expected in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_done_or_damaged(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with (copy / "train/token/last/config.json").open("a") as file:
        file.write(" ")
    code, _, err = call(capsys, str(copy), "--arm", "token")
    assert code == 2 and "config.json is not what the stage wrote" in err
    (copy / "train/reach_kl/DONE.json").unlink()
    code, _, err = call(capsys, str(copy))
    assert code == 2 and "has no finished 'train/reach_kl' stage" in err
