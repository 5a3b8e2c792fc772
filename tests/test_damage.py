"""Every kind of file that is written and read again: cut short or with one bit changed, it is found by name before
anything is computed with it (cases.md 29, 96)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from head_folders import block_config, eagle_config, make_head
from tiny_run import recipe_of

from exittrain.cli.main import main
from exittrain.config.load import load_recipe
from exittrain.drafters.load import load_drafter
from exittrain.errors import InputError
from exittrain.models.loading import load_vocabulary
from exittrain.models.sums import FILES, SEAL
from exittrain.models.target import TargetModel
from exittrain.records.files import read_json, write_json
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import read_shards, shard_is_whole
from exittrain.stages.context import StageContext
from exittrain.stages.evaluation.results import CellStore, SpeedResult
from exittrain.stages.export.run import export_drafter
from exittrain.stages.export.source import of_run
from exittrain.stages.reporting.load import load_run, read_lines
from exittrain.stages.run import run_stage, run_stages
from exittrain.stages.scratch import corpus_tokenizer
from exittrain.stages.submit.record import Job, Record, read_record
from exittrain.stages.train import arm_steps
from exittrain.stages.training.checkpoints import latest_checkpoint

LATER = {"target": "data", "data": "warmup", "warmup": "collect", "collect": "train", "train": "eval", "eval": "report"}


@pytest.fixture(scope="module")
def run(tiny_run: Path, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run with an export, shared by tests that put back what they damage."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("damage") / "tiny"))
    context = StageContext(recipe_of(tiny_corpus), RunFolder(folder))
    export_drafter(of_run(context, "token"), folder / "export/token-hf", "hf")
    return folder


@pytest.fixture
def context(run: Path, tiny_corpus: Path) -> StageContext:
    return StageContext(recipe_of(tiny_corpus), RunFolder(run))


@pytest.fixture(scope="module")
def target(run: Path) -> TargetModel:
    return TargetModel.from_pretrained(run / "target/model")


def damaged(file: Path, places: int = 3) -> Iterator[str]:
    """The file cut short and with one bit flipped (at so many places), in turn; whole again at the end, also when a
    test fails."""
    whole = file.read_bytes()
    kinds = {"cut": whole[: len(whole) // 2]}
    if places > 1:
        kinds |= {"empty": b"", "cut at the end": whole[:-3]}
    for number in range(places):
        place = (len(whole) - 1) * number // (places - 1) if places > 1 else len(whole) // 3
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (number % 7)
        kinds[f"bit at byte {place}"] = bytes(flipped)
    try:
        for kind, data in kinds.items():
            if data != whole:
                file.write_bytes(data)
                yield kind
    finally:
        file.write_bytes(whole)


def found_by_name(file: Path, use: Callable[[], object], places: int = 3) -> None:
    """Using it is refused in one line that names the file, however it is damaged."""
    for kind in damaged(file, places):
        with pytest.raises(InputError) as caught:
            use()
        line = str(caught.value)
        assert str(file) in line or file.name in line, f"{file}, {kind}: {line}"
        assert "\n" not in line
    use()


# A stage looks at what it stands on


@pytest.mark.parametrize("stage", LATER)
def test_files_of_a_finished_stage(context: StageContext, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that its mark lists, when the next stage is started alone; nothing of that stage runs."""
    monkeypatch.setattr("exittrain.stages.run._each", lambda *_: None)
    files = sorted(read_json(context.run.path / stage / "DONE.json")["files"])
    assert files and not any("step-" in name for name in files)
    for name in files:
        found_by_name(context.run.path / stage / name, lambda: run_stages(context, [LATER[stage]]), places=1)


