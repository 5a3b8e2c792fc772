"""When a row ends: end tokens, stop strings, limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens looked at beyond the stop string's own bytes: special tokens are invisible.
_SLACK = 8


class StopStrings:
    """Finds the token that completes a stop string, by decoding the last few tokens only.

    A token adds at least one byte of text, except special tokens, so a window of as many tokens as the longest stop
    string has UTF-8 bytes, plus some slack, holds any string that has just been completed.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.window = max((len(text.encode()) for text in strings), default=0) + _SLACK

    def completed_by(self, token_ids: list[int]) -> bool:
        """Whether the last of these new tokens completes a stop string."""
        if not self.strings:
            return False
        tail = self.text(token_ids[-self.window :])
        return any(text in tail for text in self.strings)

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def cut(self, token_ids: list[int]) -> str:
        """The text of these tokens before the first stop string in it."""
        text = self.text(token_ids)
        places = [place for place in (text.find(stop) for stop in self.strings) if place >= 0]
        return text[: min(places)] if places else text
