"""Rows of every usual shape, and each malformed one refused with its reason (cases.md 9)."""

from __future__ import annotations

import pytest

from exittrain.stages.conversations.messages import Refused, parse_row
from exittrain.stages.conversations.rows import choose

TALK = (("user", "Hi"), ("assistant", "Hello"))
GOOD = {
    "messages": {"messages": [{"role": "User", "content": "Hi"}, {"role": " ASSISTANT", "content": "Hello"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "model", "content": "Hello"},
        ]
    },
    "empty system": {"messages": [{"role": "system", "content": ""}, *({"role": r, "content": c} for r, c in TALK)]},
    "prompt and response": {"prompt": "Hi", "response": "Hello"},
    "prompt messages": {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Hello"},
}
BAD = {
    "content is no text": {"messages": [{"role": "user", "content": None}]},
    "no messages": {"messages": []},
    "assistant speaks first": {"messages": [{"role": "assistant", "content": "Hello"}]},
    "roles do not alternate": {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    "unknown role 'narrator'": {"messages": [{"role": "narrator", "content": "a"}]},
    "unknown role 'None'": {"messages": [{"content": "a"}]},
    "empty content": {"prompt": "  "},
    "no messages, conversations, turns or prompt": {"text": "a"},
    "messages are no list": {"messages": "a"},
    "a message is no object": {"messages": ["a"]},
    "row is no object": 3,
    "system turn is not first": {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
    "no user turn": {"messages": [{"role": "system", "content": "b"}]},
    "tool calls": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [1]}]
    },
}


@pytest.mark.parametrize("shape", GOOD)
def test_usual_shapes_give_the_same_conversation(shape):
    assert parse_row(GOOD[shape], "0", "x").messages == TALK


def test_prompt_only_shapes():
    assert parse_row({"question_id": 81, "turns": ["a", "b"]}, "0", "x").user_turns == ["a", "b"]
    assert parse_row({"question_id": 81, "turns": ["a"]}, "0", "x").id == "81"
    assert parse_row({"prompt": ["a", "b"]}, "0", "x").user_turns == ["a", "b"]
    assert parse_row({"instruction": "Add", "input": "1 2", "output": "3"}, "0", "x").messages[0] == (
        "user",
        "Add\n\n1 2",
    )
    assert parse_row({"system": "S", "prompt": "a"}, "0", "x").messages == (("system", "S"), ("user", "a"))


@pytest.mark.parametrize("reason", BAD)
def test_malformed_rows_are_refused_by_reason(reason):
    with pytest.raises(Refused) as refused:
        parse_row(BAD[reason], "0", "x")
    assert str(refused.value) == reason


def test_one_good_row_among_bad_ones_survives_and_every_bad_one_is_counted():
    found, refused = choose([*BAD.values(), GOOD["messages"]], "x", None, None, 0)
    assert [one.messages for one in found] == [TALK]
    assert refused == dict.fromkeys(BAD, 1)


def test_a_count_is_filled_with_usable_rows_in_file_order_whatever_the_bad_ones():
    rows = [{"prompt": str(i)} if i % 2 else {} for i in range(40)]
    found, _ = choose(rows, "x", None, 10, 3)
    ids = [int(one.id) for one in found]
    assert len(ids) == 10 and ids == sorted(ids) and all(i % 2 for i in ids)
    assert ids == [int(one.id) for one in choose(rows, "x", None, 10, 3)[0]] != [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]


def test_prompt_key_is_blind_to_case_and_spacing_and_answers():
    keys = {
        parse_row({"prompt": p, "response": a}, "0", "x").prompt_key for p, a in [("Hi  you", "a"), ("hi you", "b")]
    }
    assert len(keys) == 1 and parse_row({"prompt": "hi me"}, "0", "x").prompt_key not in keys
