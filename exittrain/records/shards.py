"""Parquet shards with a manifest: rows, bytes, sha256 of each. A damaged shard is named, never skipped in silence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.records.files import is_whole, read_json, record_of, write_bytes, write_json
from exittrain.records.schema import SCHEMA_VERSION, tree_features

MANIFEST = "manifest.json"


def shard_name(index: int, count: int) -> str:
    """`shard-00002-of-00004.parquet`."""
    return f"shard-{index:05d}-of-{count:05d}.parquet"


def shard_count(folder: str | Path) -> int:
    """How many shards the names of those in `folder` say there are; 0 where there is none."""
    names = (re.fullmatch(r"shard-\d{5,}-of-(\d{5,})\.parquet", file.name) for file in Path(folder).glob("shard-*"))
    return max((int(name[1]) for name in names if name), default=0)


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]], features: Any) -> None:
    """Write rows (dicts) as one Parquet file, atomically. The same rows always give the same bytes."""
    import pyarrow
    import pyarrow.parquet

    columns = {name: [row[name] for row in rows] for name in features}
    buffer = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pydict(columns, schema=features.arrow_schema), buffer)
    write_bytes(path, buffer.getvalue())


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a Parquet file as dicts of Python values.

    Raises:
        InputError: missing, or no whole Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist: run the stage that writes it first")
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{path} is damaged: delete it and run its stage again ({str(error).splitlines()[0]})"
        ) from None
    return rows


def write_shard(path: str | Path, rows: Sequence[Mapping[str, Any]], key: str = "") -> dict[str, Any]:
    """Write one shard and then its record beside it, `<shard>.json`; return the record {rows, key, bytes, sha256}.

    key: of all that decides what is in it.
    """
    path = Path(path)
    write_rows(path, rows, tree_features())
    record = {"rows": len(rows), "key": key, **record_of(path)}
    write_json(path.with_suffix(".json"), record, seal=True)
    return record


def shard_is_whole(path: str | Path, key: str = "") -> bool:
    """The shard and its record exist, agree, and were made under `key` (empty: any): it need not be made again."""
    path = Path(path)
    try:
        record = read_json(path.with_suffix(".json"))
        return key in ("", record["key"]) and is_whole(path, record)
    except (ValueError, KeyError, TypeError):  # InputError is a ValueError
        return False


def has_record(path: str | Path) -> bool:
    """The shard and its record are there and agree on the size. Cheap: what is in the shard is not looked at."""
    path = Path(path)
    try:
        return bool(path.stat().st_size == read_json(path.with_suffix(".json"))["bytes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def write_manifest(folder: str | Path, count: int, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """manifest.json over the `count` shards: {schema_version, shards: {name: record}, rows, **extra}."""
    folder = Path(folder)
    shards = {
        name: read_json((folder / name).with_suffix(".json")) for name in (shard_name(i, count) for i in range(count))
    }
    manifest = {
        **(extra or {}),
        "schema_version": SCHEMA_VERSION,
        "shards": shards,
        "rows": sum(shard["rows"] for shard in shards.values()),
    }
    write_json(folder / MANIFEST, manifest, seal=True)
    return manifest


def read_shards(folder: str | Path) -> list[dict[str, Any]]:
    """Rows of every shard the manifest names, in order, each checked against its sha256 first.

    Raises:
        InputError: no manifest, another schema version, or a shard that is missing or damaged (named).
    """
    folder = Path(folder)
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema_version") != SCHEMA_VERSION:
        version = manifest.get("schema_version")
        raise InputError(f"{folder} has schema version {version}, not {SCHEMA_VERSION}: run `exittrain collect` again")
    rows: list[dict[str, Any]] = []
    for name, record in sorted(manifest["shards"].items()):
        path = folder / name
        if not is_whole(path, record):
            raise InputError(f"{path} is missing or damaged: run `exittrain collect` again, only that shard is redone")
        rows.extend(read_rows(path))
    return rows
