"""Eval by several ranks and by the jobs of an array: no file shows how many there were, or in how many lives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from exittrain.build.base import TreeShape
from exittrain.cli.main import main
from exittrain.config.schema import EvalSection
from exittrain.drafters.calibration import Calibration, Choice
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import Interrupted
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.runtime import parts
from exittrain.runtime.parts import WHOLE, Part
from exittrain.runtime.signals import StopFlag
from exittrain.stages import evaluate as stage
from exittrain.stages.conversations.store import TokenSequence
from exittrain.stages.evaluation import cells, contexts, decoding
from exittrain.stages.evaluation.engine import Engine
from exittrain.stages.evaluation.pieces import Incomplete, Piece
from exittrain.stages.evaluation.results import CellStore, Comparison
from exittrain.stages.evaluation.setup import Entrant, Setup
from exittrain.stages.evaluation.tasks import EvalPrompt, Task, heldout_task

VOCAB = 19
TINY = Path(__file__).resolve().parents[1] / "fixtures/tiny.yaml"
FILES = ("metrics.json", "rounds.jsonl", "contexts.parquet")
SETTINGS = EvalSection(
    tasks=["heldout"], temperatures=[1.5, 0.0], verifiers=["tev", "residual", "auto"], max_new_tokens=4, contexts=20,
    bootstrap=20, batch_size=2, speed=False,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "PIECE", 8)
        patch.setattr(decoding, "ANSWERS", 2)
        patch.setattr(cells, "VERIFIER_DRAWS", 2)
        yield


def tiny(seed: int, noise: float = 0.0):
    model = make_causal_lm(VOCAB, 16, 1, 2, 32, max_positions=40, seed=seed)
    with torch.no_grad():
        model.output.weight.mul_(12.0)
        for parameter in model.module.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny(0).module, name="tiny", verify=False)


@pytest.fixture(scope="module")
def entrants(target: TargetModel) -> list[Entrant]:
    """One with a calibration, one without."""
    far, near = CausalDrafter(tiny(1)), CausalDrafter(tiny(0, noise=0.1))
    choice = Choice(1.5, 5, "sampled_wor", 2, 2, "2-ary", "traversal", 2.0, None, None, None)
    cold = Choice(0.0, 4, "best_first", 2, 2, "chain", "tev", 2.0, None, None, None)
    near.calibration = Calibration(target.fingerprint(), near.fingerprint(), 0, 1.0, "here", (choice, cold))
    return [Entrant("far", lambda: far), Entrant("near", lambda: near)]


def tasks() -> list[Task]:
    """Held-out sequences of which two leave no room for an answer, and a benchmark without sequences of its own."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(7):
        length, prompt = (40, 37) if i in (1, 4) else (24, 6)
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        rows.append(TokenSequence(f"s{i}", ids, [0] * prompt + [1] * (length - prompt), prompt, "test"))
    prompts = tuple(EvalPrompt(f"p{i}", tuple(range(1, 5 + i))) for i in range(3))
    long = EvalPrompt("long", tuple(range(1, 19)) * 2 + (1, 2))
    return [heldout_task(rows, None), Task("bench", (long, *prompts), "made up")]


def engine(target, entrants, folder: Path, part: Part = WHOLE, stop: StopFlag | None = None, **changes) -> Engine:
    settings = SETTINGS.model_copy(update=changes)
    pairs, shape = (Comparison("near", "far", "as trained"),), TreeShape(budget=6, depth=3, width=3)
    setup = Setup("made", settings, "best_first", shape, Sampling(), 0, pairs, "far")
    return Engine(target, entrants, setup, tasks(), folder, stop or StopFlag(), part)


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(parts, "rank", lambda: rank)
    monkeypatch.setattr(parts, "world_size", lambda: world)


def work(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Engine], world: int) -> None:
    """What `world` ranks do, one after another between the places where they wait for each other."""
    engines = [make() for _ in range(world)]
    for step in (Engine.check, Engine._work_answers, Engine._work):
        for rank, one in enumerate(engines):
            as_rank(monkeypatch, rank, world)
            step(one)
    as_rank(monkeypatch, 0, 1)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def alone(target, entrants, tmp_path_factory) -> Path:
    """One process, everything at once."""
    one = engine(target, entrants, tmp_path_factory.mktemp("alone"))
    one.work()
    stage._conclude(one)
    return one.folder


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each piece has been measured."""
    counts: Counter[str] = Counter()
    original = CellStore.get

    def counted(self, kind, key, make):
        def once():
            counts[key] += 1
            return make()

        return original(self, kind, key, once)

    monkeypatch.setattr(CellStore, "get", counted)
    return counts


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "cells").iterdir())


@pytest.mark.parametrize("world", [2, 80, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_share_every_piece_once_and_leave_no_trace(
    target, entrants, alone, tmp_path, monkeypatch, made, world
) -> None:
    """80: far more ranks than any list has pieces."""
    work(monkeypatch, lambda: engine(target, entrants, tmp_path), world)
    stage._conclude(engine(target, entrants, tmp_path))
    assert files(tmp_path) == files(alone)
    assert set(made.values()) == {1} and len(made) == len(stored(alone))


def test_parts_in_any_order_with_ranks_of_their_own(target, entrants, alone, tmp_path, monkeypatch, made) -> None:
    """The first part cannot wait for the others' answers: it makes them all, and they find them."""
    for index, world in ((2, 1), (0, 2), (1, 1)):
        with pytest.raises(Incomplete, match="is not measured yet: run the other parts"):
            engine(target, entrants, tmp_path).finish()
        work(monkeypatch, lambda index=index: engine(target, entrants, tmp_path, Part(index, 3)), world)
    stage._conclude(engine(target, entrants, tmp_path, Part(1, 3)))
    assert files(tmp_path) == files(alone)
    assert set(made.values()) == {1} and len(made) == len(stored(alone))


