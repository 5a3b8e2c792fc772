"""A study's contexts leave room for its trees in the target's positions and in every drafter's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_study import entrant, sequences, tiny_target

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.tasks import heldout_task
from exittrain.stages.studies.base import Bench
from exittrain.stages.studies.run import STUDIES, study
from exittrain.stages.studies.settings import load_suite


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def entrants():
    return [entrant("long"), entrant("short", max_positions=16), entrant("shorter", "warm start", max_positions=9)]


def bench_of(target, entrants, folder: Path) -> Bench:
    settings = load_suite("oracle").model_copy(update={"contexts": 500})
    return Bench(target, entrants, [heldout_task(sequences(), None)], settings, Sampling(), 0, folder, StopFlag())


@pytest.mark.parametrize(
    ("names", "depth", "chain", "last"),
    [
        (["long"], 3, 0, 22),  # sequences of 24 tokens
        (["long", "short"], 3, 0, 12),  # at the last of them a node of depth 3 takes position 15
        (["short", "long"], 3, 0, 12),
        (["short"], 10, 0, 5),
        (["long"], 3, 50, 13),  # of the target's 64
        (["short"], 3, 50, 12),
        (["shorter"], 3, 0, 5),  # the first trained token stands at 6
    ],
)
def test_the_smallest_model_says_where_contexts_end(target, entrants, tmp_path, names, depth, chain, last):
    bench = bench_of(target, entrants, tmp_path)
    contexts = bench.contexts(names, depth, chain)
    assert sorted(set(contexts.anchors.tolist())) == list(range(5, last + 1))
    assert list(bench._subjects) == names[:1]


def test_no_room_names_the_model(target, entrants, tmp_path):
    bench = bench_of(target, entrants, tmp_path)
    for names, chain, words in [
        (["long", "shorter"], 0, "4 levels of nodes in the 9 positions of shorter"),
        (["shorter"], 60, "60 levels of nodes in the 64 positions of the target"),
    ]:
        with pytest.raises(InputError, match=f"no context leaves room for {words}: ask for smaller trees"):
            bench.contexts(names, 4, chain)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_asks_its_drafters(target, entrants, tmp_path, name):
    small = ["suite.budgets=[8]"] if name == "oracle" else []
    settings = load_suite(name, ["suite.drafters=[shorter]", "suite.depth=5", *small])
    with pytest.raises(InputError, match="in the 9 positions of shorter"):
        study(target, entrants, settings, tmp_path, lambda: None, sequences())
    assert not (tmp_path / "study.json").exists()
