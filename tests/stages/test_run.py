"""All stages of the tiny recipe: resume, keys, damage, lock, disk, signals. One shared run serves most of the tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_run import recipe_of

from exittrain.config.load import load_recipe
from exittrain.config.schema import Recipe
from exittrain.errors import InputError, Interrupted
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.runtime.lock import hold
from exittrain.stages import disk
from exittrain.stages import run as run_module
from exittrain.stages.context import StageContext, file_hash
from exittrain.stages.run import run_all, run_stages


@pytest.fixture(scope="module")
def corpus(tiny_corpus: Path) -> Path:
    return tiny_corpus


@pytest.fixture(scope="module")
def finished(tiny_run: Path) -> Path:
    return tiny_run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "tiny"))


def redone(capsys: pytest.CaptureFixture[str], recipe: Recipe, folder: Path) -> dict[str, str]:
    capsys.readouterr()
    run_all(StageContext(recipe, RunFolder(folder)))
    lines = [line for line in capsys.readouterr().err.splitlines() if ": " in line]
    states = {line.partition(": ")[0]: line.partition(": ")[2] for line in reversed(lines)}
    return {stage: states[stage] for stage in ("target", "data", "warmup", "collect", "train", "eval", "report")}


def test_a_run_is_complete(finished: Path) -> None:
    for stage in ("target", "data", "warmup", "collect", "train", "eval", "report"):
        assert read_json(finished / stage / "DONE.json")["files"]
    assert {"recipe.yaml", "provenance.json"} <= {path.name for path in finished.iterdir()}
    assert (finished / "report" / "index.html").stat().st_size > 1000
    assert not list(finished.rglob(".tmp-*"))


def test_second_run_does_nothing(capsys: pytest.CaptureFixture[str], corpus: Path, copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.json") if "provenance" not in path.name}
    assert set(redone(capsys, recipe_of(corpus), copy).values()) == {"done"}
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_changed_recipe_redoes_what_depends_on_it(capsys: pytest.CaptureFixture[str], corpus: Path, copy: Path) -> None:
    token = (copy / "train/token/DONE.json").read_bytes()
    states = redone(capsys, recipe_of(corpus, "train.arms.reach_kl.weight=0.5"), copy)
    assert [stage for stage, state in states.items() if state == "done"] == ["target", "data", "warmup", "collect"]
    assert "has changed" in states["train"] and "has changed" in states["eval"]
    assert (copy / "train/token/DONE.json").read_bytes() == token


def test_damage_is_named_and_repaired(capsys: pytest.CaptureFixture[str], corpus: Path, copy: Path) -> None:
    shard = copy / "collect/shard-00001-of-00003.parquet"
    whole, metrics = shard.read_bytes(), (copy / "eval/metrics.json").read_bytes()
    shard.write_bytes(whole[:-7])
    states = redone(capsys, recipe_of(corpus), copy)
    assert "shard-00001-of-00003.parquet" in states["collect"] and "again" in states["collect"]
    assert shard.read_bytes() == whole
    assert (copy / "eval/metrics.json").read_bytes() == metrics


def test_a_stage_alone_needs_what_it_stands_on(corpus: Path, tmp_path: Path) -> None:
    context = StageContext(recipe_of(corpus), RunFolder(tmp_path / "none"))
    with pytest.raises(InputError, match="stage 'target' has not been run"):
        run_stages(context, ["warmup"])
    assert not (tmp_path / "none").exists()


def test_no_section_no_stage(corpus: Path, tmp_path: Path) -> None:
    context = StageContext(recipe_of(corpus, "collect=null", "train.arms.exit.source=on_policy"), RunFolder(tmp_path))
    with pytest.raises(InputError, match="no 'collect' section"):
        run_stages(context, ["collect"])
    context = StageContext(recipe_of(corpus, "eval=null"), RunFolder(tmp_path))
    with pytest.raises(InputError, match="no 'eval' section"):
        run_stages(context, ["report"])


def test_two_runs_on_one_folder_refuse_one_another(corpus: Path, tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(InputError, match="is in use by process"):
        run_all(StageContext(recipe_of(corpus), RunFolder(tmp_path)))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("target.scratch.corpus=/none", "corpus '/none' is no folder"),
        ("data.train.path=/none", "corpus '/none' is no folder"),
        ("data.max_length=100000", "the target has 2048 positions"),
        ("drafter={init: /none}", "/none does not exist"),
        ("drafter={kind: causal_lm, model: /none}", "/none does not exist"),
        ("tree={builder: static, branching: oak}", "no static shape 'oak'"),
        ("tree={builder: sampled_wor, branching: [[1]]}", "needs its elder sibling"),
        ("eval={tasks: [heldout], builder: sampled_wor, branching: [[1]]}", "needs its elder sibling"),
        ("train.deepspeed=zero9", "no DeepSpeed config 'zero9'"),
    ],
)
def test_bad_input_costs_nothing_that_was_made(copy: Path, corpus: Path, override: str, expected: str) -> None:
    """What a recipe names is looked up before a stage that depends on it is given up."""
    before = {path.relative_to(copy): path.read_bytes() for path in copy.glob("*/**/*") if path.is_file()}
    with pytest.raises(InputError, match=expected):
        run_all(StageContext(recipe_of(corpus, override), RunFolder(copy)))
    assert before == {path.relative_to(copy): path.read_bytes() for path in copy.glob("*/**/*") if path.is_file()}


def test_a_folder_that_cannot_be_written_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set another run_dir"):
        run_all(StageContext(recipe_of(corpus), RunFolder(tmp_path / "file/run")))


def test_too_little_disk_stops_before_the_start(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(InputError, match="are free: make room, or set run_dir"):
        run_all(StageContext(recipe_of(corpus), RunFolder(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", ["warmup", "collect", "train", "eval"])
def test_a_signal_leaves_a_run_that_goes_on_to_the_same_numbers(
    corpus: Path, copy: Path, finished: Path, stage: str
) -> None:
    shutil.rmtree(copy / stage)
    context = StageContext(recipe_of(corpus), RunFolder(copy))
    context.stop.set("SIGTERM")
    with pytest.raises(Interrupted):
        run_module.run_stage(context, stage)
    run_all(StageContext(recipe_of(corpus), RunFolder(copy)))
    for name in ("metrics.json", "rounds.jsonl"):
        assert without_clock(copy / "eval" / name) == without_clock(finished / "eval" / name)


def without_clock(path: Path) -> object:
    if path.suffix == ".json":
        return path.read_bytes()
    import json

    return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in path.read_text().splitlines()]


KEYED = {
    "target.scratch.steps=9": "target",
    "seed=1": "target",
    "data.max_length=40": "data",
    "data.generation.temperature=0.5": "data",
    "drafter.shape.num_layers=2": "warmup",
    "warmup.lr=1e-5": "warmup",
    "sampling.temperature=0.5": "warmup",
    "tree.budget=5": "collect",
    "collect.anchors_per_sequence=2": "collect",
    "train.lr=1e-5": "train",
    "train.arms.exit.weight=2.0": "train",
    "eval.bootstrap=300": "eval",
}
ORDER = ["target", "data", "warmup", "collect", "train", "eval", "report"]


@pytest.mark.parametrize("override", KEYED)
def test_a_change_changes_the_keys_downstream_and_no_others(corpus: Path, override: str) -> None:
    before, after = (StageContext(recipe_of(corpus, *extra), RunFolder("x")) for extra in ((), (override,)))
    changed = [stage for stage in ORDER if before.stage_key(stage) != after.stage_key(stage)]
    assert changed == ORDER[ORDER.index(KEYED[override]) :]


def test_keys_follow_files_and_code(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    assert file_hash(str(other)) == file_hash(str(corpus))
    key = StageContext(recipe_of(other), RunFolder("x")).stage_key("data")
    (other / "textwrap.py").write_text("changed")
    assert StageContext(recipe_of(other), RunFolder("x")).stage_key("data") != key
    key = StageContext(recipe_of(corpus), RunFolder("x")).stage_key("target")
    monkeypatch.setattr("exittrain.stages.context.CODE_VERSION", 99)
    assert StageContext(recipe_of(corpus), RunFolder("x")).stage_key("target") != key


def test_adding_an_arm_leaves_the_others(corpus: Path) -> None:
    before = StageContext(recipe_of(corpus), RunFolder("x"))
    after = StageContext(recipe_of(corpus, "train.arms.extra={objective: reach}"), RunFolder("x"))
    assert before.stage_key("train") != after.stage_key("train")
    assert before.stage_key("train/token") == after.stage_key("train/token")


def test_logging_is_not_part_of_a_key(corpus: Path) -> None:
    quiet = StageContext(recipe_of(corpus, "train.log_every=50", "tracking.project=x"), RunFolder("x"))
    assert quiet.stage_key("report") == StageContext(recipe_of(corpus), RunFolder("x")).stage_key("report")


@pytest.mark.parametrize(("capability", "dtype", "told"), [
    ("avx512_f", "bfloat16", True), ("avx2", "float32", False), ("avx512_bf16", "bfloat16", False),
    ("avx512_bf16", "float16", True), ("amx_fp16", "float16", False),
])  # fmt: skip
def test_a_cpu_that_crawls_in_half_precision_is_told(
    capability: str, dtype: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from exittrain.models.target import TargetModel

    monkeypatch.setenv("EXITTRAIN_DEVICE", "cpu")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {capability: True})
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *args, **kwargs: None)
    recipe = load_recipe("quickstart", [f"target.dtype={dtype}"])
    StageContext(recipe, RunFolder(tmp_path / "run")).target()
    assert ("target.dtype=float32 is faster" in capsys.readouterr().err) == told
