"""The data stage on a tiny model: sources, counts, restarts, splits (cases.md 6, 9, 12, 18, 19, 29, 92, 96)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exittrain.config.load import build_recipe
from exittrain.errors import InputError, Interrupted
from exittrain.records.files import read_json
from exittrain.records.run_folder import RunFolder
from exittrain.runtime import parts
from exittrain.stages.context import StageContext
from exittrain.stages.conversations.answers import Writer, fault
from exittrain.stages.conversations.store import TokenSequence, read_sequences
from exittrain.stages.data import run_data, show_samples, split_prompts

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    """A two-layer Llama with random weights whose tokenizer writes ChatML. It ends a turn after some ten tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["the user and the assistant"],
        trainers.BpeTrainer(vocab_size=270, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=[0, 2], **sizes)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [0, 2]
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.model.embed_tokens.weight[:, 0] = 0.1  # a constant feature, read by the end of turn alone
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[2, 0] = 0.9
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make(target_folder, tmp_path, monkeypatch):
    """make(train={...}, **data) -> StageContext, each time the same run folder unless `run` says otherwise."""
    monkeypatch.setenv("EXITTRAIN_PROGRESS", "0")

    def context(train: dict, run: str = "run", seed: int = 0, **data) -> StageContext:
        generation = {"max_new_tokens": 12, "max_prompt_tokens": 12, "batch_size": 4, "temperature": 1.0}
        data = {"train": train, "max_length": 64, "generation": generation, **data}
        tree = {
            "name": "t",
            "seed": seed,
            "target": {"model": str(target_folder)},
            "drafter": {"layers": 1},
            "data": data,
        }
        return StageContext(build_recipe(tree), RunFolder(tmp_path / run))

    return context


