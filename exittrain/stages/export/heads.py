"""`--to speculators`, `sglang`, `dflash`: an EAGLE-3 head or block drafter for vLLM, SGLang and z-lab's DFlash."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exittrain.drafters.base import Drafter
from exittrain.drafters.formats import HeadCheckpoint, read_head, write_head
from exittrain.drafters.formats.tensors import EMBEDDINGS
from exittrain.drafters.formats.write import dflash_config, sglang_config, stored_names, stored_tensors
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.load import load_drafter
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.stages.export.folder import write_object
from exittrain.stages.export.head_check import check_head, make_cases
from exittrain.stages.export.output import (
    Export,
    Identity,
    check_finite,
    check_output,
    chosen_dtype,
    new_folder,
    write_note,
)
from exittrain.stages.export.source import ExportSource, drafter_note

CARRIED = ("exittrain.json", "calibration.json", "LICENSE*", "NOTICE*")
_METHOD = {"eagle3": "eagle3", "block": "dflash"}  # what vLLM rightly guesses from a path that says so


def export_head(source: ExportSource, output: Path, form: str, dtype: str | None = None) -> Export:
    """Write `output` in that form, read it back, compare, and only then let it appear. dtype: None keeps the stored.

    Raises:
        InputError: the source is no whole head of that target, the form or its servers cannot carry it, `output` is
            taken, or a check failed; what was at `output` before is still there, and nothing else is.
    """
    target = TargetModel.from_pretrained(source.target_source, getattr(torch, source.target_dtype))
    checkpoint = read_head(source.folder, int(target.config.num_hidden_layers))
    stored = _stored_dtype(checkpoint, source.folder)
    rounded = chosen_dtype(dtype, stored)
    drafter = load_drafter(source.folder, target, stored)
    config = _config(drafter)
    own = EMBEDDINGS in dict(drafter.module.named_parameters())
    if own and checkpoint.embed_tokens is not None and checkpoint.embed_tokens.dtype != stored:
        raise InputError(
            f"{source.folder} holds embeddings of {checkpoint.embed_tokens.dtype} beside {stored}: save it again"
        )
    check_carried(form, config, own)
    check_output(output, source, _METHOD[config.kind], 4 * target.embeddings.weight.numel())
    kept = {EMBEDDINGS: checkpoint.embed_tokens} if own and checkpoint.embed_tokens is not None else {}
    check_finite((checkpoint.tensors | kept).items(), source.folder, rounded)
    before = drafter.fingerprint()
    cases = make_cases(drafter, config, target, source.windows(_longest(drafter, config, target)))
    tensors = {name: tensor.to(rounded) for name, tensor in checkpoint.tensors.items()}
    if (embeddings := _embeddings(form, config, checkpoint.embed_tokens if own else None, target)) is not None:
        tensors[EMBEDDINGS] = embeddings.to(rounded)
    with new_folder(output) as folder:
        _write(folder, form, config, tensors, checkpoint.draft_ids, target, source)
        reference = _reference(source.folder, target, rounded, EMBEDDINGS in tensors and not own)
        names = stored_names(form, tensors)
        checked = check_head(folder, config, tensors, checkpoint.draft_ids, names, reference, target, cases)
        after = load_drafter(folder, target, rounded).fingerprint()
        note = {**drafter_note(source.folder), "kind": config.kind}
        identity = Identity(stored, rounded, before, after)
        write_note(folder, source, form, note, identity, checked, left_out=list(checkpoint.extra))
    return Export(output, None if rounded == stored else str(rounded).removeprefix("torch."), checked, checkpoint.extra)


def check_carried(form: str, config: HeadConfig, own_embeddings: bool) -> None:
    """Raise InputError, naming the option and a form that can, where servers would leave a part of the head out."""
    if config.kind == "block" and form == "sglang":
        raise InputError("--to sglang is for EAGLE-3 heads: block drafters go --to dflash or --to speculators")
    if config.kind == "eagle3" and form == "dflash":
        raise InputError("--to dflash is for block drafters: EAGLE-3 heads go --to speculators or --to sglang")
    if form == "dflash" and config.draft_vocab_size < config.vocab_size:
        raise InputError("--to dflash has no place for a draft vocabulary: use --to speculators")
    if config.fc_bias:
        raise InputError(f"--to {form}: servers leave out fc.bias: train the head with fc_bias false")
    if config.hidden_act != "silu":
        raise InputError(f"--to {form}: servers compute silu in place of {config.hidden_act}: train the head with it")
    if form != "sglang":
        return
    refused = {
        "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc,
        "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias, "layers of style qwen3":
        config.style == "qwen3", "more than one layer": config.num_layers > 1,
        # Features as wide as an embedding are taken for the head's own states.
        "a single feature layer": config.feature_size == config.hidden_size,
        "embeddings of its own": own_embeddings and config.hidden_size == config.target_hidden_size,
    }  # fmt: skip
    if lost := [name for name, on in refused.items() if on]:
        raise InputError(f"--to sglang: SGLang would leave out {lost[0]} without a word: use --to speculators")


def _config(drafter: Drafter) -> HeadConfig:
    """As it is loaded: with the longer contexts of its target where its rotary positions allow them."""
    config = drafter.module.config
    assert isinstance(config, HeadConfig)
    return config


def _longest(drafter: Drafter, config: HeadConfig, target: TargetModel) -> int:
    """Positions of a compared text. Of longrope, contexts on both sides of the original length turn by other angles, so
    that a batch must lie on one."""
    rope, longest = config.rope_parameters, min(drafter.max_positions, target.max_positions)
    original = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return longest if original is None else min(longest, int(original))


def _embeddings(form: str, config: HeadConfig, own: Tensor | None, target: TargetModel) -> Tensor | None:
    """What is written as embeddings: the head's own, or for EAGLE-3 heads in speculators' form the target's.

    Servers share the target's where there are none, but that library then computes with memory as it finds it: it looks
    for NaN that a model which is built without memory never holds (0.9.0 on Transformers 5).
    """
    if own is not None or form != "speculators" or config.kind != "eagle3":
        return own
    theirs: Tensor = target.embeddings.weight.detach().cpu()
    return theirs


def _stored_dtype(checkpoint: HeadCheckpoint, folder: Path) -> torch.dtype:
    found = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in checkpoint.tensors.values()})
    if len(found) > 1:
        raise InputError(f"{folder} holds tensors of {', '.join(found)}: an export is of one of them, save it again")
    stored: torch.dtype = getattr(torch, found[0])
    return stored


def _write(
    folder: Path, form: str, config: HeadConfig, tensors: dict[str, Tensor], draft_ids: Tensor | None,
    target: TargetModel, source: ExportSource,
) -> None:  # fmt: skip
    if form == "speculators":
        write_head(folder, config, tensors, draft_ids, source.target_source, target.module.config.architectures or ())
    else:
        dtype = tensors["norm.weight"].dtype
        if form == "sglang":
            special = {name: getattr(target.config, name, None) for name in _SPECIAL}
            data: dict[str, Any] = sglang_config(config, dtype, special)
        else:
            data = dflash_config(config, dtype, int(target.config.num_hidden_layers))
        save_file(
            stored_tensors(form, config, tensors, draft_ids), folder / "model.safetensors", metadata={"format": "pt"}
        )
        write_object(folder / "config.json", data)
    for name in _carried(source.folder):
        shutil.copyfile(source.folder / name, folder / name)


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def _carried(folder: Path) -> Sequence[str]:
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in CARRIED)]


@torch.no_grad()
def _reference(folder: Path, target: TargetModel, rounded: torch.dtype, embeddings: bool) -> Drafter:
    """The source in float32, its weights rounded as the export's, the target's embeddings too where they are written.

    From here on the target's embeddings and output are in float32: what drafting takes of it beside features.
    """
    target.embeddings.float()
    target.output.float()
    if embeddings:
        target.embeddings.weight.copy_(target.embeddings.weight.to(rounded))
    drafter = load_drafter(folder, target, torch.float32)
    for parameter in drafter.module.parameters():
        parameter.copy_(parameter.to(rounded))
    return drafter
