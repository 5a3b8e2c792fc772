"""Windows of plain text for testbeds."""

from __future__ import annotations

import pytest

from exittrain.errors import InputError
from exittrain.stages.conversations.text import read_text, text_files, text_windows


def test_stdlib_is_there_and_a_tenth_is_held_out():
    train, held = text_files("stdlib")
    assert not set(train) & set(held) and 0.05 < len(held) / (len(train) + len(held)) < 0.15
    assert text_files("stdlib") == (train, held)


def test_side_of_a_file_depends_on_its_path_only(tmp_path):
    for i in range(30):
        (tmp_path / f"f{i}.txt").write_text("x" * (i + 1))
    before = text_files(str(tmp_path))
    (tmp_path / "new.txt").write_text("y")
    after = text_files(str(tmp_path))
    assert set(before[0]) <= set(after[0]) and set(before[1]) <= set(after[1])


def test_windows_have_one_length_no_twins_and_a_seeded_choice(tmp_path, tokenizers):
    for i in range(3):
        (tmp_path / f"f{i}.py").write_text("licence " * 8 + f"body {i} " * 50)
    (tmp_path / "odd.py").write_bytes(b"\xff\xfe" + b"ok " * 40)
    files = sorted(tmp_path.iterdir())
    assert "\ufffd" in read_text(files[-1])
    windows = text_windows(tokenizers["chatml"], files, 16, None, 0)
    assert all(len(ids) == 16 for _, ids in windows) and len({tuple(ids) for _, ids in windows}) == len(windows)
    assert len({name for name, _ in windows}) == len(windows)
    some = text_windows(tokenizers["chatml"], files, 16, 5, 1)
    assert len(some) == 5 and some == text_windows(tokenizers["chatml"], files, 16, 5, 1)


def test_unusable_corpora(tmp_path):
    for corpus in (str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(InputError, match="corpus"):
            text_files(corpus)
