"""Jobs that share a stage: who is refused, whose turn it is, and that a lock goes with its process (cases.md 92)."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exittrain.errors import InputError, Interrupted
from exittrain.runtime.crew import Crew
from exittrain.runtime.lock import hold, is_held
from exittrain.runtime.parts import Part

MEMBER = (
    "import sys, time; from pathlib import Path; from exittrain.runtime.crew import Crew\n"
    "from exittrain.runtime.parts import Part\n"
    "with Crew(Path(sys.argv[1]), 'collect', Part(0, 2), lambda: None) as crew:\n"
    "    with crew.joining('key'): print('turn', flush=True); sys.stdin.readline()\n"
    "    print('member', flush=True); time.sleep(60)"
)


@contextmanager
def member(folder: Path, index: int, count: int = 2, key: str = "key", stage: str = "collect") -> Iterator[Crew]:
    with Crew(folder, stage, Part(index, count), lambda: None) as crew:
        with crew.joining(key):
            pass
        yield crew


def test_parts_share_the_folder_and_the_last_to_leave_knows(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    first, second = (Crew(tmp_path, "collect", Part(i, 2), lambda: None) for i in range(2))
    with first, second:
        with first.joining("key") as alone:
            assert alone
        with second.joining("key") as alone:
            assert not alone and is_held(tmp_path)
        with first.leaving() as alone:
            assert not alone
        with second.leaving() as alone:
            assert alone
        assert not is_held(tmp_path)
    with hold(tmp_path):
        pass


def test_an_owner_and_a_crew_refuse_each_other_by_name(tmp_path: Path) -> None:
    with member(tmp_path, 0), member(tmp_path, 3, 8, stage="eval"):
        with pytest.raises(InputError, match=rf"in use by collect 0/2 \(process {os.getpid()} on .*\), eval 3/8 \("):
            hold(tmp_path).__enter__()
        with member(tmp_path, 1):
            pass
    with hold(tmp_path), pytest.raises(InputError, match=f"in use by process {os.getpid()}: wait"):
        member(tmp_path, 0).__enter__()


def test_each_part_is_for_one_job(tmp_path: Path) -> None:
    with member(tmp_path, 0), pytest.raises(InputError, match=r"by collect 0/2 .*: each part is for one job"):
        member(tmp_path, 0).__enter__()
    with member(tmp_path, 0):  # the refused one has let go of everything
        pass


@pytest.mark.parametrize(("other", "expected"), [((1, 4), "in parts of 2"), ((1, 2, "new"), "under another recipe")])
def test_a_crew_agrees_on_recipe_and_number_of_parts(tmp_path: Path, other: tuple, expected: str) -> None:
    with member(tmp_path, 0):
        with pytest.raises(InputError, match=f"other jobs do collect {expected}"):
            member(tmp_path, *other).__enter__()
        with member(tmp_path, *other, *("key",) * (3 - len(other)), stage="eval"):
            pass  # another stage is another crew
    with member(tmp_path, *other):
        pass


def test_one_at_a_time_and_who_waits_may_give_up(tmp_path: Path) -> None:
    looks: list[float] = []

    def give_up() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise Interrupted("a signal")

    with member(tmp_path, 0) as crew, crew.leaving():
        with Crew(tmp_path, "collect", Part(1, 2), give_up) as waiting, pytest.raises(Interrupted):
            waiting.joining("key").__enter__()
        assert len(looks) == 3
    inside, most = [0], [0]

    def enter(index: int) -> None:
        with Crew(tmp_path, "collect", Part(index, 4), lambda: None) as one, one.joining("key"):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    threads = [threading.Thread(target=enter, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


@pytest.mark.parametrize("moment", ["turn", "member"])
def test_a_killed_job_leaves_no_lock(tmp_path: Path, moment: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "turn\n"
    if moment == "member":
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "member\n"
        with pytest.raises(InputError, match=f"process {process.pid} on"):
            member(tmp_path, 0).__enter__()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    with member(tmp_path, 0), member(tmp_path, 1):
        pass
    with hold(tmp_path):
        pass


def test_looking_at_a_lock_refuses_nobody(tmp_path: Path) -> None:
    """`exittrain status` has the lock for a moment."""
    for use in (lambda: hold(tmp_path), lambda: member(tmp_path, 0)):
        descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        letting_go = threading.Timer(0.1, os.close, (descriptor,))
        letting_go.start()
        with use():
            pass
        letting_go.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lustre, when it is not mounted with -o flock."""

    def flock(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match=r"has no file locks \(.*\): mount it with them"), hold(tmp_path):
        pass
    assert not is_held(tmp_path)
