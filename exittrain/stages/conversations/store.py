"""data/train.parquet, heldout.parquet, conversations.jsonl and manifest.json: what later stages read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exittrain.records.files import write_text
from exittrain.records.schema import sequence_features
from exittrain.records.shards import read_rows, write_rows
from exittrain.stages.conversations.messages import Conversation


@dataclass(frozen=True)
class TokenSequence:
    """What is trained on: token_ids[T], loss_mask[T] (1: token t is trained, predicted from t-1); T = len of both.

    prompt_len: tokens before the first trained one. prompt_key: sequences of equal keys answer the same prompt.
    """

    sequence_id: str
    token_ids: list[int]
    loss_mask: list[int]
    prompt_len: int
    source: str
    prompt_key: str = ""
    conversation: Conversation | None = None


def write_sequences(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """One Parquet row a sequence, atomically; columns of `records.schema.sequence_features`."""
    features = sequence_features()
    write_rows(path, [{name: getattr(one, name) for name in features} for one in sequences], features)


def read_sequences(path: str | Path) -> list[TokenSequence]:
    """Sequences of a Parquet file written by `write_sequences`. Raises InputError when missing or damaged."""
    return [TokenSequence(**row) for row in read_rows(path)]


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """A JSONL view in the order given: id, messages, source, and truncated where the last answer was cut."""
    lines = [
        json.dumps(
            {
                "id": one.id,
                "messages": one.as_dicts,
                "source": one.source,
                **({"truncated": True} if one.truncated else {}),
            },
            ensure_ascii=False,
        )
        for one in conversations
    ]
    write_text(path, "".join(line + "\n" for line in lines))
