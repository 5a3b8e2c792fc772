"""One source of a recipe to token sequences: read, answered by the target where asked, rendered, counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exittrain.config.schema import DataSection, SourceSection
from exittrain.stages.conversations.answers import Job, Writer, fault, text_of
from exittrain.stages.conversations.chat import ChatRenderer, Rendered
from exittrain.stages.conversations.messages import Conversation, Refused
from exittrain.stages.conversations.store import TokenSequence
from exittrain.stages.conversations.text import text_windows
from exittrain.stages.prompts import load_set

TOO_LONG = "longer than max_length"


@dataclass
class Prepared:
    """Sequences of one source, what was lost on the way by reason, and who wrote the answers."""

    sequences: list[TokenSequence] = field(default_factory=list)
    num_rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    masked_turns: Counter[str] = field(default_factory=Counter)
    num_cut: int = 0
    responses: dict[str, Any] = field(default_factory=dict)

    def add(self, conversation: Conversation, rendered: Rendered, data: DataSection) -> None:
        ids, mask = rendered.token_ids[: data.max_length], rendered.loss_mask[: data.max_length]
        if len(ids) < len(rendered.token_ids):
            if data.too_long == "drop" or not any(mask):
                self.refused[TOO_LONG] += 1
                return
            self.num_cut += 1
        self.masked_turns.update(rendered.masked_turns)
        self.sequences.append(
            TokenSequence(
                conversation.id,
                ids,
                mask,
                rendered.prompt_len,
                conversation.source,
                conversation.prompt_key,
                conversation,
            )
        )


def prepare_text(
    tokenizer: Any, files: Sequence[Path], source: SourceSection, length: int, count: int | None, seed: int
) -> Prepared:
    """Windows of plain text; every token but the first is trained."""
    windows = text_windows(tokenizer, files, length, count, seed)
    mask = [0] + [1] * (length - 1)
    sequences = [TokenSequence(name, ids, mask, 1, f"text:{source.path}") for name, ids in windows]
    return Prepared(sequences, len(windows), responses={"by": "text"})


def prepare_chat(
    renderer: ChatRenderer, writer: Writer, source: SourceSection, data: DataSection, seed: int, name: str
) -> Prepared:
    """Conversations of a source. name: "train" or "heldout", part of every random stream.

    Raises:
        InputError: the source cannot be read, or the template cannot do what the system policy asks.
    """
    if source.kind == "magpie":
        return _magpie(renderer, writer, source, data, name)
    assert source.path is not None  # checked with the recipe
    conversations, refused = load_set(source.path, source.count, seed, source.split)
    prepared = Prepared(num_rows=len(conversations) + sum(refused.values()), refused=refused)
    if source.kind == "prompts" or source.regenerate:
        unique = _unique(conversations, lambda one: one.prompt_key, "same prompt twice", prepared.refused)
        _answer(renderer, writer, unique, data, name, prepared)
        return prepared
    prepared.responses = _given_by(source.path)
    for one in _unique(conversations, lambda one: one.messages, "same conversation twice", prepared.refused):
        try:
            prepared.add(one, renderer.render(one.messages, one.truncated), data)
        except Refused as reason:
            prepared.refused[str(reason)] += 1
    return prepared


def _magpie(renderer: ChatRenderer, writer: Writer, source: SourceSection, data: DataSection, name: str) -> Prepared:
    """Magpie (arXiv 2406.08464): behind the template's `user` header an aligned model writes a plausible user turn."""
    count, limit = source.count or 0, data.generation.max_prompt_tokens
    prefix = renderer.user_prefix()
    jobs = [Job(f"magpie-{index:05d}", prefix) for index in range(count)]
    text = text_of(renderer.tokenizer, writer.target.eos_token_ids)
    prepared = Prepared(num_rows=count)
    conversations = []
    for job, written in zip(jobs, writer.write(jobs, f"{name}-user", limit), strict=True):
        turn = text(written.token_ids).strip()
        wrong = fault(written.token_ids, turn) if written.finished else "is not finished"
        if wrong:
            prepared.refused[f"user turn {wrong}"] += 1
        else:
            conversations.append(Conversation(job.id, (("user", turn),), "magpie"))
    unique = _unique(conversations, lambda one: one.prompt_key, "same prompt twice", prepared.refused)
    _answer(renderer, writer, unique, data, name, prepared)
    return prepared


