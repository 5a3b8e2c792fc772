"""`load_drafter` of head folders: every form becomes the same drafter, bound to its target or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import (
    LLAMA3,
    block_config,
    eagle_config,
    edit_config,
    edit_tensors,
    make_head,
    random_ids,
    random_tensors,
    write_form,
)
from safetensors.torch import load_file
from torch import Tensor

from exittrain.drafters.base import Drafter
from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel

TEXT = torch.randint(64, (20,), generator=torch.Generator().manual_seed(7))


def make_target(vocab: int = 64, hidden: int = 32, layers: int = 6, tokenizer: Any = None) -> TargetModel:
    model = make_causal_lm(vocab, hidden, layers, 2, 48, tie_embeddings=False, max_positions=512, tokenizer=tokenizer)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return TargetModel(model.module.requires_grad_(False), tokenizer, "tiny")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return make_target()


def laws(drafter: Drafter, places: int = 3) -> Tensor:
    """[2, K, V] at two contexts of TEXT, and after each of the tokens that follow."""
    anchors = torch.tensor([6, 15])
    session = drafter.session([TEXT], torch.tensor([0, 0]), anchors, Sampling())
    out = [session.root()]
    for slot in range(places - 1):
        tokens = TEXT[anchors + 1 + slot][:, None]
        parents = torch.full_like(tokens, slot)
        out.append(session.expand(parents, tokens, torch.ones_like(tokens, dtype=torch.bool))[:, 0])
    return torch.stack(out, dim=1)


@pytest.mark.parametrize(
    ("config", "other"), [(eagle_config(), "sglang"), (block_config(), "dflash")], ids=["eagle3", "block"]
)
def test_one_head_in_two_forms_is_one_drafter(
    target: TargetModel, tmp_path: Path, config: HeadConfig, other: str
) -> None:
    drafters = [load_drafter(make_head(tmp_path / form, form, config), target) for form in ("speculators", other)]
    assert [d.kind for d in drafters] == [config.kind] * 2 and [d.name for d in drafters] == ["speculators", other]
    assert drafters[0].fingerprint() == drafters[1].fingerprint()
    assert torch.equal(laws(drafters[0]), laws(drafters[1]))
    tensors = random_tensors(config)
    assert str(drafters[0].match) == f"{len(tensors)} tensors matched, none missing, none extra"
    own = dict(drafters[0].module.named_parameters())
    assert own.keys() == tensors.keys() and all(torch.equal(own[name], tensors[name]) for name in tensors)
    ids = random_ids(config)
    assert (ids is None and drafters[0].draft_ids is None) or torch.equal(drafters[0].draft_ids, ids)


@pytest.mark.parametrize(
    "config", [eagle_config(style="qwen3", norm_before_fc=True), block_config(draft_vocab_size=24)]
)
def test_saved_and_loaded_is_bit_equal(target: TargetModel, tmp_path: Path, config: HeadConfig) -> None:
    drafter = load_drafter(make_head(tmp_path / "made", config=config), target)
    with torch.no_grad():
        for parameter in drafter.trainable_parameters():
            parameter += 0.01
    again = load_drafter(drafter.save(tmp_path / "saved"), target)
    assert again.fingerprint() == drafter.fingerprint() and torch.equal(laws(again), laws(drafter))
    assert (tmp_path / "saved" / "exittrain.json").is_file() and again.kind == config.kind


def test_extra_tensors_are_counted_and_named(target: TargetModel, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head")
    edit_tensors(folder, lambda tensors: tensors.update({"verifier_norm.weight": torch.ones(32)}))
    match = load_drafter(folder, target).match
    assert match is not None and match.extra == ("verifier_norm.weight",) and match.matched == 13


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_targets_own_embeddings_are_shared(target: TargetModel, tmp_path: Path, stored: torch.dtype) -> None:
    folder = make_head(tmp_path / "head")
    copied = target.embeddings.weight.detach().to(stored)
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": copied}))
    drafter = load_drafter(folder, target)
    assert "embed_tokens.weight" not in dict(drafter.module.named_parameters())
    bare = load_drafter(make_head(tmp_path / "bare"), target)
    assert torch.equal(laws(drafter), laws(bare)) and drafter.fingerprint() == bare.fingerprint()


def test_embeddings_of_a_target_in_more_bits_are_still_its_own(tmp_path: Path) -> None:
    """A head exported beside the target in float32 goes on beside the same target in bfloat16."""
    exact = make_target()
    folder = make_head(tmp_path / "head")
    copied = exact.embeddings.weight.detach().clone()
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": copied}))
    half = TargetModel(make_target().module.to(torch.bfloat16), None, "tiny")
    drafter = load_drafter(folder, half, torch.float32)
    assert "embed_tokens.weight" not in dict(drafter.module.named_parameters())


def test_other_embeddings_are_kept_and_frozen(target: TargetModel, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head")
    other = target.embeddings.weight.detach() + 0.1
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": other}))
    drafter = load_drafter(folder, target)
    assert drafter.frozen_names() == ("embed_tokens.weight",)
    assert not torch.equal(laws(drafter), laws(load_drafter(make_head(tmp_path / "bare"), target)))
    saved = drafter.save(tmp_path / "saved")
    assert torch.equal(load_file(saved / "model.safetensors")["embed_tokens.weight"], other)
    again = load_drafter(saved, target)
    assert again.frozen_names() == ("embed_tokens.weight",) and torch.equal(laws(again), laws(drafter))


def test_a_head_of_another_width_needs_embeddings_of_its_own(target: TargetModel, tmp_path: Path) -> None:
    config = eagle_config(hidden_size=16, intermediate_size=24)
    folder = make_head(tmp_path / "head", config=config)
    with pytest.raises(InputError, match=r"is 16 wide, unlike its target, and has no embed_tokens\.weight"):
        load_drafter(folder, target)
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.randn(64, 16)}))
    assert laws(load_drafter(folder, target)).shape == (2, 3, 64)


@pytest.mark.parametrize("note", ['{"schema_version": 1, "frozen": 5}', "5"])
def test_a_note_that_cannot_be_used_is_refused(target: TargetModel, tmp_path: Path, note: str) -> None:
    folder = make_head(tmp_path / "head")
    (folder / "exittrain.json").write_text(note)
    with pytest.raises(InputError, match=r"exittrain\.json has"):
        load_drafter(folder, target)


def test_half_precision_leaves_the_rotary_frequencies_alone(target: TargetModel, tmp_path: Path) -> None:
    drafter = load_drafter(make_head(tmp_path / "head"), target, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in drafter.module.parameters()} == {torch.bfloat16}
    exact = load_drafter(tmp_path / "head", target)
    ours, theirs = (dict(d.module.named_buffers()) for d in (drafter, exact))
    assert ours.keys() == theirs.keys() and ours and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_the_note_calls_frozen_stays_so(target: TargetModel, tmp_path: Path) -> None:
    drafter = load_drafter(make_head(tmp_path / "head"), target)
    drafter.module.lm_head.weight.requires_grad_(False)
    assert load_drafter(drafter.save(tmp_path / "saved"), target).frozen_names() == ("lm_head.weight",)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [({"rope_type": "default", "rope_theta": 1e4}, 512), (LLAMA3, 512),
     ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 100)],
)  # fmt: skip
def test_a_head_made_for_short_contexts_serves_its_targets(
    target: TargetModel, tmp_path: Path, rope: dict[str, Any], longest: int
) -> None:
    """Where a key's rotation depends on its position alone; others keep the length they were made for."""
    folder = make_head(tmp_path / "head", config=eagle_config(max_positions=100, rope_parameters=rope))
    assert load_drafter(folder, target).max_positions == longest


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make_target(vocab=65), "has 64 tokens, target tiny has 65"),
        (lambda: make_target(hidden=48), "reads features of size 32, those of tiny are 48"),
        (lambda: make_target(layers=4), "feature layer 5 asked of tiny: hidden states 1 to 3"),
    ],
)
def test_another_target_is_refused(tmp_path: Path, other: Callable[[], TargetModel], message: str) -> None:
    for name, config in (("eagle", eagle_config()), ("block", block_config())):
        with pytest.raises(InputError, match=message) as caught:
            load_drafter(make_head(tmp_path / name, config=config), other())
        assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def words(*first: str) -> PreTrainedTokenizerFast:
        every = [*first, *(f"w{index}" for index in range(len(first), 64))]
        vocab = {word: index for index, word in enumerate(every)}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w9")))

    folder = load_drafter(make_head(tmp_path / "head"), make_target(tokenizer=words())).save(tmp_path / "saved")
    with pytest.raises(InputError, match=r"differ in 2 token ids \(0 is 'w0' and 'w1'"):
        load_drafter(folder, make_target(tokenizer=words("w1", "w0")))