def test_pieces_go_round_the_ranks(target, entrants, tmp_path, monkeypatch) -> None:
    """No rank has two pieces more than another, though many lists are shorter than there are ranks."""
    shares: Counter[int] = Counter()
    monkeypatch.setattr(Piece, "get", lambda self, store: shares.update([parts.rank()]))
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        one = engine(target, entrants, tmp_path, contexts=None)
        one._work()
    # 3 batches of prompts in held-out data and 2 in the benchmark, 2 temperatures, 2 verifiers, and `auto` of one
    assert sum(shares.values()) == (3 + 2) * 2 * (2 + 3)
    assert max(shares.values()) - min(shares.values()) <= 1


def test_a_stopped_part_goes_on_and_damage_is_made_anew(
    target, entrants, alone, tmp_path, monkeypatch, made, capsys
) -> None:
    first, second = Part(0, 2), Part(1, 2)
    engine(target, entrants, tmp_path, first).work()
    before, stop, decode_cell = len(stored(tmp_path)), StopFlag(), decoding.decode_cell

    def stops(*arguments):
        if len(stored(tmp_path)) > before + 4:
            stop.set("SIGTERM")
        return decode_cell(*arguments)

    monkeypatch.setattr(decoding, "decode_cell", stops)
    with pytest.raises(Interrupted):
        engine(target, entrants, tmp_path, second, stop).work()
    monkeypatch.setattr(decoding, "decode_cell", decode_cell)
    assert before < len(stored(tmp_path)) < len(stored(alone))
    with pytest.raises(Incomplete):
        engine(target, entrants, tmp_path).finish()
    damaged, lost, *_ = stored(tmp_path)
    whole = damaged.read_bytes()
    damaged.write_text(damaged.read_text().replace("0", "1", 1))  # a flipped digit is damage too
    lost.unlink()
    made.clear()
    left = len(stored(alone)) - len(stored(tmp_path))
    for part in (first, second):
        engine(target, entrants, tmp_path, part).work()
    assert f"{damaged} is damaged: what it held is measured again" in capsys.readouterr().err
    assert sum(made.values()) == left + 1
    assert "seconds" in json.loads(whole)["cell"] or damaged.read_bytes() == whole
    damaged.write_text("{")
    with pytest.raises(Incomplete):
        engine(target, entrants, tmp_path).finish()
    engine(target, entrants, tmp_path).work()
    stage._conclude(engine(target, entrants, tmp_path))
    assert files(tmp_path) == files(alone)


def test_prompts_without_room_count_once_in_the_whole(alone) -> None:
    metrics = json.loads((alone / "metrics.json").read_text())
    assert {table["verifier"] for table in metrics["decode"]} == {"tev", "residual", "auto"}
    reason = "prompt too long for the models' positions"
    expected = {"heldout": (7, 5, {reason: 2}), "bench": (4, 3, {reason: 1})}
    for table in metrics["decode"]:
        for row in table["drafters"]:
            assert (row["attempted"], row["finished"], row["skipped"]) == expected[table["task"]]


def test_speed_is_measured_once_all_else_is_there(target, entrants, tmp_path, monkeypatch) -> None:
    """By one process, when all pieces are there: no rank is at work beside it."""
    changes = {"contexts": None, "temperatures": [1.5], "verifiers": ["tev"], "speed": True}
    order = []
    monkeypatch.setattr("exittrain.stages.evaluation.engine.measure_speed", lambda *_: order.append("speed") or {})
    find = CellStore.find
    monkeypatch.setattr(CellStore, "find", lambda self, kind, key: order.append(kind.__name__) or find(self, kind, key))
    work(monkeypatch, lambda: engine(target, entrants, tmp_path, **changes), 2)
    assert "speed" not in order
    order.clear()
    engine(target, entrants, tmp_path, **changes).finish()
    assert order.count("speed") == 2 and "DecodeResult" not in order[order.index("speed") :]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["runs/a", "--part", "0/2", "--suite", "verifiers"], "--part shares the work on one run"),
        (["drafter", "--part", "0/2", "--target", "x"], "--part shares the work on one run"),
        (["runs/a", "runs/b", "--part", "0/2"], "--part shares the work on one run"),
        ([str(TINY), "--part", "2/2"], "part 2/2 does not exist: they are 0/2 to 1/2"),
        ([str(TINY), "--part", "two"], "--part two is no part: write 0/8 for the first of eight"),
    ],
)
def test_parts_that_cannot_be_are_refused(arguments, expected, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter/config.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        main(["eval", *arguments])
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert expected in line
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
