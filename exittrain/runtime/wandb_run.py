"""The wandb run of a run folder, kept in a thread of its own: what wandb does, or fails to do, holds up nobody.

One folder has one wandb run: every process that works there goes on with it under the id in tracking.json. Offline,
each process leaves a segment in wandb/ that carries the id; `wandb sync` makes one history of them (wandb 0.31 and
later, because they are marked as resumable).
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import string
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Any, Literal

from exittrain.errors import InputError, first_line
from exittrain.records.files import read_json, write_json

Mode = Literal["online", "offline", "disabled"]
Action = Callable[[Any], object]  # what is done with wandb's own run object
IDENTITY = "tracking.json"
SEGMENT = "offline-run-"
AXIS = "global_step"  # wandb's inner counter refuses to go back after a resume; ours may
INIT_SECONDS, FINISH_SECONDS, SLACK_SECONDS = 30.0, 60.0, 15.0
LEAVING_SECONDS = 20.0  # to end in when something failed or a signal came: others wait for this process
MAX_WAITING = 20_000  # rows that wait for a wandb that does not answer


@dataclass(frozen=True)
class Identity:
    """Where a folder's numbers go in wandb. entity None: the account's own."""

    id: str
    project: str
    entity: str | None
    name: str
    group: str


def identity_of(folder: Path, project: str, entity: str | None, group: str) -> Identity:
    """What tracking.json says; made once, and from then on every process reads it.

    Raises:
        InputError: tracking.json is damaged.
    """
    if not (folder / IDENTITY).exists():
        keep_identity(folder, Identity(new_id(), project, entity, folder.resolve().name, group))
    return read_identity(folder)


def read_identity(folder: Path) -> Identity:
    """Raises:
    InputError: tracking.json is missing or damaged.
    """
    path = folder / IDENTITY
    data = read_json(path)
    try:
        return Identity(*(data[name] for name in ("id", "project", "entity", "name", "group")))
    except (KeyError, TypeError):
        raise InputError(f"{path} is damaged: delete it, and what follows is a new wandb run") from None


def keep_identity(folder: Path, identity: Identity) -> None:
    """Write tracking.json."""
    write_json(folder / IDENTITY, {"schema_version": 1, **asdict(identity)}, seal=True)


def new_id() -> str:
    """Eight letters and digits, as wandb makes them."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def segments(folder: Path, run_id: str) -> list[Path]:
    """Folders of the offline segments of `run_id`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"wandb/{SEGMENT}*-{run_id}/run-{run_id}.wandb"))


def is_sent(segment: Path) -> bool:
    """`wandb sync` has uploaded the whole segment."""
    return bool(list(segment.glob("*.wandb.synced")))


class WandbRun:
    """`send` hands an action to wandb's thread and returns at once; `close` waits, but not for ever.

    The first thing that fails ends wandb for this process, with one line on standard error.
    """

    def __init__(self, folder: Path, identity: Identity, mode: Mode, config: Mapping[str, Any]) -> None:
        self._folder, self._identity, self._config = folder, identity, dict(config)
        self._queue: Queue[Action | None] = Queue(MAX_WAITING)
        self._off, self._over, self._exit_code = threading.Event(), threading.Event(), 0
        self._closed, self._mode = False, mode
        self.error: str | None = None
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """A row at `step` of the axis; what has no value is left out."""
        known = {key: value for key, value in row.items() if value is not None}
        self.send(lambda run: run.log({**known, AXIS: step}))

    def send(self, action: Action) -> None:
        """Do `action(run)` when wandb gets to it; nothing once wandb is off or closed."""
        if self._off.is_set() or self._closed:
            return
        try:
            self._queue.put_nowait(action)
        except Full:
            self._give_up("it does not answer")

    def close(self) -> None:
        """Send what waits and end the run, as failed while an exception is on its way. Safe to call twice."""
        if self._closed:
            return
        error = sys.exc_info()[1]
        self._exit_code = 0 if error is None else int(getattr(error, "exit_code", 1))
        self._closed = True
        atexit.unregister(self.close)
        if self._off.is_set():
            self._over.wait(SLACK_SECONDS)
            return
        with contextlib.suppress(Full):
            self._queue.put_nowait(None)
        uploading = FINISH_SECONDS if self._mode == "online" else 0.0
        self._thread.join(LEAVING_SECONDS if error else INIT_SECONDS + uploading + SLACK_SECONDS)
        if self._thread.is_alive() and not self._off.is_set():
            self._give_up("it does not end")

    def _work(self) -> None:
        try:
            run = self._start()
            atexit.register(self.close)  # after wandb's own hook, so that it comes before it
            while (action := self._queue.get()) is not None and not self._off.is_set():
                action(run)
            if self._off.is_set():
                return
            run.finish(exit_code=self._exit_code)
        except BaseException as error:  # whatever wandb does, training goes on and metrics.jsonl has the numbers
            if not self._off.is_set():
                self._give_up(first_line(error))

    def _start(self) -> Any:
        import wandb

        if self._mode == "online":
            try:
                return self._init(wandb, "online")
            except Exception as error:
                _end_service()
                _print(
                    f"wandb is offline from here on ({first_line(error)}): "
                    f"`exittrain sync {self._folder}` sends it later"
                )
        return self._init(wandb, "offline")

    def _init(self, wandb: Any, mode: Mode) -> Any:
        own = self._identity
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True, silent=True,
            console="off", save_code=False, disable_git=True, disable_job_creation=True, x_disable_stats=True,
        )  # fmt: skip
        while list(self._folder.glob(f"wandb/*{time.strftime('%Y%m%d_%H%M%S')}-{own.id}")):
            time.sleep(0.1)  # a segment's folder is named by the second it began
        run = wandb.init(
            dir=str(self._folder), id=own.id, resume="allow", mode=mode, project=own.project, entity=own.entity,
            name=own.name, group=own.group, settings=settings,
        )  # fmt: skip
        run.config.update(self._config, allow_val_change=True)
        run.define_metric(AXIS)
        run.define_metric("*", step_metric=AXIS)
        return run

    def _give_up(self, why: str) -> None:
        self._off.set()
        self.error = why
        _print(f"wandb is off from here on ({why}); {self._folder}/**/metrics.jsonl has everything")
        _end_service()
        self._over.set()


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_service() -> None:
    """End wandb's helper process at once: it would hold up the exit for as long as it has something to send."""

    def end() -> None:
        with contextlib.suppress(BaseException):  # asyncio's too
            wandb: Any = sys.modules["wandb"]
            singleton = wandb.sdk.wandb_setup._singleton
            if singleton is not None and singleton._connection is not None:
                process = singleton._connection._proc._process
                process.kill()
                process.wait()
            wandb.teardown()

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(SLACK_SECONDS)
