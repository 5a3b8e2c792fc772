"""Exported heads that go wrong: each fault is found, said in one line, and nothing is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_exports import block, deep_target, eagle, saved_head
from head_folders import LLAMA3, edit_config, edit_tensors

from exittrain.drafters.formats.tensors import ids_of
from exittrain.errors import InputError
from exittrain.stages.export import heads
from exittrain.stages.export.head_check import TOLERANCE
from exittrain.stages.export.run import export_drafter
from exittrain.stages.export.source import ExportSource

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def original(target: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportSource:
    return saved_head(tmp_path_factory.mktemp("head") / "last", eagle(rope_parameters=LLAMA3), target)


@pytest.fixture
def source(original: ExportSource, tmp_path: Path) -> ExportSource:
    return replace(original, folder=Path(shutil.copytree(original.folder, tmp_path / "arm" / "last")))


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return lambda folder: edit_tensors(folder, edit)


def config(edit: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edit_config(folder, edit)


def rope(**changes: Any) -> Damage:
    """Both names, so that only the numbers are wrong."""

    def edit(data: dict[str, Any]) -> None:
        layer = data["transformer_layer_config"]
        for name in ("rope_parameters", "rope_scaling"):
            layer[name].update({key: value for key, value in changes.items() if key in layer[name]})

    return config(edit)


def truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])


def wrong(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda stored: stored.update({name: make(stored[name]).contiguous()}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tensors(lambda stored: stored.pop("norm.weight")), r"lacks norm\.weight"),
        (tensors(lambda stored: stored.update({"norm.wieght": stored.pop("norm.weight")})), r"lacks norm\.weight"),
        (tensors(lambda stored: stored.update({"more": torch.ones(2)})), "holds, beyond the source, more"),
        (wrong("norm.weight", lambda t: t[:31]), r"tensor norm\.weight \(\(31,\)\) is not the source's \(\(32,\)\)"),
        (wrong("norm.weight", lambda t: t * (1 + 1e-7)), r"tensor norm\.weight"),
        (wrong("fc.weight", lambda t: t.bfloat16()), r"tensor fc\.weight"),
        (wrong("embed_tokens.weight", lambda t: t.roll(1, 0)), r"tensor embed_tokens\.weight"),
        (wrong("d2t", ids_of), "d2t does not name the ids"),
        (wrong("d2t", lambda t: t.to(torch.int32)), "d2t does not name the ids"),
        (wrong("t2d", lambda t: t.roll(1)), "t2d does not name the ids"),
        (tensors(lambda stored: stored.pop("t2d")), "t2d does not name the ids"),
        (truncate, "cannot be read back"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (config(lambda data: data.pop("norm_before_residual")), "norm_before_residual is missing"),
        (config(lambda data: data.update(norm_output=True)), "reads norm_output True, the source's is False"),
        (config(lambda data: data.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4])), r"feature_layers \(1, 2, 4\)"),
        (config(lambda data: data["transformer_layer_config"].update(rms_norm_eps=0.1)), "rms_norm_eps 0.1"),
        (rope(factor=4.0), "reads rope_parameters"),
        (config(lambda data: data["transformer_layer_config"].update(rope_theta=3.0)), "contradict rope_theta"),
    ],
)
def test_what_goes_wrong_in_writing_is_found_and_nothing_kept(
    source: ExportSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, message: str
) -> None:
    written = heads._write

    def tampered(folder: Path, *rest: Any) -> None:
        written(folder, *rest)
        damage(folder)

    monkeypatch.setattr(heads, "_write", tampered)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=message) as caught:
        export_drafter(source, tmp_path / "new" / "out", "speculators")
    assert "\n" not in str(caught.value) and "nothing is kept" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("form", "head"), [("sglang", eagle()), ("dflash", block())])
def test_a_law_that_differs_is_found_whatever_the_files_say(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, head: Any
) -> None:
    """The reader's check alone: the drafter that is compared with has one weight moved by little."""
    made = heads._reference

    def moved(*arguments: Any) -> Any:
        drafter = made(*arguments)
        with torch.no_grad():
            drafter.module.layers[0].mlp.up_proj.weight[0, 0] += 0.01
        return drafter

    monkeypatch.setattr(heads, "_reference", moved)
    with pytest.raises(
        InputError, match=r"tokens its log-probabilities differ from the trained drafter's by \d"
    ) as found:
        export_drafter(saved_head(tmp_path / "head", head, target), tmp_path / "out", form)
    assert float(str(found.value).rpartition(" ")[2]) > TOLERANCE and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors is damaged or cut short"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is missing or cannot be read"),
        (tensors(lambda stored: stored.pop("norm.weight")), r"lacks 1 tensors .* first norm\.weight"),
        (wrong("norm.weight", lambda t: t[:31]), r"norm\.weight has shape \(31,\), its config asks for \(32,\)"),
        (config(lambda data: data.pop("norm_before_residual")), "norm_before_residual is missing"),
        (tensors(lambda stored: stored.update({"fc.bias": torch.ones(32)})), r"holds fc\.bias"),
        (tensors(lambda stored: stored.pop("lm_head.weight")), r"first lm_head\.weight"),
        (wrong("norm.weight", lambda t: t.bfloat16()), "holds tensors of bfloat16, float32"),
        (
            wrong("lm_head.weight", lambda t: t.index_fill(0, torch.tensor([7]), torch.inf)),
            "lm_head.weight holds NaN or",
        ),
        (tensors(lambda stored: stored.update({"lm_head.bias": torch.ones(100)})), r"holds lm_head\.bias"),
        (
            config(lambda data: data["transformer_layer_config"].update(vocab_size=300)),
            "t2d has 257 entries, its config asks for 300",
        ),
    ],
)
def test_a_damaged_source_is_refused_before_anything_is_written(
    source: ExportSource, tmp_path: Path, damage: Damage, message: str
) -> None:
    damage(source.folder)
    with pytest.raises(InputError, match=message) as caught:
        export_drafter(source, tmp_path / "out", "speculators")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_failed_export_leaves_the_earlier_one(
    source: ExportSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_drafter(source, tmp_path / "out", "speculators").folder
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(heads, "_write", lambda *_: None)
    with pytest.raises(InputError):
        export_drafter(source, folder, "speculators")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    monkeypatch.undo()
    assert export_drafter(source, folder, "sglang").folder == folder  # of the same drafter: replaced
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize(
    ("head", "name", "message"),
    [
        (eagle(), "an-eagle-head", "'eagle-' in it, from which vLLM guesses"),
        (eagle(), "my-DFlash", "'dflash' in it, from which vLLM guesses"),
        (block(), "my-eagle3", "'eagle3' in it, from which vLLM guesses"),
        (eagle(), "my-eagle3", None),
        (block(), "my-dflash", None),
    ],
)
def test_paths_that_vllm_misreads_are_refused(
    target: Path, tmp_path: Path, head: Any, name: str, message: str | None
) -> None:
    source = saved_head(tmp_path / "head", head, target)
    if message is None:
        assert export_drafter(source, tmp_path / name, "speculators").folder.is_dir()
        return
    with pytest.raises(InputError, match=message):
        export_drafter(source, tmp_path / name, "speculators")
    assert not (tmp_path / name).exists()


def test_what_lies_at_the_output_is_never_lost(source: ExportSource, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is no earlier export of"):
        export_drafter(source, taken, "speculators")
    for place in (source.folder, source.folder.parent, source.folder / "out"):
        with pytest.raises(InputError, match="is what is exported, or in it"):
            export_drafter(source, place, "speculators")
    assert (taken / "mine.txt").read_text() == "mine" and (source.folder / "config.json").is_file()


def test_a_link_at_the_output_is_followed(source: ExportSource, tmp_path: Path) -> None:
    real, link, loop = tmp_path / "real", tmp_path / "link", tmp_path / "loop"
    export_drafter(source, real, "speculators")
    link.symlink_to(real)
    for _ in range(2):
        export_drafter(source, link, "sglang")
    assert link.is_symlink() and "eagle_config" in json.loads((real / "config.json").read_text())
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="leads back to itself"):
        export_drafter(source, loop, "speculators")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arm", "link", "loop", "real"]


def test_numbers_that_outgrow_the_dtype_are_refused(source: ExportSource, tmp_path: Path) -> None:
    edit_tensors(source.folder, lambda stored: stored["lm_head.weight"][3].fill_(1e6))
    with pytest.raises(InputError, match=r"tensor lm_head\.weight outgrows float16: export with another --dtype"):
        export_drafter(source, tmp_path / "out", "speculators", "float16")
    assert not (tmp_path / "out").exists()


def test_an_export_whose_swap_was_cut_short_still_counts(source: ExportSource, target: Path, tmp_path: Path) -> None:
    """Killed between two renames, the earlier export waits beside its place: another drafter may not have it."""
    export_drafter(source, tmp_path / "out", "speculators")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(InputError, match="is no earlier export of"):
        export_drafter(saved_head(tmp_path / "other", eagle(), target), tmp_path / "out", "speculators")
    assert (tmp_path / ".out.old" / "config.json").is_file()
    assert export_drafter(source, tmp_path / "out", "sglang").folder.is_dir()
    assert not (tmp_path / ".out.old").exists()
