"""Collection shared by ranks and by the jobs of an array: the bytes of one job (cases.md 88, 91, 92, 93, 95, 96)."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from collected_run import SHARDS, files_of, recipe_in

from exittrain.cli.main import main
from exittrain.config.load import build_recipe
from exittrain.errors import InputError, Interrupted
from exittrain.records.files import TEMPORARY
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import shard_name
from exittrain.runtime import parts
from exittrain.runtime.crew import Crew
from exittrain.runtime.lock import hold
from exittrain.runtime.parts import WHOLE, Part
from exittrain.stages import collect as collect_module
from exittrain.stages import disk
from exittrain.stages.collect import finish_collect, work_collect
from exittrain.stages.context import StageContext
from exittrain.stages.run import run_stages


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return recipe_in(tmp_path_factory.mktemp("recipe"))


Make = Callable[..., StageContext]


@pytest.fixture(scope="module")
def whole(recipe: dict, tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    """One job's run; its target is loaded once for all tests."""
    context = StageContext(build_recipe(recipe), RunFolder(tmp_path_factory.mktemp("whole") / "run"))
    run_stages(context, ["data", "warmup", "collect"])
    return context


@pytest.fixture
def make(whole: StageContext, recipe: dict, tmp_path: Path) -> Make:
    """make("1/3") -> the context of that part, in a run folder that is ready for `collect`."""
    run = RunFolder(
        shutil.copytree(whole.run.path, tmp_path / "run", ignore=shutil.ignore_patterns("collect", ".lock*"))
    )

    def context(part: str = "0/1", **collect: object) -> StageContext:
        own = build_recipe({**recipe, "collect": {**recipe["collect"], **collect}})
        return StageContext(own, run, part=Part.parse(part), _target=whole.target())

    return context


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are written."""
    made: list[str] = []
    original = collect_module.write_shard

    def write(path: Path, rows: list, key: str) -> object:
        made.append(path.name)
        return original(path, rows, key)

    monkeypatch.setattr(collect_module, "write_shard", write)
    return made


def take_place(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """For shares alone: collectives stay those of one process."""
    monkeypatch.setattr(parts, "rank", lambda: rank)
    monkeypatch.setattr(parts, "world_size", lambda: world_size)


@pytest.mark.parametrize(("world", "part_count"), [(2, 1), (3, 1), (SHARDS + 2, 1), (2, 2)])
def test_any_number_of_ranks_writes_the_same_bytes(
    make: Make, whole: StageContext, monkeypatch: pytest.MonkeyPatch, writes: list[str], world: int, part_count: int
) -> None:
    """Each shard is one rank's; ranks without a shard take part (cases.md 88)."""
    context = make()
    context.run.begin("collect", context.stage_key("collect"))
    for index in reversed(range(part_count)):
        for rank in reversed(range(world)):
            assert finish_collect(context) is False
            take_place(monkeypatch, rank, world)
            work_collect(make(f"{index}/{part_count}"))
    assert sorted(writes) == [shard_name(i, SHARDS) for i in range(SHARDS)]
    assert finish_collect(context) is True
    assert files_of(context) == files_of(whole)


