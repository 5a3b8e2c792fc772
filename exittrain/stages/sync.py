"""A run's numbers to wandb when they could not go there at once: the offline segments, or all of metrics.jsonl anew."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.records.files import read_json
from exittrain.runtime.lock import hold, is_held
from exittrain.runtime.provenance import shown
from exittrain.runtime.tracker import METRICS, read_metrics
from exittrain.runtime.wandb_run import (
    AXIS,
    IDENTITY,
    SEGMENT,
    Identity,
    WandbRun,
    is_sent,
    keep_identity,
    new_id,
    read_identity,
    segments,
)
from exittrain.stages.context import STAGES
from exittrain.stages.tracked import find_results, send_results

ANSWER_SECONDS = 10.0  # for wandb's server to say anything at all


@dataclass(frozen=True)
class Pending:
    """A run's offline segments. left: not uploaded yet, oldest first; live: the one a running process writes."""

    identity: Identity
    sent: list[Path]
    left: list[Path]
    live: Path | None

    @property
    def command(self) -> list[str]:
        """What uploads them, by hand too: wandb sends segments of one run one after the other."""
        return ["wandb", "sync", *map(str, self.left)]


def pending(folder: Path) -> Pending:
    """What there is to upload.

    Raises:
        InputError: no run folder with a wandb run.
    """
    if not folder.is_dir():
        raise InputError(f"there is no run folder {folder}")
    if not (folder / IDENTITY).is_file():
        raise InputError(
            f"{folder} has no wandb run: it is made when a stage trains and tracking.wandb is not disabled"
        )
    identity = read_identity(folder)
    found = segments(folder, identity.id)
    live = found[-1] if found and is_held(folder) and not is_sent(found[-1]) else None
    left = [segment for segment in found if segment != live and not is_sent(segment)]
    return Pending(identity, [segment for segment in found if is_sent(segment)], left, live)


def upload(folder: Path, work: Pending, echo: Callable[[str], None]) -> None:
    """Run `work.command`, its lines echoed. What is uploaded is marked by wandb and not sent again.

    Raises:
        InputError: wandb's server or an API key is missing, or a segment was not taken; all of them are still there.
    """
    check_server()
    echo(f"{shlex.join(work.command[:2])} {folder}/wandb/{SEGMENT}*-{work.identity.id}")
    arguments = [sys.executable, "-m", "wandb", "sync", *(str(segment.resolve()) for segment in work.left)]
    said = []
    with subprocess.Popen(
        arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None  # a pipe was asked for
        for line in process.stdout:
            said.append(line.strip())
            echo(line.rstrip())
    left = [segment for segment in work.left if not is_sent(segment)]
    if left:
        errors = [line for line in said if "rror" in line] or said[-1:]
        why = errors[-1].removeprefix("Error: ") if errors else f"wandb ended with {process.returncode}"
        raise InputError(f"{len(left)} of {len(work.left)} segments are not in wandb ({why}): run the same again")


def rebuild(folder: Path, config: dict[str, Any]) -> None:
    """One new segment, under a new id, of every metrics.jsonl and of the evaluation. config: what the run is shown by.

    Later stages go on under the new id; what was uploaded under the old one stays in wandb.

    Raises:
        InputError: the run is in use, has no metrics, or wandb cannot write.
    """
    with hold(folder):
        rows = list(all_rows(folder))
        if not rows:
            raise InputError(f"{folder} has no {METRICS} of any stage: there is nothing to send")
        identity = replace(read_identity(folder), id=new_id())
        run = WandbRun(folder, identity, "offline", config)

        def replay(wandb: Any) -> None:
            for row in rows:
                wandb.log(row)

        run.send(replay)
        if (folder / "eval" / "metrics.json").is_file():
            found = find_results(folder)
            run.send(lambda wandb: send_results(wandb, found))
        run.close()
        if run.error is not None:
            raise InputError(f"wandb could not write {folder}/wandb ({run.error}): the run keeps its old id")
        keep_identity(folder, identity)


def all_rows(folder: Path) -> list[dict[str, Any]]:
    """Every line of every metrics.jsonl as wandb has it: stages in order, names with the stage's before them."""
    rows = []
    for stage in STAGES:
        for path in sorted((folder / stage).glob(f"**/{METRICS}"), key=lambda path: path.parent.as_posix()):
            name = path.parent.relative_to(folder).as_posix()
            for line in read_metrics(path):
                step = line.pop("step")
                rows.append({f"{name}/{k}": v for k, v in line.items() if v is not None} | {AXIS: step})
    return rows


def config_of(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """A finished run's config: its recipe and its own provenance."""
    path = folder / "provenance.json"
    return {"recipe": recipe, **(shown(read_json(path)) if path.is_file() else {})}


def check_server() -> None:
    """Any answer will do; whether the key is good is seen later."""
    import wandb

    url = os.environ.get("WANDB_BASE_URL") or str(wandb.setup().settings.base_url)
    try:
        urllib.request.urlopen(url, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        raise InputError(
            f"wandb's server {url} does not answer ({error}): run this again where it does; nothing is lost"
        ) from None
