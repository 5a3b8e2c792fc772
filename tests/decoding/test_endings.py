"""End tokens, stop strings, token and position limits, and what is refused before anything runs."""

import pytest
import torch
from conftest import as_target, random_model

from exittrain import InputError, decode
from exittrain.decoding.stopping import StopStrings
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.layers import copy_layers


class Letters:
    """A tokenizer of one or two letters a token: id 0 is special, 1..26 are a..z, later ids pairs."""

    eos_token_id = None

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.piece(i) for i in ids)

    def piece(self, index):
        if index == 0:
            return ""
        letter = chr(97 + (index - 1) % 26)
        return letter if index < 27 else letter + letter.upper()


@pytest.fixture(scope="module")
def perfect(target):
    return copy_layers(target, 3)


@pytest.fixture(scope="module")
def greedy_text(target):
    return decode(target, None, [5, 6, 7], temperature=0, max_new_tokens=60, eos_token_ids=()).token_ids


@pytest.mark.parametrize("max_new", [1, 2, 3, 7, 13])
def test_max_new_tokens_is_exact(target, perfect, greedy_text, max_new):
    out = decode(target, perfect, [5, 6, 7], temperature=0, max_new_tokens=max_new, eos_token_ids=())
    assert out.token_ids == greedy_text[:max_new] and out.finish_reason == "length"
    assert sum(r.num_emitted for r in out.rounds) == max_new
    assert all(r.num_emitted == r.block_length for r in out.rounds[:-1])
    assert out.rounds[-1].block_length >= out.rounds[-1].num_emitted


@pytest.mark.parametrize("drafted", [False, True])
def test_an_end_token_inside_the_accepted_path(target, perfect, greedy_text, drafted):
    end = next(t for i, t in enumerate(greedy_text) if i > 8 and t not in greedy_text[:i])
    place = greedy_text.index(end)
    drafter = perfect if drafted else None
    unused = next(t for t in range(97) if t not in greedy_text)
    out = decode(
        target, drafter, [5, 6, 7], temperature=0, eos_token_ids=[unused, end], budget=12, depth=12, width=1,
        max_new_tokens=60,
    )  # fmt: skip
    assert out.token_ids == greedy_text[: place + 1] and out.finish_reason == "eos"
    if drafted:  # the block went on behind the end token; its length is the verifier's, the tokens are dropped
        assert {r.block_length for r in out.rounds} == {13}
        assert sum(r.num_emitted for r in out.rounds) == place + 1


def test_the_target_s_own_end_tokens_are_the_default(greedy_text):
    model = random_model()
    model.module.generation_config.eos_token_id = [96, greedy_text[4]]
    out = decode(as_target(model), None, [5, 6, 7], temperature=0)
    assert out.token_ids == greedy_text[: greedy_text.index(greedy_text[4]) + 1] and out.finish_reason == "eos"


def test_stop_strings_cut_the_text(perfect, greedy_text):
    spelled = as_target(random_model(), Letters())
    whole = Letters().decode(greedy_text)
    stop = whole[9:13]
    for drafter in (None, perfect):
        out = decode(spelled, drafter, [5, 6, 7], temperature=0, eos_token_ids=(), stop_strings=["#", stop])
        assert out.finish_reason == "stop"
        assert out.text == whole[: whole.index(stop)]
        assert out.token_ids == greedy_text[: len(out.token_ids)]
        assert stop in Letters().decode(out.token_ids) and stop not in Letters().decode(out.token_ids[:-1])


def test_text_without_stop_strings(greedy_text):
    out = decode(
        as_target(random_model(), Letters()), None, [5, 6, 7], temperature=0, max_new_tokens=9, eos_token_ids=()
    )
    assert out.text == Letters().decode(greedy_text[:9])


def test_a_stop_string_after_many_invisible_tokens_is_found():
    finder = StopStrings(Letters(), ["abc"])
    assert finder.completed_by([1] * 50 + [1, 0, 0, 2, 3]) and not finder.completed_by([1, 2])


@pytest.mark.parametrize("drafted", [False, True])
def test_the_position_limit_ends_with_length(drafted):
    """The tree shrinks near the limit; no position at or past it is ever asked of the target."""
    target = as_target(random_model(max_positions=24))
    drafter = CausalDrafter(copy_layers(target, 2).model) if drafted else None
    seen = []
    original = target.hidden
    target.hidden = lambda ids, positions=None, *rest: (
        seen.append(int(positions.max())) or original(ids, positions, *rest)
    )
    prompts = [[5, 6, 7], [3] * 20, [4] * 23]
    outs = decode(target, drafter, prompts, temperature=0, max_new_tokens=64, eos_token_ids=(), depth=8)
    assert [len(p) + len(o.token_ids) for p, o in zip(prompts, outs, strict=True)] == [24, 24, 24]
    assert {o.finish_reason for o in outs} == {"length"}
    assert max(seen) < 24
    longer = decode(as_target(random_model()), None, prompts, temperature=0, max_new_tokens=64, eos_token_ids=())
    assert all(b.token_ids[: len(a.token_ids)] == a.token_ids for a, b in zip(outs, longer, strict=True))


