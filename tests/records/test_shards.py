"""Shards: the same rows are the same bytes; a damaged one is named and only it is redone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exittrain.errors import InputError
from exittrain.records import shards
from exittrain.records.files import read_json, write_json


def row(index: int) -> dict[str, Any]:
    return {
        "sequence_id": f"s{index}", "anchor": 3, "token_ids": [5, 6], "parents": [-1, 0], "depths": [0, 1],
        "draft_logprob": [-0.5], "target_logprob": [-0.25], "reach": [1.0, 0.7], "miss": [0.3, 1.0], "exit": [0.3, 0.7],
        "top_ids": [[6], [7]], "top_logprobs": [[-0.25], [-1.0]], "tail_mass": [0.1, 0.2], "coverage": 0.7,
        "temperature": 1.0, "drafter_hash": "d", "target_hash": "t",
    }  # fmt: skip


def written(folder: Path) -> Path:
    for index in range(2):
        shards.write_shard(folder / shards.shard_name(index, 2), [row(index), row(index + 10)])
    shards.write_manifest(folder, 2, {"staleness": 0})
    return folder


def test_round_trip_and_bytes(tmp_path: Path) -> None:
    rows = shards.read_shards(written(tmp_path / "a"))
    assert [r["sequence_id"] for r in rows] == ["s0", "s10", "s1", "s11"]
    assert rows[0]["exit"] == [0.3, 0.7] and rows[0]["top_ids"] == [[6], [7]]
    assert read_json(tmp_path / "a" / "manifest.json")["rows"] == 4
    written(tmp_path / "b")
    name = shards.shard_name(0, 2)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    bad = folder / shards.shard_name(1, 2)
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    assert shards.shard_is_whole(folder / shards.shard_name(0, 2)) and not shards.shard_is_whole(bad)
    with pytest.raises(InputError, match=r"shard-00001-of-00002\.parquet is missing or damaged"):
        shards.read_shards(folder)
    bad.unlink()
    assert not shards.shard_is_whole(bad)


def test_other_schema_and_truncated_parquet(tmp_path: Path) -> None:
    folder = written(tmp_path)
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", {**manifest, "schema_version": 99})
    with pytest.raises(InputError, match="schema version 99"):
        shards.read_shards(folder)
    (folder / "cut.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"cut\.parquet is damaged"):
        shards.read_rows(folder / "cut.parquet")


def test_datasets_opens_a_shard(tmp_path: Path) -> None:
    from datasets import Dataset

    folder = written(tmp_path)
    assert Dataset.from_parquet(str(folder / shards.shard_name(0, 2)), cache_dir=str(tmp_path / "c"))[0]["anchor"] == 3
