"""Room is looked for before anything is written, and a disk that fills up all the same loses nothing (cases.md 91, 93).

A small file system in memory where this process may mount one; elsewhere a writer that finds no room.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import recipe_of

from exittrain.cli.main import _disk_is_full
from exittrain.config.load import load_recipe
from exittrain.errors import InputError
from exittrain.models import folders
from exittrain.records.run_folder import RunFolder
from exittrain.runtime import ranks
from exittrain.stages import disk
from exittrain.stages.context import StageContext
from exittrain.stages.disk import can_reserve, check_disk, check_room, size_text, stage_bytes, used_bytes
from exittrain.stages.export.hf import export_hf
from exittrain.stages.export.source import of_run
from exittrain.stages.run import run_stage, run_stages
from exittrain.stages.training import checkpoints

MIB = 1 << 20


# What is estimated


def test_estimates_are_above_what_is_written_and_not_far(tiny_run: Path, tiny_corpus: Path) -> None:
    estimates = stage_bytes(recipe_of(tiny_corpus))
    assert list(estimates) == [
        "target", "data", "warmup", "collect", "train/token", "train/reach_kl", "train/exit", "eval", "report"
    ]  # fmt: skip
    for stage, estimate in estimates.items():
        assert estimate is not None
        real = used_bytes(tiny_run / stage)
        assert real < estimate < 4 * real, f"{stage}: {estimate / real:.2f} times {real:.0f} bytes"


@pytest.mark.parametrize(("recipe", "low", "high"), [("qwen3-4b", 100, 300), ("llama3.1-8b-eagle3", 80, 200)])
def test_estimates_of_a_recipe_with_a_large_drafter(recipe: str, low: float, high: float) -> None:
    """In GiB: checkpoints of 12 bytes a trained parameter, three at once, and three saved drafters beside them."""
    loaded = load_recipe(recipe)
    sizes = stage_bytes(loaded)
    drafter = disk.drafter_size(loaded)
    assert drafter is not None and loaded.train is not None
    least = 3 * 12 * drafter.trained_parameters + 3 * 4 * drafter.num_parameters
    for arm in loaded.train.arms:
        size = sizes[f"train/{arm}"]
        assert size is not None and least < size < 1.2 * least
    assert low < sum(size or 0 for size in sizes.values()) / (1 << 30) < high


@pytest.mark.parametrize(
    ("override", "stage", "factor"),
    [
        ("collect.top_k_logprobs=32", "collect", 1.8),
        ("collect.anchors_per_sequence=30", "collect", 2.0),
        ("tree.budget=60", "collect", 2.0),
        ("data.max_length=480", "data", 3.0),
        ("eval.max_new_tokens=60", "eval", 1.5),
        ("eval.contexts=800", "eval", 3.0),
        ("train.steps=1000", "train/token", 1.2),
        ("drafter.shape.hidden_size=64", "warmup", 2.0),
        ("tracking.wandb=offline", "warmup", 1.2),
    ],
)
def test_estimates_follow_the_recipe(tiny_corpus: Path, override: str, stage: str, factor: float) -> None:
    before, after = (stage_bytes(recipe_of(tiny_corpus, *extra))[stage] for extra in ((), (override,)))
    assert before is not None and after is not None and after > factor * before


def test_a_stage_of_unknown_size_counts_as_nothing(tmp_path: Path) -> None:
    recipe = load_recipe("qwen3-4b", ["target.model=someone/unknown", "drafter={layers: 2}"])
    sizes = stage_bytes(recipe)
    assert sizes["warmup"] is None and sizes["train/token"] is None and sizes["data"]
    check_disk(StageContext(recipe, RunFolder(tmp_path / "run")), ["warmup", "train"])


# What it is compared with


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": size})())


def test_the_line_says_what_is_needed_what_is_there_where_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 3 * MIB)
    check_room(tmp_path / "a/b", 3 * MIB, "collect", "lower it")
    with pytest.raises(InputError) as caught:
        check_room(tmp_path / "a/b", 35.5 * MIB, "collect", "lower it")
    assert str(caught.value) == (
        f"collect may need 35.5 MiB more in {tmp_path / 'a/b'}, where 3.0 MiB are free: make room, or lower it"
    )
    assert list(tmp_path.iterdir()) == []
    assert [size_text(size) for size in (700, 5000, 3 << 30)] == ["1 KiB", "5 KiB", "3.00 GiB"]


def test_what_is_done_or_half_done_needs_less(
    tiny_run: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[float, str]] = []
    monkeypatch.setattr(disk, "check_room", lambda folder, needed, what, remedy: asked.append((needed, what)))
    recipe, every = recipe_of(tiny_corpus), ["target", "data", "warmup", "collect", "train", "eval", "report"]
    check_disk(StageContext(recipe, RunFolder(tiny_run)), every)
    check_disk(StageContext(recipe, RunFolder(tmp_path / "none")), every)
    check_disk(StageContext(recipe, RunFolder(tmp_path / "none")), ["collect"])
    check_disk(StageContext(recipe_of(tiny_corpus, "train.arms.exit.weight=2.0"), RunFolder(tiny_run)), every)
    sizes = stage_bytes(recipe)
    assert asked[0] == (0, "") and asked[2] == (sizes["collect"], "collect")
    assert asked[1] == (sum(size or 0 for size in sizes.values()), ", ".join(every))
    left = sum((sizes[name] or 0) - used_bytes(tiny_run / name) for name in ("train/exit", "eval", "report"))
    assert asked[3] == (pytest.approx(left), "train, eval, report")


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_found_though_it_stands_in_no_count(
    tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file system gives at most 300 KiB to this user."""
    monkeypatch.setattr(disk, "_fallocate", lambda descriptor, size: number if size > 300 * 1024 else 0)
    monkeypatch.setattr(disk, "_in_memory", lambda folder: False)
    check_room(tmp_path, 300 * 1024, "collect", "lower it")
    with pytest.raises(InputError, match=r"collect may need 1\.0 MiB .*a quota leaves about 29\d KiB: make room, or"):
        check_room(tmp_path, MIB, "collect", "lower it")
    run = tmp_path / "run"
    with pytest.raises(InputError, match=r"a quota leaves about .*: make room, or set run_dir to another disk"):
        run_stages(StageContext(recipe_of(tiny_corpus), RunFolder(run)), ["target", "data"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EFBIG])