@pytest.mark.parametrize("stage", LATER)
def test_the_mark_of_a_finished_stage(context: StageContext, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a bit of its numbers, such as the steps an arm took: either the mark is named, or it says the same."""
    monkeypatch.setattr("exittrain.stages.run._each", lambda *_: None)
    mark = context.run.path / stage / "DONE.json"
    whole, refused = read_json(mark), 0
    for kind in damaged(mark, places=40):
        try:
            run_stages(context, [LATER[stage]])
        except InputError as error:
            assert f"{mark} is damaged" in str(error), kind
            refused += 1
        else:
            assert {name: part for name, part in read_json(mark).items() if name in whole} == whole, kind
    assert refused > 30


@pytest.mark.parametrize("name", ["DONE.json", "STARTED.json"])
def test_a_damaged_mark_is_named_and_the_stage_done_again(
    tiny_run: Path, tiny_corpus: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the stage had made is what it makes."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    metrics, mark = (folder / "collect/manifest.json").read_bytes(), folder / "collect" / name
    mark.write_bytes(mark.read_bytes().replace(b'"key": "', b'"key": "f', 1))
    (folder / "collect/DONE.json").unlink() if name == "STARTED.json" else None
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), "collect")
    assert f"collect: again, because {mark} is damaged" in capsys.readouterr().err
    assert (folder / "collect/manifest.json").read_bytes() == metrics
    assert read_json(folder / "collect/DONE.json")


@pytest.mark.parametrize(
    "name",
    [
        "data/train.parquet", "train/token/last/model.safetensors", "train/token/best/model.safetensors",
        "train/token/metrics.jsonl",
    ],
)  # fmt: skip
def test_a_damaged_result_is_named_and_made_again(
    tiny_run: Path, tiny_corpus: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what a loop writes on its way; and then the stage is done."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    file, stage = folder / name, name.partition("/")[0]
    whole, checkpoint = file.read_bytes(), folder / "train/token/step-000002/model.pt"
    inode = checkpoint.stat().st_ino
    file.write_bytes(whole[:200] + bytes([whole[200] ^ 4]) + whole[201:])
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), stage)
    assert f"{stage}: again, because {file} is not what" in capsys.readouterr().err
    if file.name == "metrics.jsonl":  # nothing is trained again for it
        assert read_lines(file) == [] and len(file.with_suffix(".damaged").read_bytes()) == len(whole)
        assert checkpoint.stat().st_ino == inode
    else:
        assert file.read_bytes() == whole
    assert RunFolder(folder).damage(stage) is None


# What is there before a stage is finished


def test_shards_and_their_records(run: Path) -> None:
    for file in (run / "collect").glob("shard-*"):
        for kind in damaged(file, places=30):
            same = file.suffix == ".json" and _says_the_same(file, kind)
            assert same or not shard_is_whole(file.with_suffix(".parquet")), (file, kind)
    found_by_name(run / "collect/manifest.json", lambda: read_shards(run / "collect"), places=1)
    found_by_name(run / "collect/shard-00001-of-00003.parquet", lambda: read_shards(run / "collect"))


def _says_the_same(file: Path, kind: str) -> bool:
    """A flipped bit in a blank, or in the name of the seal."""
    try:
        return kind.startswith("bit") and {"rows", "bytes", "sha256"} <= read_json(file).keys()
    except InputError:
        return False


def test_checkpoints(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file of the newest: it is named, and the one before is taken."""
    for name in sorted(file.name for file in (run / "train/token/step-000002").iterdir()):
        for place in (0, 77, -9):
            folder = tmp_path / f"{name}{place}"
            for step in (1, 2):
                shutil.copytree(run / f"train/token/step-{step:06d}", folder / f"step-{step:06d}")
            file = folder / "step-000002" / name
            data = bytearray(file.read_bytes())
            data[place] ^= 1
            file.write_bytes(data)
            assert latest_checkpoint(folder) == (folder / "step-000001", 1), (name, place)
            assert name in capsys.readouterr().out


def test_measurements(tiny_run: Path, tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an evaluation that was killed: a damaged one is named and measured again, to the same number."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    metrics = (folder / "eval/metrics.json").read_bytes()
    (folder / "eval/DONE.json").unlink()
    pieces = sorted((folder / "eval/cells").rglob("*.json"))[:3]
    for number, file in enumerate(pieces):
        data = file.read_bytes()
        place = data.index(b'"key": "') + 8 + number  # of a blank or a last digit a bit may say nothing
        file.write_bytes(data[: len(data) // 2] if number == 2 else data[:place] + b"-" + data[place + 1 :])
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), "eval")
    told = capsys.readouterr().err
    assert all(f"{file} is damaged" in told for file in pieces)
    assert (folder / "eval/metrics.json").read_bytes() == metrics


def test_any_bit_of_a_measurement(tmp_path: Path) -> None:
    """Every byte in turn: what was stored is measured again, or it is read as it was."""
    store, made = CellStore(tmp_path), SpeedResult({"tokens": 7, "seconds": 0.12345678901234567, "texts": ["a\u00e9"]})
    store.get(SpeedResult, "ab" * 32, lambda: made)
    file = store.path("ab" * 32)
    whole, again = file.read_bytes(), 0
    for kind in damaged(file, places=len(whole)):
        found = store.find(SpeedResult, "ab" * 32)
        assert found in (None, made), kind
        again += found is None
    assert again > 0.8 * len(whole)


def test_the_tokenizer_of_a_target_in_the_making(
    run: Path, tiny_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is learnt again, from the same text."""
    folder, files = run / "target", sorted(tiny_corpus.glob("*.py"))
    from exittrain.stages.conversations.text import text_files

    training, _ = text_files(str(tiny_corpus))
    assert set(training) <= set(files)
    for file in sorted((folder / "tokenizer").iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-3])
        corpus_tokenizer(folder, training, 300)
        assert str(file) in capsys.readouterr().err and file.read_bytes() == whole


def test_steps_that_match_a_time(tiny_corpus: Path, tmp_path: Path, target: TargetModel) -> None:
    """A digit of theirs would be other steps."""
    recipe = recipe_of(tiny_corpus, "train.arms.token_time={match_time: reach_kl}")
    context, file = StageContext(recipe, RunFolder(tmp_path)), tmp_path / "steps.json"
    write_json(file, {"steps": 40, "matches": "reach_kl", "step_time_ratio": 1.25, "matched_steps": 32}, seal=True)
    whole = file.read_text()
    assert arm_steps(context, "token_time", tmp_path, target, None) == 40  # type: ignore[arg-type]
    for text in (whole.replace("40", "48"), whole.replace("1.25", "1.35"), whole[:20], ""):
        file.write_text(text)
        with pytest.raises(InputError, match=r"steps\.json is damaged"):
            arm_steps(context, "token_time", tmp_path, target, None)  # type: ignore[arg-type]


# Folders of models, wherever they are used from


@pytest.mark.parametrize("place", ["train/token/last", "warmup/drafter", "export/token-hf"])
def test_a_drafters_folder(run: Path, target: TargetModel, place: str) -> None:
    for file in _files(run / place):
        found_by_name(file, lambda: load_drafter(run / place, target))


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_heads_folder(target: TargetModel, run: Path, tmp_path: Path, kind: str) -> None:
    size = {"vocab_size": target.vocab_size, "feature_layers": (1,)}
    if kind == "block":
        made = block_config(**size, draft_vocab_size=target.vocab_size, mask_token_id=0)
    else:
        made = eagle_config(**size, draft_vocab_size=100)
    load_drafter(make_head(tmp_path / "made", config=made), target).save(tmp_path / "head")
    for file in _files(tmp_path / "head"):
        found_by_name(file, lambda: load_drafter(tmp_path / "head", target))


def test_a_targets_folder(run: Path) -> None:
    for file in _files(run / "target/model"):
        found_by_name(file, lambda: TargetModel.from_pretrained(run / "target/model"))
        found_by_name(file, lambda: load_vocabulary(run / "target/model"), places=1)


def test_what_is_exported(context: StageContext, tmp_path: Path) -> None:
    """The drafter, the tokens it is compared on, and the target."""
    source = of_run(context, "token")
    found_by_name(source.folder / "config.json", lambda: of_run(context, "token"))
    found_by_name(context.run.path / "data/heldout.parquet", lambda: of_run(context, "token"))
    found_by_name(context.run.path / "target/model/tokenizer.json", lambda: of_run(context, "token"))
    for kind in damaged(source.folder / "model.safetensors"):
        with pytest.raises(InputError, match=r"model\.safetensors is not what exittrain wrote"):
            export_drafter(source, tmp_path / "out", "hf")
        assert not (tmp_path / "out").exists(), kind


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "exittrain.json", "tokenizer.json", FILES])
def test_generate_leaves_with_one_line_and_code_2(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    drafter = run / "train/token/last"
    arguments = ["generate", "def", "--raw", "--target", str(run / "target/model"), "--drafter", str(drafter)]
    for _ in damaged(drafter / name, places=1):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--max-new-tokens", "2"])
        told = capsys.readouterr()
        assert left.value.code == 2 and told.out == ""
        assert str(drafter / name) in told.err and told.err.count("\n") == 1


def _files(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    assert found
    return found


# What belongs to the whole run


def test_the_recipe_of_a_run(run: Path) -> None:
    found_by_name(run / "recipe.yaml", lambda: load_recipe(run), places=1)
    whole = (run / "recipe.yaml").read_text()
    try:
        (run / "recipe.yaml").write_text(whole.replace("lr: 0.001", "lr: 0.003", 1))
        with pytest.raises(InputError, match=r"recipe\.yaml is not what exittrain wrote"):
            load_recipe(run)
        (run / "recipe.yaml").write_text(whole.partition("\n")[2].replace("lr: 0.001", "lr: 0.003", 1))
        changed = load_recipe(run).train
        assert changed is not None and changed.lr == 0.003
    finally:
        (run / "recipe.yaml").write_text(whole)


def test_what_a_report_of_several_runs_shows(run: Path) -> None:
    """No stage is run then: the page looks by itself."""
    for name in (
        "eval/metrics.json", "eval/timing.json", "train/token/metrics.jsonl", "warmup/metrics.jsonl", "recipe.yaml",
        "collect/manifest.json", "collect/shard-00000-of-00003.parquet", "warmup/drafter/tokenizer.json",
    ):  # fmt: skip
        found_by_name(run / name, lambda: load_run(run), places=1)
    for name in ("provenance.json", "eval/DONE.json"):
        file, whole = run / name, (run / name).read_text()
        try:
            for text in (whole[:-5], whole.replace("e", "f", 1), whole.replace("1", "2", 1)):
                file.write_text(text)
                with pytest.raises(InputError, match=file.name):
                    load_run(run)
        finally:
            file.write_text(whole)


def test_the_record_of_what_was_submitted(tmp_path: Path) -> None:
    job = Job("data", "1234", "tiny-data", "slurm/data.sh")
    Record({"data": "k"}, {"time": "1:00:00"}, (job,)).write(tmp_path)
    file = next(tmp_path.rglob("jobs.json"))
    assert read_record(tmp_path) == Record({"data": "k"}, {"time": "1:00:00"}, (job,))
    whole = file.read_text()
    for text in (whole.replace("1234", "1235"), whole[:-9], ""):
        file.write_text(text)
        with pytest.raises(InputError, match=r"jobs\.json is damaged"):
            read_record(tmp_path)


@pytest.mark.parametrize("place", ["collect/DONE.json", "eval/table.md"])
def test_a_folder_in_a_files_place_is_told_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Where the stage's mark should be, and where a stage that is done again would write."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / place).unlink()
    (copy / place).mkdir()
    (copy / "eval/DONE.json").unlink()
    with pytest.raises(SystemExit) as left:
        main(["run", str(copy)])
    told = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2, told
    assert told == f"exittrain: {copy / place}: is a directory: put it right and run the same command again"


# Nothing is left out


def test_every_file_of_a_run_has_sums_somewhere(run: Path) -> None:
    """In a stage's mark, a checkpoint's, a folder's list, or its own. The exceptions hold nothing that is read."""
    covered: set[Path] = set()
    for mark in run.rglob("DONE.json"):
        covered |= {mark.parent / name for name in read_json(mark)["files"]}
    for mark in run.rglob("COMPLETE.json"):
        covered |= {mark.parent / name for name in read_json(mark)["files"]}
    for place in run.rglob(FILES):
        covered |= {place.parent / name for name in json.loads(place.read_text())["files"]}
    bare = []
    for file in run.rglob("*"):
        if not file.is_file() or file in covered:
            continue
        sealed = file.suffix == ".json" and SEAL in json.loads(file.read_text())
        if not sealed and not file.read_text().startswith("# sha256 "):
            bare.append(file.relative_to(run).as_posix())
    assert [name for name in bare if name != ".lock"] == []