def test_the_drafter_s_positions_count_too(target):
    short = CausalDrafter(random_model(max_positions=16, layers=1))
    out = decode(target, short, [1, 2, 3], max_new_tokens=64, eos_token_ids=())
    assert 3 + len(out.token_ids) == 16
    with pytest.raises(InputError, match="16 positions"):
        decode(target, short, [1] * 16)


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "no prompt"),
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([1, 97], {}, "token 97"),
        ([1, -1], {}, "token -1"),
        ("text", {}, "give token ids"),
        (["text"], {}, "give token ids"),
        ([1.5, 2.0], {}, "whole numbers"),
        ([1] * 256, {}, "256 positions"),
        ({"input_ids": [1]}, {}, "input_ids"),
        ([1], {"temperature": -1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"budget": 0}, "budget"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"verifier": "greedy"}, "temperature 0"),
        ([1], {"verifier": "tav"}, "tev"),
        ([1], {"builder": "oracle"}, "oracle"),
        ([1], {"builder": "best-first"}, "best_first"),
        ([1], {"stop_strings": ["x"]}, "tokenizer"),
        ([[1], [2]], {"generator": [torch.Generator()]}, "1 generators for 2 prompts"),
        ([1], {"generator": 7}, "manual_seed"),
        ([[1], [2]], {"generator": [torch.default_generator] * 2}, "two prompts"),
    ],
)
def test_user_mistakes_are_one_clear_line(target, prompt, settings, words):
    with pytest.raises(InputError, match=words) as caught:
        decode(target, None, prompt, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"builder": "best_first", "verifier": "traversal"}, "exact only on trees drawn i.i.d. or without replacement"),
        ({"builder": "beam", "verifier": "block"}, "exact only on trees drawn"),
        ({"builder": "static", "verifier": "rrs"}, "exact only on trees drawn i.i.d."),
        ({"builder": "sampled_wor", "verifier": "rrs"}, "drawn 'without_replacement'"),
        ({"builder": "sampled_iid", "verifier": "rrs_wor"}, "drawn 'iid'"),
        ({"builder": "sampled_iid", "verifier": "block", "branching": "2-ary"}, "made for chains"),
        ({"builder": "sampled_wor", "verifier": "block", "branching": ((0,), (1,))}, "made for chains"),
        ({"builder": "sampled_wor", "verifier": "greedy"}, "temperature 0"),
    ],
)
def test_pairs_that_are_not_exact_are_refused_before_anything_runs(target, perfect, monkeypatch, settings, words):
    monkeypatch.setattr(target, "hidden", None)
    with pytest.raises(InputError, match=words) as caught:
        decode(target, perfect, [1, 2], **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("verifier", ["rrs", "rrs_wor", "traversal", "block", "residual"])
def test_plain_decoding_takes_any_verifier(target, verifier):
    """A root alone: whatever the verifier, one draw of the next token."""
    plain, out = (
        decode(target, None, [5, 6, 7], verifier=name, generator=torch.Generator().manual_seed(1), record_coverage=True)
        for name in ("tev", verifier)
    )
    assert out.token_ids == plain.token_ids and len(set(out.token_ids)) > 3
    assert all((r.block_length, r.coverage, r.expected_block_length) == (1, 0, 1) for r in out.rounds)


@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 1.1), ("no_repeat_ngram_size", 3)])
def test_a_distribution_that_changes_with_the_history_is_refused(name, value):
    target = as_target(random_model())
    setattr(target.module.generation_config, name, value)
    with pytest.raises(InputError, match=name):
        decode(target, None, [1, 2])


def test_prompts_in_every_form_and_never_written_to(target):
    prompt = torch.tensor([4, 5, 6])
    forms = [[4, 5, 6], (4, 5, 6), prompt, prompt.numpy(), prompt.to(torch.int32), list(prompt)]
    outs = [decode(target, None, form, temperature=0, max_new_tokens=4).token_ids for form in forms]
    assert all(tokens == outs[0] for tokens in outs) and prompt.tolist() == [4, 5, 6]
    batch = decode(target, None, torch.stack([prompt, prompt + 1]), temperature=0, max_new_tokens=4)
    assert batch[0].token_ids == outs[0] and len(batch) == 2


def test_seconds_cover_the_whole_run(target, perfect):
    out = decode(target, perfect, [5, 6, 7], temperature=0, max_new_tokens=20, eos_token_ids=())
    for one in out.rounds:
        assert set(one.seconds) == {"draft", "build", "score", "verify", "commit"}
        assert min(one.seconds.values()) > 0
    spent = out.prefill_seconds + sum(sum(r.seconds.values()) for r in out.rounds)
    assert out.total_seconds == pytest.approx(spent)
    assert out.mean_block_length == sum(r.block_length for r in out.rounds) / len(out.rounds)
