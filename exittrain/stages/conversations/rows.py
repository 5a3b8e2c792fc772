"""Raw rows from files and Hugging Face datasets. A line that cannot be read becomes a `BadRow` to be counted."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.law.seeding import seed_for
from exittrain.stages.conversations.messages import Conversation, Refused, parse_row


@dataclass(frozen=True)
class BadRow:
    """A row that could not even be parsed."""

    reason: str


def choose(
    rows: Sequence[Any], source: str, template: str | None, count: int | None, seed: int
) -> tuple[list[Conversation], Counter[str]]:
    """Conversations of the first `count` usable rows in a seeded order, put back in file order; refused rows by reason.

    Bad rows do not thin the sample: the next in order takes their place. Without `count`, all rows.
    """
    order = list(range(len(rows)))
    if count is not None and count < len(rows):
        random.Random(seed_for(seed, "rows", source)).shuffle(order)
    found: dict[int, Conversation] = {}
    refused: Counter[str] = Counter()
    for index in order:
        if len(found) == count:
            break
        try:
            found[index] = parse_row(_templated(rows[index], template), str(index), source)
        except Refused as reason:
            refused[str(reason)] += 1
    return [found[index] for index in sorted(found)], refused


def _templated(row: Any, template: str | None) -> Any:
    """The row with its prompt made by `template`; rows that already have turns or messages stay as they are."""
    if isinstance(row, BadRow):
        raise Refused(row.reason)
    if template is None or not isinstance(row, dict) or "turns" in row or "messages" in row:
        return row
    try:
        return {"prompt": template.format(**row), **({"id": row["id"]} if "id" in row else {})}
    except KeyError as error:
        raise Refused(f"no field {error} for the template") from None


def read_file(path: Path) -> Iterator[Any]:
    """Rows of a .jsonl, .json (a list, or one object a line) or .parquet file.

    Raises:
        InputError: missing, a folder, or no whole Parquet file.
    """
    if path.suffix == ".parquet":
        from exittrain.records.shards import read_rows

        yield from read_rows(path)
        return
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        try:
            yield from json.loads(data.decode("utf-8-sig"))
            return
        except ValueError:
            pass  # JSON lines whose first line is a list: each is counted below
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.strip():
            try:
                yield json.loads(line.decode("utf-8"))
            except ValueError:
                yield BadRow("line is no JSON")


def read_folder(path: Path, split: str) -> Any:
    """A dataset saved by `datasets`, or a folder of Parquet or JSON files.

    Raises:
        InputError: neither, or no such split.
    """
    import datasets

    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            data = datasets.load_from_disk(str(path))
            return data[split] if isinstance(data, datasets.DatasetDict) else data
        for kind, endings in {"parquet": ["parquet"], "json": ["jsonl", "json"]}.items():
            files = sorted(str(file) for ending in endings for file in path.rglob(f"*.{ending}"))
            chosen = [file for file in files if split in Path(file).name] or files
            if kind == "json" and files:
                return [row for file in chosen for row in read_file(Path(file))]
            if files:
                return datasets.Dataset.from_parquet(chosen)
    except (KeyError, ValueError, OSError) as error:
        raise InputError(f"cannot read split {split!r} of {path}: {str(error).splitlines()[0]}") from None
    raise InputError(f"{path} holds no saved dataset, Parquet or JSON files")


def read_hub(name: str, config: str | None, revision: str | None, split: str) -> Any:
    """A split of a dataset on the Hugging Face hub.

    Raises:
        InputError: it cannot be had (no such id, no network), with where to put a local copy.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # the hub, requests, and datasets each raise their own
        reason = str(error).strip().splitlines()[0][:160]
        raise InputError(
            f"cannot get dataset {name!r} ({reason}): name a local file or folder, or put a JSONL in $EXITTRAIN_DATA"
        ) from None
