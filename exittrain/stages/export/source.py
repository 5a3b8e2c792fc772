"""What is exported: a drafter's folder, whose tokenizer it must share, and real tokens to compare logits on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exittrain.drafters.base import DRAFTER_FILE
from exittrain.errors import InputError, nearest
from exittrain.models.loading import Vocabulary, load_vocabulary
from exittrain.stages.context import StageContext
from exittrain.stages.conversations.store import read_sequences
from exittrain.stages.prompts import load_prompts

WARM_START = "warmup"  # what --arm calls the drafter every arm starts from
WINDOW, WINDOWS = 256, 4  # tokens of a compared sequence, and how many
PROMPTS = 64  # of `everyday`, where there is no run to take tokens from


@dataclass(frozen=True)
class ExportSource:
    """folder: the drafter as trained; name: for output folders; target: what it drafts for, and target_source what the
    user calls that; token_ids [T] int64: real text or answers; run, arm: None for a folder without a run;
    target_dtype: the dtype, by name, in which the target gives features to compare heads on."""

    folder: Path
    name: str
    target: Vocabulary
    target_source: str
    token_ids: Tensor
    run: Path | None = None
    arm: str | None = None
    target_dtype: str = "float32"

    def windows(self, longest: int) -> list[Tensor]:
        """Up to WINDOWS sequences of at most WINDOW (and `longest`) tokens."""
        parts = torch.split(self.token_ids, min(WINDOW, longest))
        return [part for part in parts[:WINDOWS] if len(part)]


def of_run(context: StageContext, arm: str | None) -> ExportSource:
    """The last drafter of an arm of a finished run (`warmup`: the warm start).

    Raises:
        InputError: no such arm, none named where there are several, or its stage is not done or damaged.
    """
    arm = _chosen(context, arm)
    stage, place = (WARM_START, "drafter") if arm == WARM_START else (f"train/{arm}", "last")
    context.run.done(stage)
    for used in (stage, "target", "data"):
        finished = context.run.stored_key(used) is not None
        if (damage := context.run.damage(used) if finished else context.run.mark_damage(used)) is not None:
            raise InputError(f"{damage}: run `exittrain run {context.run.path}` again")
    section = context.recipe.target
    scratch = str(context.run.path / "target" / "model")
    target = scratch if section.model is None else section.model
    rows = read_sequences(context.run.path / "data" / "heldout.parquet")
    rows = rows or read_sequences(context.run.path / "data" / "train.parquet")
    ids = torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.int64)
    folder = context.run.path / stage / place
    return ExportSource(folder, arm, load_vocabulary(target), target, ids, context.run.path, arm, section.dtype)


def of_folder(folder: str | Path, target: str) -> ExportSource:
    """A drafter's folder, for a target: the tokens are the prompts that come with exittrain.

    Raises:
        InputError: the target cannot be found, or has no tokenizer.
    """
    path, vocabulary = Path(folder), load_vocabulary(target)
    if vocabulary.tokenizer is None:
        raise InputError(f"{target} has no tokenizer: an export is compared with it on real text")
    text = "\n".join(turn for prompt in load_prompts("everyday", PROMPTS) for turn in prompt.turns)
    ids = torch.tensor(vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    parts = path.resolve().parts
    name = "-".join(parts[-2:]) if parts[-1] in ("last", "best", "drafter") else parts[-1]
    return ExportSource(path, name, vocabulary, target, ids)


def drafter_note(folder: Path) -> dict[str, Any]:
    """exittrain.json of a drafter's folder; empty for a plain model or a head from elsewhere.

    Raises:
        InputError: it cannot be read.
    """
    try:
        note = json.loads((folder / DRAFTER_FILE).read_text(encoding="utf-8"))
        return {**note, "kind": str(note["kind"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{folder / DRAFTER_FILE} cannot be read: save the drafter again") from None


def _chosen(context: StageContext, arm: str | None) -> str:
    train = context.recipe.train
    known = [*(train.arms if train else ()), WARM_START]
    if arm is not None:
        if arm not in known:
            raise InputError(f"no arm {arm!r}{nearest(arm, known)} (known: {', '.join(known)})")
        return arm
    trained = [name for name, section in train.arms.items() if section.objective != "token"] if train else [WARM_START]
    if len(trained) != 1:
        raise InputError(f"{context.run.path} has several drafters: name one with --arm ({', '.join(known)})")
    return trained[0]
