"""The target's chat template, at token level: prompts, whole conversations, and which tokens of them are trained.

The loss mask comes from structure alone: turn k is what the rendered prefix messages[:k] + generation prompt does not
yet hold. No text is searched for, no character offsets, no `{% generation %}` marks, which most templates lack.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from exittrain.errors import InputError
from exittrain.stages.conversations.messages import Refused

RENDER_DATE = date(2025, 1, 1)  # what templates that print today's date are told, so that ids never depend on the day
Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Rendered:
    """token_ids and loss_mask (1: trained) of equal length; masked_turns: assistant turns left out, by reason."""

    token_ids: list[int]
    loss_mask: list[int]
    masked_turns: dict[str, int]

    @property
    def prompt_len(self) -> int:
        """Tokens before the first trained one."""
        return self.loss_mask.index(1)


class ChatRenderer:
    """Renders messages with one tokenizer, one template and one policy; the same object serves training and evaluation.

    system: "template" (whatever the template does by itself), "none" (the template's default system turn is cut out) or
    the text of a system turn given to conversations that have none. system_turns: what happens to system turns (keep,
    merge into the first user turn, drop the data's own, fail on them). supervise: train "all" assistant turns or the
    "last".

    Raises:
        InputError: no chat template; a template that cannot do what the policy asks.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        system: str = "template",
        system_turns: str = "keep",
        supervise: str = "all",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise InputError("the target has no chat template: use an instruction-tuned model, or data of kind 'text'")
        self.tokenizer, self.eos_token_ids = tokenizer, frozenset(eos_token_ids)
        self.system, self.system_turns, self.supervise = system, system_turns, supervise
        self.variables = {"date_string": RENDER_DATE.strftime("%d %b %Y"), **(variables or {})}
        self.template = _pin_clock(tokenizer.get_chat_template())
        self.control_ids = frozenset(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)
        self._cut: tuple[int, list[int]] = (0, [])
        try:
            if system == "none":
                self._cut = self._default_system()
            self._turn_end = self._find_turn_end()
        except Refused as refused:
            raise InputError(f"{refused}: this template cannot render a plain question and answer") from None

    @property
    def template_sha256(self) -> str:
        """Digest of everything that decides the ids: tokenizer, template, its variables and the system policy."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        parts = [
            backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True),
            self.template,
            json.dumps(self.variables, sort_keys=True),
            self.system,
            self.system_turns,
        ]
        return hashlib.sha256("\x00".join(parts).encode()).hexdigest()

    @property
    def prefix_sha256(self) -> str:
        """Digest of the ids before the first user's words: tells data with a system prompt from data without."""
        return hashlib.sha256(json.dumps(self.user_prefix()).encode()).hexdigest()

    def with_policy(self, messages: Messages) -> list[tuple[str, str]]:
        """Messages after the system policy: what is rendered, and what conversations.jsonl shows."""
        turns = list(messages)
        own = turns[0][0] == "system"
        if own and self.system_turns == "fail":
            raise InputError("a conversation has a system turn and data.system_turns is 'fail'")
        if own and self.system_turns == "drop":
            turns = turns[1:]
        if turns[0][0] != "system" and self.system not in ("template", "none"):
            turns.insert(0, ("system", self.system))
        if turns[0][0] == "system" and self.system_turns == "merge":
            (_, system), (role, first) = turns[:2]
            turns[:2] = [(role, f"{system}\n\n{first}")]
        return turns

    def prompt(self, messages: Messages) -> list[int]:
        """Ids of messages ending in a user turn, up to where the answer's first token goes."""
        return self._ids(self.with_policy(messages), generation_prompt=True)

    def user_prefix(self) -> list[int]:
        """Ids up to where a user's first word goes: what all first turns have in common (Magpie's prompt)."""
        variants = [self._ids(self.with_policy([("user", text)]), True) for text in ("a", "Q", "7", "é", "(", "🙂")]
        return _common_prefix(variants)

    def render(self, messages: Messages, truncated: bool = False) -> Rendered:
        """Ids and loss mask of a conversation that ends in an assistant turn.

        A turn whose prompt is no prefix of the whole (templates that rewrite history, dropping earlier thoughts) is
        masked: at generation time its context would be another one. truncated: the last turn's end is not trained,
        because the model did not end it there.

        Raises:
            Refused: no assistant turn, control tokens inside an answer, or nothing left to train.
        """
        turns = self.with_policy(messages)
        while turns and turns[-1][0] != "assistant":
            turns.pop()
        if not turns:
            raise Refused("no assistant turn")
        whole = self._ids(turns)
        mask = [0] * len(whole)
        masked: dict[str, int] = {}
        answers = [k for k, (role, _) in enumerate(turns) if role == "assistant"]
        for k in answers:
            last = k == answers[-1]
            if self.supervise == "last" and not last:
                continue
            prompt, through = self._ids(turns[:k], True), whole if last else self._ids(turns[: k + 1])
            reason = self._why_not(whole, prompt, through)
            if reason:
                masked[reason] = masked.get(reason, 0) + 1
                continue
            stop = len(through) - len(self._turn_end) + (0 if last and truncated else self._num_trained_end)
            if self.control_ids.intersection(whole[len(prompt) : len(through) - len(self._turn_end)]):
                raise Refused("control token inside an answer")
            mask[len(prompt) : stop] = [1] * (stop - len(prompt))
            if last and truncated:
                whole, mask = whole[:stop], mask[:stop]
        if not any(mask):
            raise Refused(next(iter(masked), "nothing to train"))
        return Rendered(whole, mask, masked)

    def join(self, messages: Messages, answers: Sequence[Sequence[int]]) -> Rendered:
        """Ids and loss mask of a conversation whose answers the target has just written, as the ids it really sampled.

        messages: alternating, ending in the last answer; answers: sampled ids (end of turn included when the target
        wrote it), one list an assistant turn. An earlier turn is trained only where the history holds its very ids.
        """
        prompt = self.prompt(messages[:-1])
        whole = prompt + list(answers[-1])
        mask, masked = [0] * len(prompt) + [1] * len(answers[-1]), 0
        places = [k for k, (role, _) in enumerate(messages) if role == "assistant"]
        for k, answer in zip(places[:-1], answers[:-1], strict=True):
            if self.supervise == "last":
                break
            earlier = [*self.prompt(messages[:k]), *answer]
            if whole[: len(earlier)] == earlier:
                mask[len(earlier) - len(answer) : len(earlier)] = [1] * len(answer)
            else:
                masked += 1
        return Rendered(whole, mask, {"answer is tokenised differently as history": masked} if masked else {})

    def _why_not(self, whole: list[int], prompt: list[int], through: list[int]) -> str:
        if through != whole[: len(through)] or prompt != whole[: len(prompt)]:
            return "template renders the turn's context differently later"
        if self._turn_end and through[-len(self._turn_end) :] != self._turn_end:
            return "template's end of turn runs into the answer"
        return ""

    def _ids(self, turns: Messages, generation_prompt: bool = False) -> list[int]:
        """The one place where a template is applied: a plain list of int, the default system turn cut if asked."""
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            ids = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=True,
                **self.variables,
            )["input_ids"]
        except Exception as error:  # whatever a template raises: jinja errors, or its own raise_exception
            if turns[0][0] == "system":
                raise InputError(
                    f"the chat template refuses a system turn ({error}): set data.system_turns to merge or drop"
                ) from None
            raise Refused(f"the chat template refuses it: {error}") from None
        ids = [int(token) for token in ids]
        start, block = self._cut
        if turns[0][0] != "system" and ids[start : start + len(block)] == block:
            del ids[start : start + len(block)]
        return ids

    def _default_system(self) -> tuple[int, list[int]]:
        """(position, ids) of the system turn the template writes by itself; BOS in front of it stays."""
        first = [("user", "a"), ("assistant", "b")]
        history, longer = self._ids(first), self._ids([*first, ("user", "a")])
        turn, alone = longer[len(history) :], self._ids([("user", "a")])
        if longer[: len(history)] != history or not turn or alone[-len(turn) :] != turn:
            raise InputError(
                "the chat template does not let its own system turn be cut out: set data.system to 'template' or a text"
            )
        block, bos = alone[: -len(turn)], self.tokenizer.bos_token_id
        start = 1 if block and block[0] == bos and turn[0] != bos else 0
        return start, block[start:]

    def _find_turn_end(self) -> list[int]:
        """Ids the template writes after every answer; sets how many of them the target has to write itself."""
        wholes = [self._ids([("user", "a"), ("assistant", text)]) for text in ("a", "Q7", "3", "x.", "é)")]
        end = _common_prefix([ids[::-1] for ids in wholes])[::-1]
        stops = [i for i, token in enumerate(end) if token in self.eos_token_ids]
        if stops:
            self._num_trained_end = stops[0] + 1
        else:  # the target's list of stop tokens lacks this template's: the first control token ends the turn
            self._num_trained_end = 1 if end and end[0] in self.control_ids else 0
        return end


def _common_prefix(lists: Sequence[Sequence[int]]) -> list[int]:
    prefix: list[int] = []
    for tokens in zip(*lists, strict=False):
        if len(set(tokens)) > 1:
            break
        prefix.append(tokens[0])
    return prefix


def _pin_clock(template: str) -> str:
    """The template with `strftime_now` fixed at RENDER_DATE: rendering on another day gives the same ids."""
    formats = set(re.findall(r"strftime_now\(\s*[\"']([^\"']*)[\"']", template))
    if "strftime_now" not in template:
        return template
    dates = {text: RENDER_DATE.strftime(text) for text in sorted(formats)}
    date_of = f"{json.dumps(dates)}.get(format, '{RENDER_DATE}')"
    return f"{{%- macro strftime_now(format) -%}}{{{{ {date_of} }}}}{{%- endmacro -%}}{template}"
