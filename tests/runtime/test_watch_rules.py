"""The watch's rules without processes: whose silence counts, what breaks a connection, what the variable may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from exittrain.errors import InputError
from exittrain.runtime import watch
from exittrain.runtime.bulletin import Beat
from exittrain.runtime.silence import ARRIVAL_SECONDS, STORE, Silence

LIMIT = 8.0


class Heard:
    """Rank 0's silence over ranks 1 and 2, one second a call."""

    def __init__(self) -> None:
        self.bulletin = SimpleNamespace(answers=0, beats={})
        self.silence = Silence(self.bulletin, [1, 2], LIMIT)  # type: ignore[arg-type]

    def second(self, *alive: int, answers: bool = True, passed: float = 1.0, excused: tuple[int, ...] = ()) -> object:
        for rank in alive:
            self.bulletin.beats[rank] = Beat(self.bulletin.beats.get(rank, Beat()).count + 1, 0, "n1")
        self.bulletin.answers += answers
        return self.silence.observe(passed, excused)


def seconds_until(heard: Heard, *alive: int, accused: int, **how: object) -> int:
    for second in range(1, 2000):
        found = heard.second(*alive, **how)  # type: ignore[arg-type]
        if found is not None:
            assert found == accused
            return second
    raise AssertionError("nobody was accused")


def test_the_silent_one_is_accused_at_the_limit() -> None:
    heard = Heard()
    assert [heard.second(1, 2) for _ in range(30)] == [None] * 30
    assert seconds_until(heard, 1, accused=2) == LIMIT


def test_one_sign_of_life_starts_the_count_again() -> None:
    heard = Heard()
    heard.second(1, 2)
    assert [heard.second(1) for _ in range(7)] == [None] * 7
    assert heard.second(1, 2) is None
    assert seconds_until(heard, 1, accused=2) == LIMIT


def test_who_has_left_is_not_missed() -> None:
    heard = Heard()
    heard.second(1, 2)
    assert [heard.second(1, excused=(2,)) for _ in range(30)] == [None] * 30


def test_a_silent_store_accuses_no_rank() -> None:
    """All come through it; once it answers, they have their time to be heard."""
    heard = Heard()
    heard.second(1, 2)
    assert [heard.second(answers=False) for _ in range(7)] == [None] * 7
    assert heard.second() is None and heard.second(1, 2) is None
    assert seconds_until(heard, accused=STORE, answers=False) == LIMIT


def test_the_watchers_own_sleep_does_not_count() -> None:
    """A suspended job: an hour passes between two looks, then all go on."""
    heard = Heard()
    heard.second(1, 2)
    assert heard.second(passed=3600.0) is None and heard.second(answers=False, passed=3600.0) is None
    assert heard.second(1, 2) is None


def test_the_first_sign_of_life_may_be_late() -> None:
    assert seconds_until(Heard(), 1, accused=2) == ARRIVAL_SECONDS


@pytest.mark.parametrize(("given", "limit"), [("", 60.0), ("0", 0.0), ("2.5", 2.5), ("3600", 3600.0)])
def test_the_limit(monkeypatch: pytest.MonkeyPatch, given: str, limit: float) -> None:
    monkeypatch.setenv(watch.VARIABLE, given)
    assert watch.limit_seconds() == limit


@pytest.mark.parametrize("given", ["soon", "-1", "0.5", "inf", "nan"])
def test_what_is_no_limit(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(watch.VARIABLE, given)
    with pytest.raises(InputError, match=f"{watch.VARIABLE}={given}: give seconds, 2 or more, or 0"):
        watch.limit_seconds()


def test_only_errors_of_connections_are_laid_on_others() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3985. Ask."
    assert watch.broken_connection(RuntimeError(gloo)) == "Connection closed by peer [127.0.0.1]:3985"
    outer = ValueError("could not save")
    outer.__context__ = RuntimeError(gloo)
    assert watch.broken_connection(outer) == "Connection closed by peer [127.0.0.1]:3985"
    assert watch.broken_connection(RuntimeError("size mismatch at dimension 1")) is None
    assert watch.explain(RuntimeError(gloo)) is None  # alone


def test_alone_leaving_tells_nobody() -> None:
    watch.all_end()
    watch.depart()
    watch.leave(1, "said to nobody")
    assert not watch.is_on()
