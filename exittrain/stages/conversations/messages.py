"""One row of any usual chat shape to one conversation, or the reason why not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}
PROMPT_KEYS = ("prompt", "instruction", "question")


class Refused(Exception):
    """A row that cannot be used; `str()` is the reason it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """Messages of alternating user and assistant turns, a system turn at most first.

    truncated: the last answer was cut by a token limit, so the end of that turn must not be trained.
    """

    id: str
    messages: tuple[tuple[str, str], ...]  # (role, content)
    source: str
    truncated: bool = False

    @property
    def as_dicts(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]

    @property
    def user_turns(self) -> list[str]:
        return [content for role, content in self.messages if role == "user"]

    @property
    def prompt_key(self) -> str:
        """Digest of the system turn and the first user turn, blind to case and spacing: equal keys are one prompt."""
        head = []
        for role, content in self.messages:
            head.append(f"{role}:{' '.join(content.split()).casefold()}")
            if role == "user":
                break
        return hashlib.sha256("\x00".join(head).encode()).hexdigest()


def parse_row(row: Any, id: str, source: str) -> Conversation:
    """A conversation from one row of a chat file.

    Shapes: `messages` or `conversations` as lists of {role, content} or {from, value} (aliases human, gpt, ... in any
    case), `turns` or a list under `prompt` (user turns only), `prompt`/`instruction`/`question` (one user turn, with an
    Alpaca-style `input` below it) with `response`/`completion`/`output` as the answer; `system` adds a system turn.

    Raises:
        Refused: with the reason to count the row under.
    """
    if not isinstance(row, Mapping):
        raise Refused("row is no object")
    messages = _messages(row)
    if row.get("system") and isinstance(row["system"], str) and messages[0][0] != "system":
        messages.insert(0, ("system", row["system"]))
    name = row.get("id", row.get("question_id", row.get("conversation_id")))
    id = str(name) if isinstance(name, (str, int)) and not isinstance(name, bool) else id
    return Conversation(id, tuple(messages), source, bool(row.get("truncated", False)))


def _messages(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    for key in ("messages", "conversations", "conversation"):
        if key in row:
            return _message_list(row[key])
    if "turns" in row:
        return _turn_list(row["turns"])
    for key in PROMPT_KEYS:
        if key not in row:
            continue
        value = row[key]
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            messages = _message_list(value)
        elif isinstance(value, list):
            return _turn_list(value)
        else:
            more = row.get("input")
            text = _text(value)
            messages = [("user", f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text)]
        answer = next((row[k] for k in ("response", "completion", "output", "answer") if row.get(k)), None)
        return messages if answer is None else [*messages, ("assistant", _text(answer))]
    raise Refused("no messages, conversations, turns or prompt")


def _message_list(value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise Refused("messages are no list")
    if not value:
        raise Refused("no messages")
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise Refused("a message is no object")
        name = message.get("role", message.get("from"))
        role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise Refused(f"unknown role {str(name)[:20]!r}")
        if message.get("tool_calls"):
            raise Refused("tool calls")
        content = message.get("content", message.get("value"))
        if role == "system" and content in ("", None):
            continue  # many public sets carry an empty system turn
        messages.append((role, _text(content)))
    _check_order([role for role, _ in messages])
    return messages


def _turn_list(value: Any) -> list[tuple[str, str]]:
    """User turns without answers: kept side by side, the target answers them one after the other."""
    if not isinstance(value, list) or not value:
        raise Refused("no messages")
    return [("user", _text(turn)) for turn in value]


def _text(value: Any) -> str:
    if isinstance(value, list):  # content parts, [{"type": "text", "text": ...}]
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value):
            raise Refused("content is no text")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Refused("content is no text")
    if not value.strip():
        raise Refused("empty content")
    return value


def _check_order(roles: list[str]) -> None:
    """system? (user assistant)* user?"""
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "system" in turns:
        raise Refused("system turn is not first")
    if not turns:
        raise Refused("no user turn")
    if turns[0] == "assistant":
        raise Refused("assistant speaks first")
    if any(a == b for a, b in pairwise(turns)):
        raise Refused("roles do not alternate")
