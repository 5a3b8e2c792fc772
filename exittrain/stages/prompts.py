"""Prompt sets (data/prompts) and benchmarks (eval/benchmarks): one YAML each: a public source and a small fixture.

The full public file is used when it is there ($EXITTRAIN_DATA/<name>.jsonl) or asked for (`<name>:public` downloads
it); otherwise the fixture, and every prompt says which of the two it came from.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from exittrain.errors import InputError, nearest
from exittrain.records.files import sha256
from exittrain.records.share import ROOTS, share_names, share_path
from exittrain.stages.conversations.messages import Conversation
from exittrain.stages.conversations.rows import choose, read_file, read_folder, read_hub

FOLDERS = ("eval/benchmarks", "data/prompts")
FILE_ENDINGS = {".jsonl", ".json", ".parquet"}


class PromptSet(BaseModel):
    """One file of data/prompts or eval/benchmarks. `file` is ours and whole; `hub` is public and needs a download."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    version: int = 1
    description: str = ""
    licence: str
    homepage: str | None = None
    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    split: str = "train"
    template: str | None = None  # str.format over the row's fields gives the user turn; default: the usual row shapes
    file: str | None = None
    fixture: str | None = None
    fixture_licence: str | None = None
    sha256: str | None = None  # of `file`
    count: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    """User turns to answer one after the other. source: `<set>`, `<set> (fixture)` or a file's name."""

    id: str
    turns: tuple[str, ...]
    source: str
    system: str | None = None

    @property
    def messages(self) -> list[tuple[str, str]]:
        """(role, content) of the first prompt."""
        system = [] if self.system is None else [("system", self.system)]
        return [*system, ("user", self.turns[0])]


def load_prompts(name_or_path: str, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts of a benchmark, a prompt set, `<name>:public`, or a file; `count` of them drawn by `seed`, in file order.

    Raises:
        InputError: no such set or file, a file that is not the one the set names, or no usable row in it.
    """
    conversations, refused = load_set(name_or_path, count, seed)
    if not conversations:
        reasons = ", ".join(f"{number} {reason}" for reason, number in refused.items()) or "it is empty"
        raise InputError(f"no usable prompt in {name_or_path!r}: {reasons}")
    return [
        Prompt(c.id, tuple(c.user_turns), c.source, c.messages[0][1] if c.messages[0][0] == "system" else None)
        for c in conversations
    ]


def load_set(
    name_or_path: str, count: int | None = None, seed: int = 0, split: str = "train"
) -> tuple[list[Conversation], Counter[str]]:
    """Conversations of a prompt set, a file, a folder or a hub data set (`owner/name`, `owner/name:config@revision`),
    and the refused rows by reason. Paths are looked up here and then among exittrain's own files.

    Raises:
        InputError: nothing of that name, or it cannot be read.
    """
    name, _, public = name_or_path.partition(":")
    known = known_sets()
    if name in known and public in ("", "public"):
        prompts = read_set(known[name])
        rows, source = _rows_of(prompts, public == "public")
        return choose(rows, source, prompts.template, count or prompts.count, seed or prompts.seed)
    check_set(name_or_path)
    path = Path(name_or_path)
    if not path.exists() and any((root / path).exists() for root in ROOTS):
        path = share_path(name_or_path)
    if path.is_dir():
        return choose(read_folder(path, split), path.name, None, count, seed)
    if path.is_file():
        return choose(list(read_file(path)), path.name, None, count, seed)
    hub, _, revision = name_or_path.partition("@")
    hub, _, config = hub.partition(":")
    return choose(read_hub(hub, config or None, revision or None, split), name_or_path, None, count, seed)


def check_set(name_or_path: str) -> None:
    """Raises:
    InputError: `load_set` would find nothing of that name here. What may be a hub data set passes.
    """
    name, _, public = name_or_path.partition(":")
    known = known_sets()
    path = Path(name_or_path)
    if (name in known and public in ("", "public")) or any((root / path).exists() for root in (Path(), *ROOTS)):
        return
    if path.suffix in FILE_ENDINGS or path.is_absolute() or "/" not in name_or_path:
        raise InputError(f"{name_or_path!r} is neither a prompt set nor a file{nearest(name, sorted(known))}")


def known_sets() -> dict[str, Path]:
    """Name to YAML of every set that comes with exittrain."""
    return {
        entry.removesuffix(".yaml"): share_path(f"{folder}/{entry}")
        for folder in FOLDERS
        for entry in share_names(folder)
        if entry.endswith(".yaml")
    }


def expand_tasks(tasks: list[str]) -> list[str]:
    """Tasks with the names of eval/suites replaced by the suite's own tasks; order kept, twins dropped.

    Raises:
        InputError: a suite that is a study of its own.
    """
    suites = {entry.removesuffix(".yaml") for entry in share_names("eval/suites")}
    found: list[str] = []
    for task in tasks:
        suite = _yaml(share_path(f"eval/suites/{task}.yaml")) if task in suites else {"tasks": [task]}
        if "study" in suite:
            raise InputError(f"{task!r} is a study, not a list of tasks: exittrain eval RUN --suite {task}")
        found += suite["tasks"]
    return list(dict.fromkeys(found))


def read_set(path: Path) -> PromptSet:
    """Parse and check one YAML. Raises InputError with the file and its first fault."""
    try:
        return PromptSet.model_validate(_yaml(path))
    except ValidationError as error:
        fault = error.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None


def _rows_of(prompts: PromptSet, public: bool) -> tuple[Any, str]:
    folder = os.environ.get("EXITTRAIN_DATA")
    if folder and (Path(folder) / f"{prompts.name}.jsonl").is_file():
        return list(read_file(Path(folder) / f"{prompts.name}.jsonl")), prompts.name
    if prompts.file is not None:
        path = share_path(prompts.file)
        if prompts.sha256 and sha256(path) != prompts.sha256:
            raise InputError(f"{path} is not the file that {prompts.name!r} names: its sha256 differs")
        return list(read_file(path)), prompts.name
    if public and prompts.hub:
        return read_hub(prompts.hub, prompts.config, prompts.revision, prompts.split), prompts.name
    if prompts.fixture is None:
        raise InputError(f"{prompts.name!r} carries no prompts: use '{prompts.name}:public' or set EXITTRAIN_DATA")
    return list(read_file(share_path(prompts.fixture))), f"{prompts.name} (fixture)"