def test_a_file_system_that_cannot_be_asked_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(disk, "_fallocate", lambda descriptor, size: number)
    check_room(tmp_path, 1000, "collect", "lower it")


def test_jobs_that_look_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other jobs' looks take for a moment is no quota; what is taken for longer is one."""
    answers = iter([errno.ENOSPC] * 3 + [0])
    monkeypatch.setattr(disk, "_fallocate", lambda descriptor, size: next(answers, errno.ENOSPC))
    monkeypatch.setattr(disk, "_in_memory", lambda folder: False)
    monkeypatch.setattr(disk, "APART_SECONDS", (0.0, 0.01))
    check_room(tmp_path, 1000, "collect", "lower it")
    with pytest.raises(InputError, match="a quota leaves about"):
        check_room(tmp_path, 1000, "collect", "lower it")


def test_asking_takes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    before = shutil.disk_usage(tmp_path).free
    assert can_reserve(tmp_path, 64 * MIB)
    assert list(tmp_path.iterdir()) == []
    assert abs(before - shutil.disk_usage(tmp_path).free) < max(16 * MIB, before // 50)
    with open(tmp_path / "file", "wb") as file:
        number = disk._fallocate(file.fileno(), MIB)
        if number == 0:
            assert os.fstat(file.fileno()).st_size == 0 and os.fstat(file.fileno()).st_blocks * 512 >= MIB


def test_nobody_else_looks_at_the_disk(tmp_path: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main rank's answer is everybody's: another rank's disk may seem full or not."""
    looked: list[str] = []
    monkeypatch.setattr(ranks, "from_main", lambda action: looked.append("asked the main rank") or 1 / 0)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: looked.append("looked"))
    with pytest.raises(ZeroDivisionError):
        run_stages(StageContext(recipe_of(tiny_corpus), RunFolder(tmp_path / "run")), ["target"])
    assert looked == ["asked the main rank"]


def test_an_export_looks_first(
    tiny_run: Path, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = of_run(StageContext(recipe_of(tiny_corpus), RunFolder(tiny_run)), "token")
    free(monkeypatch, 1000)
    with pytest.raises(InputError, match=r"the export may need .* are free: make room, or choose another --output"):
        export_hf(source, tmp_path / "out/drafter")
    assert list(tmp_path.iterdir()) == []


# A disk that fills up in the middle


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)  # weights may be mapped


def leave(place: Path, size: int) -> Path:
    """Another job's file, which leaves `size` bytes."""
    ballast = place / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(place).free - size))
    return ballast


def stop_for_room(context: StageContext, stage: str) -> None:
    with pytest.raises(Exception) as caught:
        run_stage(context, stage)
    assert _disk_is_full(caught.value), repr(caught.value)


def is_tidy(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.name.startswith(".tmp-") or ".partial" in path.name]


SLOW = pytest.mark.slow