@dataclass
class _Dialogue:
    """A conversation being answered: messages so far, and the sampled ids of its answers."""

    origin: Conversation
    messages: list[tuple[str, str]]
    answers: list[list[int]] = field(default_factory=list)
    truncated: bool = False
    open: bool = True


def _answer(
    renderer: ChatRenderer,
    writer: Writer,
    conversations: list[Conversation],
    data: DataSection,
    name: str,
    prepared: Prepared,
) -> None:
    """The target answers every user turn, all conversations' first turns together, then all second ones, and so on."""
    dialogues = [_Dialogue(one, [m for m in one.messages[:1] if m[0] == "system"]) for one in conversations]
    for turn in range(max((len(one.user_turns) for one in conversations), default=0)):
        jobs, live = [], []
        for dialogue in dialogues:
            if dialogue.open and turn < len(dialogue.origin.user_turns):
                ids = _next_prompt(renderer, dialogue, turn, data.max_length, prepared.refused)
                if ids is not None:
                    jobs.append(Job(dialogue.origin.id, ids))
                    live.append(dialogue)
        limit = data.generation.max_new_tokens
        for dialogue, job, written in zip(live, jobs, writer.write(jobs, f"{name}-turn-{turn}", limit), strict=True):
            _take(renderer, writer, dialogue, written.token_ids[: data.max_length - len(job.prompt)], prepared.refused)
    for dialogue in dialogues:
        if dialogue.answers:
            done = replace(dialogue.origin, messages=tuple(dialogue.messages), truncated=dialogue.truncated)
            prepared.add(done, renderer.join(dialogue.messages, dialogue.answers), data)
    prepared.responses = {
        "by": "target",
        "model": writer.target.name,
        "fingerprint": writer.target.fingerprint(),
        "temperature": data.generation.temperature,
        "top_p": data.generation.top_p,
        "max_new_tokens": data.generation.max_new_tokens,
        "template_sha256": renderer.template_sha256,
    }


def _next_prompt(
    renderer: ChatRenderer, dialogue: _Dialogue, turn: int, max_length: int, refused: Counter[str]
) -> list[int] | None:
    """Ids to continue, or None when this dialogue ends here: without answers it is lost and counted."""
    messages = [*dialogue.messages, ("user", dialogue.origin.user_turns[turn])]
    reason = TOO_LONG
    try:
        ids = renderer.prompt(messages)
        if len(ids) < max_length:
            dialogue.messages = messages
            return ids
    except Refused as why:
        reason = str(why)
    dialogue.open = False
    if not dialogue.answers:
        refused[reason] += 1
    return None


def _take(renderer: ChatRenderer, writer: Writer, dialogue: _Dialogue, ids: list[int], refused: Counter[str]) -> None:
    """Add an answer; a cut one ends the dialogue, a faulty one loses it."""
    stops = writer.target.eos_token_ids
    text = text_of(renderer.tokenizer, stops)(ids)
    wrong = fault(ids, text)
    if wrong:
        refused[f"answer {wrong}"] += 1
        dialogue.open, dialogue.answers = False, []
        return
    dialogue.messages.append(("assistant", text))
    dialogue.answers.append(ids)
    dialogue.truncated = ids[-1] not in stops
    dialogue.open = not dialogue.truncated


def _unique(conversations: list[Conversation], key: Any, reason: str, refused: Counter[str]) -> list[Conversation]:
    """The first conversation of each key; ids are made unique too, since they name random streams and tree records."""
    seen: set[Any] = set()
    ids: Counter[str] = Counter()
    kept = []
    for one in conversations:
        if key(one) in seen:
            refused[reason] += 1
            continue
        seen.add(key(one))
        ids[one.id] += 1
        kept.append(one if ids[one.id] == 1 else replace(one, id=f"{one.id}#{ids[one.id]}"))
    return kept


def _given_by(path: str) -> dict[str, Any]:
    """Who wrote a file's answers: what `<file>.meta.json` beside it says, else unknown."""
    from exittrain.records.share import ROOTS

    for root in (Path(), *ROOTS):
        meta = (root / path).with_suffix(".meta.json")
        if meta.is_file():
            return {"by": "file", **json.loads(meta.read_text(encoding="utf-8")).get("responses", {}), "file": path}
    return {"by": "unknown", "file": path}