def prompts_file(tmp_path: Path, count: int, name: str = "p.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(count)))
    return str(path)


def stored(context: StageContext) -> tuple[list[TokenSequence], list[TokenSequence], dict]:
    folder = context.run.path / "data"
    return (
        read_sequences(folder / "train.parquet"),
        read_sequences(folder / "heldout.parquet"),
        read_json(folder / "manifest.json"),
    )


def test_prompts_are_answered_by_the_target_and_split_without_overlap(make, tmp_path):
    context = make({"kind": "prompts", "path": prompts_file(tmp_path, 20)}, heldout_fraction=0.2)
    run_data(context)
    train, held, manifest = stored(context)
    assert len(held) == 4 and len(train) == 16 - sum(manifest["train"]["refused"].values())
    tokenizer, target = context.target().tokenizer, context.target()
    for one in train + held:
        answer = [t for t, m in zip(one.token_ids, one.loss_mask, strict=True) if m]
        assert one.loss_mask == [0] * one.prompt_len + [1] * len(answer)
        assert not set(answer[:-1]) & set(target.eos_token_ids)  # stops at either end token (cases.md 18)
        assert answer[-1] in target.eos_token_ids or len(answer) == 12
    prompts = [{tokenizer.decode(one.token_ids[: one.prompt_len]) for one in part} for part in (train, held)]
    assert not prompts[0] & prompts[1]
    written = manifest["train"]["responses"]
    assert (
        written["by"] == "target"
        and written["fingerprint"] == target.fingerprint() == manifest["target"]["fingerprint"]
    )
    assert {"template_sha256", "temperature"} <= set(written) and manifest["prefix_sha256"]
    assert context.run.is_done("data", context.stage_key("data")) and not (context.run.path / ".data-parts").exists()


def test_the_jsonl_view_read_again_gives_the_same_prompts_and_trains_no_end_the_target_did_not_write(make, tmp_path):
    first = make({"kind": "prompts", "path": prompts_file(tmp_path, 12)})
    run_data(first)
    view = first.run.path / "data" / "conversations.jsonl"
    rows = [json.loads(line) for line in view.read_text().splitlines()]
    assert any(row.get("truncated") for row in rows)
    second = make({"kind": "conversations", "path": str(view)}, run="second")
    run_data(second)
    before = {one.sequence_id: one for part in stored(first)[:2] for one in part}
    for one in (one for part in stored(second)[:2] for one in part):
        old = before[one.sequence_id]
        assert one.token_ids[: one.prompt_len] == old.token_ids[: old.prompt_len]
        last = [t for t, m in zip(one.token_ids, one.loss_mask, strict=True) if m][-1]
        assert (last == 2) == (old.token_ids[-1] in (0, 2))
    assert stored(second)[2]["train"]["responses"]["by"] == "unknown"


def test_a_stopped_run_generates_only_what_is_missing_and_ends_with_the_same_bytes(make, tmp_path, monkeypatch):
    source = {"kind": "prompts", "path": prompts_file(tmp_path, 18)}
    clean = make(source, run="clean")
    run_data(clean)
    calls: list[int] = []
    real = Writer._generate

    def counted(self, jobs, *rest):
        calls.append(len(jobs))
        if stopped and len(calls) == 3:
            raise Interrupted("signal")
        return real(self, jobs, *rest)

    monkeypatch.setattr(Writer, "_generate", counted)
    stopped = make(source, run="broken")
    with pytest.raises(Interrupted):
        run_data(stopped)
    assert not (stopped.run.path / "data").exists() and calls == [4, 4, 4]
    parts = sorted((stopped.run.path / ".data-parts").iterdir())
    assert len(parts) == 2
    parts[0].write_text(parts[0].read_text().replace("true", "false", 1).replace("0", "1", 1))  # damaged: written again
    calls.clear()
    stopped = None
    again = make(source, run="broken")
    run_data(again)
    assert calls == [4, 4, 4, 2]
    for name in ("train.parquet", "heldout.parquet", "conversations.jsonl", "manifest.json"):
        assert (again.run.path / "data" / name).read_bytes() == (clean.run.path / "data" / name).read_bytes(), name
    calls.clear()
    run_data(make(source, run="broken"))
    assert calls == []


@pytest.mark.parametrize("source", ["prompts", "magpie"])
def test_any_number_of_ranks_writes_the_same_conversations(make, tmp_path, monkeypatch, source):
    """Each rank writes its own batches, the main one reads the others' and, where it cannot, writes them too."""
    given = (
        {"kind": source, "path": prompts_file(tmp_path, 18)} if source == "prompts" else {"kind": source, "count": 18}
    )
    clean = make(given, run="clean")
    run_data(clean)
    written: list[tuple[int, int]] = []
    place, generate, work = [0], Writer._generate, Writer.work

    def counted(self, jobs, *rest):
        written.append((place[0], len(jobs)))
        return generate(self, jobs, *rest)

    def work_of_all(self, order):
        for place[0] in (2, 1):
            work(self, order)
        if order.what.endswith("turn-0"):
            next(self.folder.glob("*turn-0-00001.json")).unlink()  # rank 1's: not to be seen from here
        place[0] = 0
        return work(self, order)

    monkeypatch.setattr(Writer, "_generate", counted)
    monkeypatch.setattr(Writer, "work", work_of_all)
    monkeypatch.setattr(parts, "rank", lambda: place[0])
    monkeypatch.setattr(parts, "world_size", lambda: 3)
    shared = make(given, run="shared")
    run_data(shared)
    ranks_of_batches = [rank for rank, _ in written]
    prompts = [2, 1, 1, 0, 0, 0]  # five batches: 2 has one, 1 and 0 two each, and one is written again
    assert ranks_of_batches[-6:] == prompts if source == "prompts" else ranks_of_batches[:5] == [2, 1, 1, 0, 0]
    for name in ("train.parquet", "heldout.parquet", "conversations.jsonl", "manifest.json", "DONE.json"):
        assert (shared.run.path / "data" / name).read_bytes() == (clean.run.path / "data" / name).read_bytes(), name


def test_parts_of_other_settings_are_not_reused(make, tmp_path):
    source = {"kind": "prompts", "path": prompts_file(tmp_path, 4)}
    context = make(source)
    from exittrain.stages.conversations.answers import Job

    def writer(**changes):
        settings = context.recipe.data.generation.model_copy(update=changes.pop("settings", {}))
        return Writer(
            context.target(),
            settings,
            tmp_path / "parts",
            changes.pop("seed", 0),
            context.stop,
            changes.pop("identity", "a"),
        )

    calls = []
    for changes in (
        {},
        {"seed": 1},
        {"identity": "b"},
        {"settings": {"temperature": 0.5}},
        {"settings": {"top_p": 0.5}},
        {},
    ):
        one = writer(**changes)
        real = one._generate
        one._generate = lambda *args, real=real: calls.append(1) or real(*args)
        before = len(calls)
        one.write([Job("x", [1, 5])], "turn", 4)
        one.write([Job("x", [1, 5])], "turn", 4)
        assert len(calls) == before + 1, changes


def test_magpie_needs_no_data(make):
    context = make({"kind": "magpie", "count": 24})
    run_data(context)
    train, held, manifest = stored(context)
    assert train and held and manifest["train"]["num_rows"] == 24
    kept = len(train) + len(held)
    assert kept + sum(manifest["train"]["refused"].values()) == 24
    assert "user turn is not finished" in manifest["train"]["refused"]
    assert all(one.source == "magpie" for one in train)


def test_rows_that_cannot_be_used_are_counted_and_the_good_ones_survive(make, tmp_path, capsys):
    long = "x" * 60
    rows = [
        {"messages": [{"role": "User", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        {"messages": [{"role": "User", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": "yes"}]},
        {"prompt": "no answer"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    context = make({"kind": "conversations", "path": str(path)})
    run_data(context)
    train, held, manifest = stored(context)
    assert len(train) == 1 and held == []
    assert manifest["train"]["refused"] == {
        "same conversation twice": 1,
        "no messages": 1,
        "content is no text": 1,
        "longer than max_length": 1,
        "no assistant turn": 1,
        "line is no JSON": 1,
    }
    assert "1 longer than max_length" in capsys.readouterr().err


def test_long_answers_can_be_cut_instead_long_prompts_never_are(make, tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "y" * 90}]
    prompt = [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "yes"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": prompt}) + "\n")
    context = make({"kind": "conversations", "path": str(path)}, too_long="cut")
    run_data(context)
    train, _, manifest = stored(context)
    assert [len(one.token_ids) for one in train] == [64] and train[0].loss_mask[-1] == 1
    assert manifest["train"]["num_cut"] == 1 and manifest["train"]["refused"] == {"longer than max_length": 1}


def test_nothing_usable_is_an_input_error_and_nothing_is_written(make, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    context = make({"kind": "conversations", "path": str(tmp_path / "rows.jsonl")})
    with pytest.raises(InputError, match="1 no messages"):
        run_data(context)
    assert not (context.run.path / "data").exists()


def test_prompts_of_the_heldout_source_are_taken_out_of_train(make, tmp_path):
    train = {"kind": "prompts", "path": prompts_file(tmp_path, 8)}
    context = make(train, heldout={"kind": "prompts", "path": prompts_file(tmp_path, 3, "h.jsonl")})
    run_data(context)
    kept, held, manifest = stored(context)
    assert len(held) <= 3 and manifest["train"]["refused"]["prompt is in the held-out set"] >= 1
    assert not {one.sequence_id for one in kept} & {one.sequence_id for one in held}


def test_several_turns_are_answered_in_turn(make, tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"turns": [f"a{i}", "b", "c"]}) + "\n" for i in range(12)))
    context = make({"kind": "prompts", "path": str(tmp_path / "t.jsonl")}, max_length=128)
    run_data(context)
    rows = [json.loads(line) for line in (context.run.path / "data" / "conversations.jsonl").read_text().splitlines()]
    assert any(len(row["messages"]) > 2 for row in rows)  # a cut answer ends its conversation
    assert all(
        [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2) for row in rows
    )


def test_text_windows_come_from_separate_files(make, tmp_path):
    for i in range(12):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"f{i}.py").write_text("".join(f"line {i} {j}\n" for j in range(80)))
    context = make({"kind": "text", "path": str(tmp_path / "corpus"), "count": 20}, max_length=32)
    run_data(context)
    train, held, manifest = stored(context)
    assert len(train) == 18 and len(held) == 2 and manifest["train"]["responses"] == {"by": "text"}
    assert all(one.loss_mask == [0] + [1] * 31 for one in train + held)
    assert not {one.sequence_id.split("-")[0] for one in train} & {one.sequence_id.split("-")[0] for one in held}


def test_text_and_chat_do_not_mix(make, tmp_path):
    chat = {"kind": "prompts", "path": prompts_file(tmp_path, 4)}
    with pytest.raises(InputError, match="kind 'text'"):
        run_data(make(chat, heldout={"kind": "text", "path": "stdlib"}))


def test_a_length_beyond_the_targets_positions_is_refused(make, tmp_path):
    with pytest.raises(InputError, match=r"data.max_length is 300, the target has 256 positions"):
        run_data(make({"kind": "prompts", "path": prompts_file(tmp_path, 4)}, max_length=300))


def test_split_keeps_answers_of_one_prompt_together_and_is_seeded():
    sequences = [TokenSequence(str(i), [1], [1], 0, "x", f"k{i // 2}") for i in range(20)]
    train, held = split_prompts(sequences, 0.3, 0)
    assert len(held) == 6 and not {one.prompt_key for one in train} & {one.prompt_key for one in held}
    assert split_prompts(sequences, 0.3, 0) == (train, held) != split_prompts(sequences, 0.3, 1)
    assert [len(part) for part in split_prompts(sequences[:1], 0.5, 0)] == [1, 0]


def test_samples_are_shown(make, tmp_path, capsys):
    show_samples(make({"kind": "prompts", "path": prompts_file(tmp_path, 4)}), 2)
    shown = capsys.readouterr().out
    assert shown.count(" trained ") == 2 and "say" in shown and shown.endswith("trained  context\n")


def test_faults_of_own_texts():
    assert fault([1, 2], "  ") == "is empty"
    assert fault([1, 2, 3, 4] * 20, "abcd" * 20) == "repeats itself"
    assert fault(list(range(80)), "fine") is None
    assert fault([1, 2] * 4, "short") is None
