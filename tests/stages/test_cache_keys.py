"""What is kept to be used again is kept under all that decides it (cases.md 29, 96): one thing is changed at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import recipe_of

from exittrain.models import fetch as fetch_module
from exittrain.models.fetch import KNOWN_MODELS, MANIFEST, fetch
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import read_shards, shard_is_whole
from exittrain.stages import context as context_module
from exittrain.stages.context import StageContext, file_hash, key_parts
from exittrain.stages.run import run_stage

HEAD = ("drafter={kind: eagle3, draft_vocab: 100}", "target.scratch.shape.num_layers=4")


def key(corpus: Path, stage: str, *overrides: str) -> str:
    return StageContext(recipe_of(corpus, *overrides), RunFolder("x")).stage_key(stage)


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("data", "data.max_length=40"), ("data", "data.generation.top_p=0.5"), ("data", "data.template={think: false}"),
        ("data", "data.system=none"), ("data", "target.dtype=bfloat16"), ("data", "target.attention=eager"),
        ("collect", "sampling.temperature=0.5"), ("collect", "sampling.top_k=5"), ("collect", "tree.width=2"),
        ("collect", "collect.top_k_logprobs=4"), ("collect", "seed=1"), ("train/exit", "train.deepspeed=zero1"),
        ("train/exit", "collect.shards=2"), ("eval", "eval.batch_size=2"), ("eval", "eval.builder=beam"),
    ],
)  # fmt: skip
def test_a_setting_changes_the_key(tiny_corpus: Path, stage: str, change: str) -> None:
    assert key(tiny_corpus, stage) != key(tiny_corpus, stage, change)


@pytest.mark.parametrize("change", ["drafter.draft_vocab=90", "drafter.feature_layers=[1]", "drafter.unroll_steps=2"])
def test_a_draft_vocabulary_and_other_parts_of_a_head_do(tiny_corpus: Path, change: str) -> None:
    """The vocabulary is stored in the warm start's folder alone; it is made of the data, whose key is in this one."""
    assert key(tiny_corpus, "warmup", *HEAD) != key(tiny_corpus, "warmup", *HEAD, change)
    assert key(tiny_corpus, "warmup", *HEAD) != key(tiny_corpus, "warmup", *HEAD, "data.heldout_fraction=0.3")


def test_steps_before_a_head_unrolls_do(tiny_corpus: Path) -> None:
    """Runs from before there were any keep their keys."""
    context = StageContext(recipe_of(tiny_corpus, *HEAD), RunFolder("x"))
    assert "unroll_from" not in key_parts(context, "warmup")["section"]
    assert key(tiny_corpus, "warmup", *HEAD) != key(tiny_corpus, "warmup", *HEAD, "warmup.unroll_from=0.5")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_file_of_the_target_does(tiny_run: Path, tiny_corpus: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_run / "target/model", tmp_path / "model")
    model = ("target.scratch=null", f"target.model={folder}")
    before, hashed = key(tiny_corpus, "data", *model), file_hash(str(folder))
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    assert key(tiny_corpus, "data", *model) != before and file_hash(str(folder)) != hashed


@pytest.mark.parametrize("name", ["CODE_VERSION", "SCHEMA_VERSION"])
def test_a_version_does(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = key(tiny_corpus, "report")
    monkeypatch.setattr(context_module, name, 99)
    assert key(tiny_corpus, "report") != before


def test_the_key_lies_beside_what_it_is_of(tiny_run: Path, tiny_corpus: Path) -> None:
    context = StageContext(recipe_of(tiny_corpus), RunFolder(tiny_run))
    for stage in ("target", "data", "warmup", "collect", "train/token", "eval", "report"):
        assert read_json(tiny_run / stage / "DONE.json")["key"] == context.stage_key(stage)
    for shard in (tiny_run / "collect").glob("*.parquet"):
        assert read_json(shard.with_suffix(".json"))["key"] == context.stage_key("collect")
    for cell in (tiny_run / "eval/cells").rglob("*.json"):
        assert read_json(cell)["key"].startswith(cell.stem)


def test_a_whole_shard_of_another_recipe_is_not_taken(
    tiny_run: Path, tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Put in its place by hand, record and all."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    other = StageContext(recipe_of(tiny_corpus, "collect.anchors_per_sequence=2"), RunFolder(folder))
    run_stage(other, "collect")
    kept = {file.name: file.read_bytes() for file in (folder / "collect").glob("shard-00001-*")}
    shutil.rmtree(folder / "collect")
    shutil.copytree(tiny_run / "collect", folder / "collect")
    (folder / "collect/DONE.json").unlink()
    for name, data in kept.items():
        (folder / "collect" / name).write_bytes(data)
    shard = folder / "collect/shard-00001-of-00003.parquet"
    assert shard_is_whole(shard)
    capsys.readouterr()
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), "collect")
    assert f"{shard} is of another recipe: making it again" in capsys.readouterr().err
    assert read_shards(folder / "collect") == read_shards(tiny_run / "collect")


@pytest.mark.parametrize("change", [{"gguf_sha256": "0" * 64}, {"schema_version": 0}])
def test_a_fetched_model_of_another_file_or_version_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    name, made = next(iter(KNOWN_MODELS)), []
    note = {"gguf_sha256": KNOWN_MODELS[name].sha256, "schema_version": fetch_module.SCHEMA_VERSION, "files": {}}
    (tmp_path / name).mkdir()
    monkeypatch.setattr(fetch_module, "_make", lambda model, folder, notify: made.append(folder))
    for changes, count in (({}, 0), (change, 1)):
        (tmp_path / name / MANIFEST).write_text(json.dumps({**note, **changes}))
        fetch(name, tmp_path)
        assert len(made) == count
