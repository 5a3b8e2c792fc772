"""Drafter and target must mean the same text by the same id: a size check alone is not enough."""

from __future__ import annotations

from typing import Any

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
    if drafter.tokenizer is None or target.tokenizer is None:
        return
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


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {int(index): token for token, index in tokenizer.get_vocab().items()}
