"""Drafter and target must mean the same text by the same id: a size check alone is not enough.

A head may draft a part of the target's vocabulary only: D of its V ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.models.loading import Vocabulary


def check_vocabulary(drafter: CausalModel | Vocabulary, target: CausalModel | Vocabulary) -> None:
    """Raise InputError unless sizes agree and, where both have tokenizers, every token has one id in both."""
    if drafter.vocab_size != target.vocab_size:
        raise InputError(
            f"drafter {drafter.name} has {drafter.vocab_size} tokens, target {target.name} has {target.vocab_size}; "
            "a drafter needs the target's tokenizer"
        )
    if drafter.tokenizer is not None and target.tokenizer is not None:
        _check_tokenizers(drafter, target)


def shared_size(drafter: CausalModel | Vocabulary, target: CausalModel | Vocabulary) -> int | None:
    """How many ids the tokenizer of both gives, where one of the two has further columns (vocabularies are padded to
    different multiples, and padding means nothing: it is never drafted); None where there are none.

    Raises InputError where the tokenizers differ (naming ids), a model has no column for a token, or the sizes differ
    and there is no tokenizer to align them by.
    """
    if drafter.tokenizer is None or target.tokenizer is None:
        check_vocabulary(drafter, target)
        return None
    _check_tokenizers(drafter, target)
    size = real_size(target.tokenizer)
    for model in (drafter, target):
        if model.vocab_size < size:
            raise InputError(f"{model.name} has {model.vocab_size} columns for the {size} tokens of its tokenizer")
    return None if drafter.vocab_size == target.vocab_size == size else size


def _check_tokenizers(drafter: CausalModel | Vocabulary, target: CausalModel | Vocabulary) -> None:
    ours, theirs = _by_id(drafter.tokenizer), _by_id(target.tokenizer)
    if ours == theirs:
        return
    different = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    shown = ", ".join(f"{i} is {ours.get(i)!r} and {theirs.get(i)!r}" for i in different[:3])
    raise InputError(
        f"drafter {drafter.name} and target {target.name} differ in {len(different)} token ids ({shown}); "
        "a drafter needs the target's tokenizer"
    )


def real_size(tokenizer: Any) -> int:
    """One more than the largest id the tokenizer gives; logits may have further columns, which mean nothing."""
    return max(_by_id(tokenizer)) + 1


def choose_draft_ids(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` ids [D] int64, ascending, that occur most often (of equals the smaller id).

    counts [V]: how often each id occurred in trained text; always: ids to be among them whatever their count, such as
    those that end a response. Raises InputError for a size that is not in 1 to V or has no room for these.
    """
    vocab_size = len(counts)
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64)
    if not max(1, len(kept)) <= size <= vocab_size:
        raise InputError(f"a draft vocabulary of {size} tokens: it needs {max(1, len(kept))} to {vocab_size}")
    if len(kept) and not 0 <= int(kept[0]) <= int(kept[-1]) < vocab_size:
        raise InputError(f"ids to be drafted must lie in 0 to {vocab_size - 1}, got {int(kept[0])} to {int(kept[-1])}")
    ranked = counts.cpu().double().clone()
    ranked[kept] = torch.inf
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def covered_share(counts: Tensor, draft_ids: Tensor) -> float:
    """Share of the counted tokens that are among draft_ids. Raises InputError where nothing was counted."""
    total = int(counts.sum())
    if total == 0:
        raise InputError("no token was counted: a draft vocabulary is chosen from trained text")
    return int(counts[draft_ids.to(counts.device)].sum()) / total


def check_draft_ids(draft_ids: Tensor | None, size: int, vocab_size: int, name: str) -> None:
    """Raise InputError unless draft_ids are `size` ids [D] ascending within the target's vocab_size; None is for a
    drafter with a column for every token."""
    if draft_ids is None:
        if size != vocab_size:
            raise InputError(f"{name} can draft {size} of {vocab_size} tokens but does not say which (d2t)")
        return
    ids = draft_ids.cpu()
    fits = ids.shape == (size,) and bool((ids.diff() > 0).all()) and 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size
    if not fits:
        raise InputError(f"{name}: its draft vocabulary (d2t) must be {size} different ids from 0 to {vocab_size - 1}")


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {int(index): token for token, index in tokenizer.get_vocab().items()}
