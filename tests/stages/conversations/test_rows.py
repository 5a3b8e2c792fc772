"""Files, folders, prompt sets and benchmarks as sources."""

from __future__ import annotations

import json

import pytest

from exittrain.errors import InputError
from exittrain.records.files import sha256
from exittrain.records.share import share_path
from exittrain.stages.conversations.rows import BadRow, read_file
from exittrain.stages.prompts import expand_tasks, known_sets, load_prompts, load_set, read_set


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("EXITTRAIN_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_jsonl_with_bom_blank_lines_and_broken_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\u2028b"}\r\n\n{"prompt": \n\xff\xfe\n{"prompt": "c"}')
    rows = list(read_file(path))
    assert [row for row in rows if not isinstance(row, BadRow)] == [{"prompt": "a\u2028b"}, {"prompt": "c"}]
    assert sum(isinstance(row, BadRow) for row in rows) == 2


def test_json_list_and_parquet(tmp_path):
    import datasets

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert list(read_file(tmp_path / "a.json")) == rows
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for name, split in (("saved", "train"), ("splits", "test"), ("folder", "train"), ("a.json", "train")):
        assert [one.user_turns for one in load_set(str(tmp_path / name), split=split)[0]] == [["a"], ["b"]], name
    with pytest.raises(InputError, match="split 'train'"):
        load_set(str(tmp_path / "splits"))


def test_names_that_mean_nothing(tmp_path):
    with pytest.raises(InputError, match="did you mean 'gsm8k'"):
        load_prompts("gsm8")
    with pytest.raises(InputError, match=r"neither a prompt set nor a file"):
        load_prompts(str(tmp_path / "absent.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(InputError, match="1 no messages"):
        load_prompts(str(tmp_path / "bad.jsonl"))


def test_every_shipped_set_loads_has_unique_ids_and_says_what_it_is():
    for name, path in known_sets().items():
        prompts = load_prompts(name)
        assert path.stem == name == read_set(path).name
        assert len(prompts) >= 10 and len({p.id for p in prompts}) == len(prompts), name
        assert all(p.source in (name, f"{name} (fixture)") for p in prompts)
        assert len({p.turns for p in prompts}) == len(prompts)
    assert {"mt_bench", "gsm8k", "humaneval", "alpaca", "everyday"} <= set(known_sets())
    assert all(len(p.turns) == 2 for p in load_prompts("mt_bench"))


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-large", "smollm2-135m-greedy"])
def test_the_committed_conversations_are_usable_and_say_who_wrote_them(name):
    found, refused = load_set(f"data/conversations/{name}.jsonl")
    assert len(found) >= 500 and not refused and len({one.prompt_key for one in found}) == len(found)
    assert all([role for role, _ in one.messages] == ["user", "assistant"] for one in found)
    meta = json.loads(share_path(f"data/conversations/{name}.meta.json").read_text())
    assert meta["num_conversations"] == len(found) and meta["responses"]["model"] == "smollm2-135m"


def test_own_files_are_the_ones_their_sets_name():
    for path in known_sets().values():
        one = read_set(path)
        assert one.file is None or sha256(share_path(one.file)) == one.sha256


def test_a_full_public_file_replaces_the_fixture_and_passes_the_template(tmp_path, monkeypatch):
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"turns": ["2+2?"]}\n{"else": 1}\n')
    monkeypatch.setenv("EXITTRAIN_DATA", str(tmp_path))
    prompts = load_prompts("gsm8k")
    assert [(p.turns, p.source) for p in prompts] == [(("1+1?",), "gsm8k"), (("2+2?",), "gsm8k")]


def test_counts_are_reproducible_and_seeds_differ():
    first, again, other = (
        load_prompts("everyday", 20, 1),
        load_prompts("everyday", 20, 1),
        load_prompts("everyday", 20, 2),
    )
    assert first == again != other and len(first) == 20


def test_suites_expand():
    assert expand_tasks(["quick", "mt_bench", "gsm8k"]) == ["heldout", "mt_bench", "gsm8k"]


def test_public_without_a_network_says_what_to_do():
    with pytest.raises(InputError, match="EXITTRAIN_DATA"):
        load_prompts("gsm8k:public")


def test_a_set_with_an_unknown_key_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("name: x\nlicence: MIT\nfixtures: a\n")
    with pytest.raises(InputError, match="fixtures"):
        read_set(tmp_path / "x.yaml")