# Bytes that are left: less than the stage needs, and enough that it has begun to write.
LEFT = {"target": 200_000, "data": 6_000, "warmup": 90_000, "collect": 24_000, "train": 120_000, "eval": 12_000}


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=SLOW if stage in ("target", "warmup", "eval") else ()) for stage in LEFT]
)
def test_a_disk_that_fills_up_and_then_has_room(
    small: Path, tiny_run: Path, tiny_corpus: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other jobs have taken what was there when it began: it stops, tidy, and goes on to the same bytes."""
    folder = Path(shutil.copytree(tiny_run, small / "tiny"))
    results = [file for file in sorted((folder / stage).rglob("*")) if file.is_file() and is_result(file)]
    whole = {file: file.read_bytes() for file in results}
    assert whole
    shutil.rmtree(folder / stage)
    ballast = leave(small, LEFT[stage])
    context = StageContext(recipe_of(tiny_corpus), RunFolder(folder))
    with monkeypatch.context() as patch:
        patch.setattr("exittrain.stages.run.check_disk", lambda *_: None)
        stop_for_room(context, stage)
    assert is_tidy(folder) and not (folder / stage / "DONE.json").exists()
    kept = [file for file in results if file.exists()]
    assert all(file.read_bytes() == whole[file] for file in kept if file.suffix in (".parquet", ".safetensors"))
    ballast.unlink()
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), stage)
    assert {file for file in results if not file.exists()} == set()
    assert [file for file in results if file.read_bytes() != whole[file]] == []


def is_result(file: Path) -> bool:
    """What a stage made, without a clock in it."""
    return file.name in ("metrics.json", "contexts.parquet", "model.safetensors") or file.suffix == ".parquet"


def test_whole_shards_stay_and_are_not_made_again(
    small: Path, tiny_run: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_run, small / "tiny"))
    shutil.rmtree(folder / "collect")
    leave(small, 40_000)
    context = StageContext(recipe_of(tiny_corpus), RunFolder(folder))
    with monkeypatch.context() as patch:
        patch.setattr("exittrain.stages.run.check_disk", lambda *_: None)
        stop_for_room(context, "collect")
    made = {file.name: file.stat().st_mtime_ns for file in (folder / "collect").glob("*.parquet")}
    assert 0 < len(made) < 3
    (small / "ballast").unlink()
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), "collect")
    after = {file.name: file.stat().st_mtime_ns for file in (folder / "collect").glob("*.parquet")}
    assert len(after) == 3 and made.items() <= after.items()


@pytest.mark.parametrize(
    ("stage", "write"),
    [
        ("data", 1), ("collect", 4), pytest.param("eval", 4, marks=SLOW), pytest.param("data", 4, marks=SLOW),
        pytest.param("collect", 1, marks=SLOW), pytest.param("collect", 6, marks=SLOW),
        pytest.param("eval", 1, marks=SLOW), *(pytest.param("train", n, marks=SLOW) for n in (1, 4, 9, 20)),
    ],
)  # fmt: skip
def test_no_room_at_the_nth_write(
    tiny_run: Path, tiny_corpus: Path, tmp_path: Path, stage: str, write: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without a file system of its own: the n-th file is cut short, with what the kernel answers."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "tiny"))
    results = [file for file in sorted((folder / stage).rglob("*")) if file.is_file() and is_result(file)]
    whole = {file: file.read_bytes() for file in results}
    shutil.rmtree(folder / stage)
    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", failing(os.fsync, write, errno.EDQUOT))
        stop_for_room(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), stage)
    assert is_tidy(folder)
    run_stage(StageContext(recipe_of(tiny_corpus), RunFolder(folder)), stage)
    assert {file: file.read_bytes() for file in results} == whole


def test_a_checkpoint_that_another_rank_cannot_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own files are written; the one before stays what is gone on from."""
    engine: Any = SimpleNamespace(state=lambda: {"parameters": {}})
    checkpoints.save_checkpoint(tmp_path, 1, engine, {"seconds": []})

    def fail(action: Callable[[], object]) -> None:
        action()
        assert (tmp_path / ".tmp-step-000002/rank-00000.pt").exists()
        raise InputError("rank 1 could not go on: no space left on the disk")

    monkeypatch.setattr(checkpoints, "on_all", fail)
    with pytest.raises(InputError, match="rank 1 could not go on"):
        checkpoints.save_checkpoint(tmp_path, 2, engine, {"seconds": []})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoints.latest_checkpoint(tmp_path) == (tmp_path / "step-000001", 1)


def failing(function: Callable[[int], None], write: int, number: int) -> Callable[[int], None]:
    """`function`, whose `write`-th call and all after it find no room."""
    calls = iter(range(1, 10**6))

    def call(descriptor: int) -> None:
        if next(calls) >= write:
            raise OSError(number, os.strerror(number))
        function(descriptor)

    return call
