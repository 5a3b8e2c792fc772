"""Several ranks: a signal to one reaches all wherever they are, and none waits for one that has ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from ranks_at_work import GRACE, LIMIT, MEETING, Run

SOON = 15.0  # seconds: some machines are busy
AGAIN = "run the same command again to go on"


def only_lines(said: list[str]) -> bool:
    return all(text.startswith("exittrain: ") and text.count("\n") == 1 for text in said)


def test_the_exchanges(tmp_path: Path) -> None:
    run = Run(tmp_path, "answers", world=3)
    assert run.codes(60) == [0, 0, 0] and run.said() == ["", "", ""]


@pytest.mark.parametrize(("work", "world", "expected"), [
    ("last_was_given_another_step_count", 3, "train.steps is 4 on rank 0 and 5 on rank 2"),
    ("last_was_given_one_arm_more", 2, "train.arms.exit.steps is nothing on rank 0 and 2 on rank 1"),
])  # fmt: skip
def test_ranks_that_were_started_differently_are_refused(tmp_path: Path, work: str, world: int, expected: str) -> None:
    """They would wait for each other in the first loop of which one has fewer steps."""
    run = Run(tmp_path, work, world)
    assert run.codes(60) == [2] * world and only_lines(run.said()), run.said()
    assert all(expected in text and "give all of them the same command" in text for text in run.said())


@pytest.mark.parametrize(("work", "world", "to", "number"), [
    ("main_waits", 2, 0, signal.SIGTERM), ("main_waits", 2, 0, signal.SIGINT), ("main_waits", 2, 1, signal.SIGUSR1),
    ("others_wait", 2, 0, signal.SIGUSR1), ("others_wait", 2, 1, signal.SIGUSR1), ("all_work", 3, 1, signal.SIGTERM),
])  # fmt: skip
def test_a_signal_to_any_rank_stops_all(tmp_path: Path, work: str, world: int, to: int, number: int) -> None:
    """Also to one that waits in a collective, where Python runs no handler."""
    run = Run(tmp_path, work, world).ready()
    run.send(to, number)
    assert run.codes(SOON) == [75] * world, run.said()
    name = signal.Signals(number).name
    assert only_lines(run.said()) and all(f"stopped by {name}" in text and AGAIN in text for text in run.said())


@pytest.mark.parametrize(("work", "world", "killed"), [
    ("all_wait_but_the_last", 3, 0), ("nobody_talks", 3, 1),
    pytest.param("all_wait_but_the_last", 2, 1, marks=pytest.mark.slow),
    pytest.param("nobody_talks", 2, 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_killed_rank_is_named_and_all_end(tmp_path: Path, work: str, world: int, killed: int) -> None:
    """In a collective and in a loop that meets nobody; rank 0, in which the store lives, too (cases.md 81)."""
    run = Run(tmp_path, work, world).ready()
    run.send(killed, signal.SIGKILL)
    codes = run.codes(LIMIT + SOON)
    assert codes.pop(killed) == -9 and codes == [1] * (world - 1), run.said()
    said = run.said()
    assert said.pop(killed) == "" and only_lines(said)
    for text in said:
        assert f"rank {killed} on " in text and ("no sign of life for 4 s" in text or "has gone (" in text)
        assert text.endswith(f": stopping; {AGAIN}\n")


def test_no_alarm_while_one_works_alone_or_is_stopped_for_a_moment(tmp_path: Path) -> None:
    """Alone for longer than the limit; stopped, as in a debugger, for less; rank 0 takes the store along."""
    run = Run(tmp_path, "alone_for_long", world=3).ready()
    for rank in (0, 1):
        run.send(rank, signal.SIGSTOP)
        time.sleep(LIMIT / 2)
        run.send(rank, signal.SIGCONT)
    assert run.codes(60) == [0, 0, 0] and run.said() == ["", "", ""]


@pytest.mark.slow
def test_one_that_wakes_after_the_limit_ends_too(tmp_path: Path) -> None:
    run = Run(tmp_path, "nobody_talks", world=3).ready()
    run.send(1, signal.SIGSTOP)
    time.sleep(LIMIT + 2.5)
    run.send(1, signal.SIGCONT)
    assert run.codes(SOON) == [1, 1, 1] and only_lines(run.said())
    assert all("rank 1 on " in text for text in run.said()[::2])


@pytest.mark.slow
def test_without_the_watchdog_silence_is_no_alarm(tmp_path: Path) -> None:
    run = Run(tmp_path, "nobody_talks", EXITTRAIN_WATCHDOG_SECONDS="0").ready()
    run.send(1, signal.SIGKILL)
    assert run.codes(LIMIT + 3)[0] is None


@pytest.mark.parametrize(("work", "world"), [("last_fails_alone", 2), ("last_fails_beside_loops", 3)])
def test_what_fails_on_one_rank_ends_all_with_its_code(tmp_path: Path, work: str, world: int) -> None:
    run = Run(tmp_path, work, world)
    assert run.codes(GRACE + SOON) == [2] * world, run.said()
    *others, own = run.said()
    assert own == "exittrain: shard 3 cannot be read\n" and only_lines(others)
    assert all(f"rank {world - 1} on " in text and "could not go on: shard 3 cannot be read" in text for text in others)


def test_a_bug_keeps_its_traceback_where_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, "last_has_a_bug")
    assert run.codes(SOON) == [2, 1]
    other, own = run.said()
    assert other == "exittrain: rank 1 could not go on: KeyError: 'bug'\n"
    assert own.count("Traceback") == 1 and own.endswith("KeyError: 'bug'\n")


def test_a_failure_counts_more_than_an_interruption(tmp_path: Path) -> None:
    run = Run(tmp_path, "one_fails_one_is_interrupted", world=3)
    assert run.codes(SOON) == [2, 2, 2]
    seen = "exittrain: rank 1 could not go on: shard 3 cannot be read\n"
    assert run.said() == [seen, "exittrain: shard 3 cannot be read\n", seen]


def test_all_that_fail_alike_say_so_themselves_once(tmp_path: Path) -> None:
    """Rank 2 two seconds after rank 0."""
    run = Run(tmp_path, "all_fail_in_their_own_time", world=3)
    assert run.codes(GRACE + SOON) == [2, 2, 2]
    assert run.said() == [f"exittrain: no corpus here, says {rank}\n" for rank in range(3)]


def test_who_knows_that_all_end_may_take_its_time(tmp_path: Path) -> None:
    run = Run(tmp_path, "all_know_and_end_slowly")
    assert run.codes(GRACE + SOON) == [2, 1]
    assert run.said()[0] == "exittrain: rank 1 could not go on: ZeroDivisionError: division by zero\n"


def test_an_error_that_cannot_travel(tmp_path: Path) -> None:
    run = Run(tmp_path, "main_raises_what_cannot_travel")
    assert run.codes(SOON) == [1, 1]
    assert all(text.endswith("Local: of this process only\n") for text in run.said())


def test_a_signal_while_the_others_are_awaited(tmp_path: Path) -> None:
    """It waits in C for one that does not come: some time later it ends by itself."""
    run = Run(tmp_path, "answers", absent=1)
    time.sleep(2.0)
    run.send(0, signal.SIGTERM)
    assert run.codes(MEETING + SOON) == [75], run.said()
    assert run.said()[0].endswith("exittrain: stopped by SIGTERM: nothing is half done, run the same command again\n")


def test_a_signal_before_the_ranks_have_met_stops_all(tmp_path: Path) -> None:
    """Who leaves at once leaves the others waiting."""
    run = Run(tmp_path, "late_rank_1_was_stopped_early")
    assert run.codes(SOON) == [75, 75]
    assert "stopped by SIGTERM on rank 1: " in run.said()[0] or "another rank" in run.said()[0]
    assert run.said()[1] == f"exittrain: stopped by SIGTERM: {AGAIN}\n"


def test_a_second_interrupt_kills_one_that_is_stuck_in_c(tmp_path: Path) -> None:
    run = Run(tmp_path, "stuck_in_c", world=1).ready()
    for _ in range(2):
        run.send(0, signal.SIGINT)
        time.sleep(0.5)
    assert run.codes(SOON) == [130]
