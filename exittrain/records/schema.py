"""What is on disk: versions and columns. A stored file whose version differs is refused or redone, never guessed."""

from __future__ import annotations

from typing import Any

SCHEMA_VERSION = 1  # of DONE.json, manifests and metrics; part of every stage's key
CODE_VERSION = 1  # raise when a stage's numbers change for the same recipe: every stored stage is then redone


def sequence_features() -> Any:
    """`datasets.Features` of data/{train,heldout}.parquet: token_ids and loss_mask have one entry a token."""
    from datasets import Features, List, Value

    return Features(
        {
            "sequence_id": Value("string"),
            "token_ids": List(Value("int32")),
            "loss_mask": List(Value("int8")),
            "prompt_len": Value("int32"),
            "source": Value("string"),
        }
    )


def tree_features() -> Any:
    """`datasets.Features` of collect/shard-*.parquet: one row an anchor with N drafted nodes (math.md section 2).

    Lists of N+1: token_ids, parents, depths, reach, miss, exit (node order, root first) and the optional target top-k
    (top_ids, top_logprobs [N+1][k], tail_mass [N+1]; empty lists when not kept). Lists of N: draft_logprob,
    target_logprob (node i+1's token given its parent, nats).
    """
    from datasets import Features, List, Value

    ints, floats, doubles = List(Value("int32")), List(Value("float32")), List(Value("float64"))
    return Features(
        {
            "sequence_id": Value("string"),
            "anchor": Value("int32"),
            "token_ids": ints,
            "parents": ints,
            "depths": ints,
            "draft_logprob": floats,
            "target_logprob": doubles,
            "reach": doubles,
            "miss": doubles,
            "exit": doubles,
            "top_ids": List(ints),
            "top_logprobs": List(floats),
            "tail_mass": floats,
            "coverage": Value("float64"),
            "temperature": Value("float64"),
            "drafter_hash": Value("string"),
            "target_hash": Value("string"),
        }
    )


TREE_FEATURES = tree_features  # call it: `datasets` is imported only when rows are written or read