def test_feature_layers_left_to_the_target_are_its_default(target: TargetModel, tmp_path: Path) -> None:
    """Six layers: hidden states 2, 3 and 3 would read one layer twice, twelve give 2, 6, 9."""
    folder = make_head(tmp_path / "head", "sglang")
    edit_config(folder, lambda data: data.pop("eagle_config"))
    assert load_drafter(folder, make_target(layers=12)).feature_layers == (2, 6, 9)
    with pytest.raises(InputError, match=r"feature layers \[2, 3, 3\]: name at least one, each once"):
        load_drafter(folder, target)


def test_half_precision_heads_load_into_a_float32_target(target: TargetModel, tmp_path: Path) -> None:
    config = eagle_config()
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(config).items()}
    folder = write_form(tmp_path / "head", "speculators", config, tensors, random_ids(config))
    drafter = load_drafter(folder, target)
    own = dict(drafter.module.named_parameters())
    assert all(torch.equal(own[name], tensor.float()) for name, tensor in tensors.items())


def test_a_hub_id_of_a_head_is_fetched_and_read(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked for config.json first, and for the weights only where that is a head's."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder, asked = make_head(tmp_path / "head", "dflash", block_config()), []

    def download(source: str, file: str) -> str:
        asked.append((source, file))
        if source != "some/head":
            raise LocalEntryNotFoundError("no way to the hub")
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda source, **kwargs: str(folder))
    assert load_drafter("some/head", target).fingerprint() == load_drafter(folder, target).fingerprint()
    assert asked == [("some/head", "config.json")]
    with pytest.raises(InputError, match="other/model"):
        load_drafter("other/model", target)