@pytest.mark.parametrize("order", ["0/2 1/2", "2/3 0/3 1/3", "6/7 3/7 0/7 5/7 1/7 4/7 2/7"])
def test_parts_in_any_order_end_with_the_bytes_of_one_job(
    make: Make, whole: StageContext, writes: list[str], order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one finishes; a part that has nothing to do says so, and one that comes again does nothing."""
    *first, last = order.split()
    for part in first:
        run_stages(make(part), ["collect"])
        assert make().run.stored_key("collect") is None
        assert f"collect: part {part} is done" in capsys.readouterr().err
    run_stages(make(last), ["collect"])
    assert files_of(make()) == files_of(whole) and sorted(writes) == sorted({*writes})
    for part in (first[0], last):
        run_stages(make(part), ["collect"])
    assert "collect: done" in capsys.readouterr().err and len(writes) == SHARDS
    run_stages(make(), ["collect"])
    assert len(writes) == SHARDS and not list(make().run.path.rglob(f"{TEMPORARY}*"))


def test_parts_that_work_at_once_leave_each_other_alone(
    make: Make, whole: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin the stage, each before any has ended; each ends it or leaves it to another."""
    together = threading.Barrier(3, timeout=60)
    original, met = collect_module.write_shard, threading.local()

    def write(path: Path, rows: list, key: str) -> object:
        if not hasattr(met, "once"):
            met.once = True
            together.wait()
        return original(path, rows, key)

    drafter, one_at_a_time = StageContext.drafter, threading.Lock()

    def load(self: StageContext, source: Path) -> object:
        with one_at_a_time:  # transformers loads in one thread; jobs are processes
            return drafter(self, source)

    monkeypatch.setattr(collect_module, "write_shard", write)
    monkeypatch.setattr(StageContext, "drafter", load)
    failures: list[BaseException] = []

    def job(part: str) -> None:
        try:
            run_stages(make(part), ["collect"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=job, args=(f"{index}/3",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and files_of(make()) == files_of(whole)


@pytest.fixture
def other(make: Make) -> Iterator[Crew]:
    """Another job that does part 1/2, alive as long as the test."""
    context = make("1/2")
    with Crew(context.run.path, "collect", context.part, lambda: None) as crew:
        with crew.joining(context.stage_key("collect")):
            pass
        yield crew


def test_who_may_not_come_in_changes_nothing(make: Make, other: Crew) -> None:
    def tree() -> set[Path]:
        return {path for path in make().run.path.rglob("*") if ".locks" not in path.parts}

    before = tree()
    for context, expected in [
        (make("1/2"), r"in use by collect 1/2 .* each part is for one job"),
        (make("0/3"), "in parts of 2"),
        (make("0/2", shards=2), "under another recipe"),
        (make(), r"is in use by collect 1/2 \(process"),
    ]:
        with pytest.raises(InputError, match=expected):
            run_stages(context, ["collect"])
        assert tree() == before
    run_stages(make("0/2"), ["collect"])


def test_a_part_waits_for_no_owner(make: Make) -> None:
    with hold(make().run.path), pytest.raises(InputError, match="is in use by process"):
        run_stages(make("0/2"), ["collect"])


def test_what_a_killed_writer_left_goes_but_never_a_live_ones(make: Make, other: Crew, whole: StageContext) -> None:
    """Part 1/2 is at work on shards 1 and 3; part 0/2 comes again after a kill (cases.md 93)."""
    folder = make().run.stage("collect")
    make().run.begin("collect", make().stage_key("collect"))
    killed, live = (folder / f"{TEMPORARY}{shard_name(i, SHARDS)}-00" for i in (0, 1))
    shared = folder / f"{TEMPORARY}manifest.json-00"
    for file in (killed, live, shared):
        file.write_bytes(b"half")
    (folder / shard_name(2, SHARDS)).write_bytes(b"no record yet")
    run_stages(make("0/2"), ["collect"])
    assert not killed.exists() and live.exists()
    with other.leaving():
        pass
    run_stages(make("1/2"), ["collect"])
    assert files_of(make()) == files_of(whole)


def test_a_damaged_shard_is_its_parts_to_make(
    make: Make, whole: StageContext, writes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by whoever comes, remade by its owner alone; the stage is not done meanwhile (cases.md 92, 96)."""
    shutil.copytree(whole.run.path / "collect", make().run.path / "collect")
    broken = make().run.path / "collect" / shard_name(3, SHARDS)
    broken.write_bytes(broken.read_bytes()[:-9] + b"different")
    run_stages(make("0/2"), ["collect"])
    said = capsys.readouterr().err
    assert f"again, because {broken}" in said and f"still to be made, {broken.name} by part 1/2" in said
    assert writes == [] and make().run.stored_key("collect") is None
    run_stages(make("1/2"), ["collect"])
    assert f"{broken} is damaged" in capsys.readouterr().err
    assert writes == [broken.name] and files_of(make()) == files_of(whole)


def test_a_signal_leaves_whole_shards(make: Make, whole: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    context, made, original = make("0/2"), [], collect_module.write_shard

    def write(path: Path, rows: list, key: str) -> object:
        made.append(path.name)
        if len(made) == 2:
            context.stop.set("SIGTERM")
        return original(path, rows, key)

    monkeypatch.setattr(collect_module, "write_shard", write)
    with pytest.raises(Interrupted):
        run_stages(context, ["collect"])
    assert context.run.stored_key("collect") is None
    run_stages(make("1/2"), ["collect"])
    run_stages(make("0/2"), ["collect"])
    assert made == [shard_name(i, SHARDS) for i in (0, 2, 1, 3, 4)]
    assert files_of(make()) == files_of(whole)


def test_a_part_asks_for_room_before_it_begins(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 91."""

    def no_room(*_: object) -> None:
        raise InputError("no room")

    monkeypatch.setattr(disk, "check_room", no_room)
    with pytest.raises(InputError, match="no room"):
        run_stages(make("0/2"), ["collect"])
    assert not list(make().run.path.glob("collect/shard-*"))


@pytest.mark.parametrize("names", [["warmup"], ["data"], ["collect", "data"]])
def test_other_stages_fall_into_no_parts(make: Make, names: list[str]) -> None:
    with pytest.raises(InputError, match="--part is for one stage, collect or eval"):
        run_stages(make("0/2"), names)


def test_a_part_needs_what_the_stage_stands_on(make: Make, tmp_path: Path) -> None:
    context = StageContext(make().recipe, RunFolder(tmp_path / "none"), part=Part(0, 2))
    with pytest.raises(InputError, match="stage 'data' has not been run"):
        run_stages(context, ["collect"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("part", "expected"), [("2/2", "they are 0/2 to 1/2"), ("0/0", "write 0/8"), ("first", "write 0/8")]
)
def test_a_part_that_is_none(make: Make, part: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["collect", str(make().run.path), "--part", part])
    assert left.value.code == 2 and expected in capsys.readouterr().err


def test_a_part_on_the_command_line(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[Part, list[str]]] = []
    monkeypatch.setattr("exittrain.stages.run.run_stages", lambda context, names: given.append((context.part, names)))
    for arguments in (["--part", "1/3"], []):
        with pytest.raises(SystemExit) as left:
            main(["collect", str(make().run.path), *arguments])
        assert left.value.code == 0, capsys.readouterr().err
    assert given == [(Part(1, 3), ["collect"]), (WHOLE, ["collect"])]
