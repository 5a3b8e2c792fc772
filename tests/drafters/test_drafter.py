"""Drafters: layers of the target, saved and loaded; the decoding state; vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.decoding.loop import decode
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.layers import copy_layers
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.packed import PackedBatch, pack
from exittrain.models.sums import FILES
from exittrain.models.target import TargetModel
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree

IDS = torch.tensor([[3, 4, 5, 6, 7]])


def tokenizer(*swapped: int):
    words = [f"w{index}" for index in range(48)]
    if swapped:
        first, second = swapped
        words[first], words[second] = words[second], words[first]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0")


def tree_hidden(drafter: CausalDrafter, packed: PackedBatch) -> torch.Tensor:
    return drafter.model.hidden(packed.input_ids, packed.position_ids, packed.mask)


@pytest.fixture
def target():
    model = make_causal_lm(48, 32, 4, 2, 48, eos_token_ids=[2], tokenizer=tokenizer(), seed=1, name="tiny")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # sharp laws: mistakes show
    return TargetModel(model.module.requires_grad_(False), model.tokenizer, "tiny")


def test_all_layers_copied_are_the_target(target):
    drafter = load_drafter("layers:4", target)
    assert drafter.kind == "layers" and drafter.target_fingerprint == target.fingerprint()
    assert torch.equal(drafter.model.hidden(IDS), target.hidden(IDS))
    assert drafter.model.eos_token_ids == [2] and drafter.model.tokenizer is target.tokenizer


def test_named_layers_are_taken_in_order(target):
    theirs, ours = target.module.model.layers, load_drafter("layers:0,3", target).model.module.model.layers
    for new, old in enumerate((0, 3)):
        for mine, its in zip(ours[new].parameters(), theirs[old].parameters(), strict=True):
            assert torch.equal(mine, its) and mine.data_ptr() != its.data_ptr()


@pytest.mark.parametrize("share", [True, False])
def test_training_never_touches_the_target(target, share):
    before = target.fingerprint()
    drafter = copy_layers(target, 2, share_embeddings=share)
    shared = drafter.model.embeddings.weight.data_ptr() == target.embeddings.weight.data_ptr()
    assert shared == share and drafter.model.embeddings.weight.requires_grad != share
    optimizer = torch.optim.AdamW(drafter.trainable_parameters(), lr=0.1)
    drafter.head(drafter.model.hidden(IDS[:1])).logsumexp(-1).sum().backward()
    optimizer.step()
    drafter.model.module.to(torch.bfloat16)
    assert target.dtype == torch.float32
    target._fingerprint = None
    assert target.fingerprint() == before


@pytest.mark.parametrize("spec", ["layers:2", "layers:1,3", "scratch"])
def test_saved_and_loaded_is_bit_equal(target, tmp_path, spec):
    if spec == "scratch":
        drafter = CausalDrafter(make_causal_lm(48, 16, 1, 2, 32, tie_embeddings=False, tokenizer=tokenizer()))
    else:
        drafter = load_drafter(spec, target)
    with torch.no_grad():
        for parameter in drafter.trainable_parameters():
            parameter += 0.01
    folder = drafter.save(tmp_path / "drafter")
    drafter.save(folder)  # over an existing one
    again = load_drafter(folder, target)
    assert again.kind == drafter.kind
    assert torch.equal(again.head(again.model.hidden(IDS)), drafter.head(drafter.model.hidden(IDS)))
    assert again.fingerprint() == drafter.fingerprint()
    frozen = [name for name, p in drafter.model.module.named_parameters() if not p.requires_grad]
    assert frozen == [name for name, p in again.model.module.named_parameters() if not p.requires_grad]
    if spec != "scratch":  # memory is shared again
        assert again.model.embeddings.weight.data_ptr() == target.embeddings.weight.data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
    plain = TargetModel.from_pretrained(folder)  # any reader of Hugging Face folders
    assert torch.equal(plain.hidden(IDS), drafter.model.hidden(IDS)) and plain.tokenizer is not None


def test_a_failed_save_keeps_what_was_there(target, tmp_path, monkeypatch):
    drafter = load_drafter("layers:1", target)
    folder = drafter.save(tmp_path / "drafter")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(place):
        raise OSError("disk full")

    monkeypatch.setattr(drafter.model.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        drafter.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_training_dtype_may_differ_from_the_target(target, tmp_path):
    target.module.to(torch.bfloat16)
    drafter = load_drafter("layers:2", target, dtype=torch.float32)
    assert drafter.model.dtype == torch.float32
    again = load_drafter(drafter.save(tmp_path / "d"), target, dtype=torch.float32)
    assert torch.equal(again.model.hidden(IDS), drafter.model.hidden(IDS))


def test_scratch_is_its_seed_and_leaves_the_global_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (make_causal_lm(48, 16, 1, 2, 32, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    with pytest.raises(InputError, match="multiple of 2 x num_heads"):
        make_causal_lm(48, 18, 1, 4, 32)


@pytest.mark.parametrize("spec", ["layers:0", "layers:5", "layers:0,9", "layers:-1,2", "layers:two"])
def test_layers_that_are_not_there(target, spec):
    with pytest.raises(InputError, match="layers"):
        load_drafter(spec, target)


def test_equal_sizes_with_two_ids_swapped_are_refused(target, tmp_path):
    drafter = CausalDrafter(make_causal_lm(48, 16, 1, 2, 32, tokenizer=tokenizer(7, 9)))
    with pytest.raises(InputError, match=r"differ in 2 token ids \(7 is 'w9' and 'w7', 9 is 'w7' and 'w9'\)"):
        load_drafter(drafter.save(tmp_path / "swapped"), target)
    with pytest.raises(InputError, match="has 50 tokens, target tiny has 48"):
        load_drafter(CausalDrafter(make_causal_lm(50, 16, 1, 2, 32)).save(tmp_path / "larger"), target)
    load_drafter(CausalDrafter(make_causal_lm(48, 16, 1, 2, 32)).save(tmp_path / "mute"), target)


def test_a_note_of_another_schema_is_refused(target, tmp_path):
    folder = load_drafter("layers:1", target).save(tmp_path / "d")
    (folder / FILES).unlink()  # of another version, whose list would hold
    note = json.loads((folder / "exittrain.json").read_text())
    (folder / "exittrain.json").write_text(json.dumps({**note, "schema_version": 99}))
    with pytest.raises(InputError, match="another schema"):
        load_drafter(folder, target)
    (folder / "exittrain.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_drafter(folder, target)


def test_trained_rows_equal_look_ahead_rows(target):
    """What training computes at a node is what drafting computes there."""
    drafter = load_drafter("layers:2", target)
    sequences = [torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([9, 10, 11])]
    rows, anchors = torch.tensor([0, 1, 0]), torch.tensor([3, 2, 5])
    session = drafter.session(sequences, rows, anchors, Sampling(0.7))
    draft = get_builder("best_first")(session, TreeShape(budget=9, depth=4, width=4))
    packed = pack(sequences, draft.trees, rows, anchors)
    logprobs = process_logits(drafter.head(packed.gather(tree_hidden(drafter, packed))), Sampling(0.7))
    edges = logprobs.gather(1, draft.trees.parent_index()[..., None].expand_as(logprobs)).gather(
        2, draft.trees.token_ids[..., None]
    )[..., 0]
    drafted = draft.trees.valid & (draft.trees.depths > 0)
    torch.testing.assert_close(edges[drafted], draft.trees.draft_logprobs[drafted], atol=1e-4, rtol=1e-4)


def test_greedy_serving_ranks_by_probabilities(target):
    root = load_drafter("layers:1", target).session([IDS[0]], torch.tensor([0]), torch.tensor([2]), Sampling(0)).root()
    assert torch.isfinite(root).all()


def test_decoding_state_equals_one_from_nothing(target):
    """After advancing along different paths, an unexpanded leaf included, the state equals a fresh one."""
    drafter = load_drafter("layers:2", target)
    state = drafter.start([torch.tensor([3, 4, 5]), torch.tensor([6])])
    session = state.session(Sampling())
    valid = torch.ones(2, 2, dtype=torch.bool)
    session.expand(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[10, 11], [12, 13]]), valid)
    session.expand(torch.tensor([[2, 1], [1, 1]]), torch.tensor([[14, 15], [16, 17]]), valid)
    # Row 0 accepts 11, 14 and a leaf never expanded; row 1 nothing.
    state.advance([[2, 3, -1], []], [[11, 14, 20, 21], [22]])
    assert state.lengths.tolist() == [5, 1]
    contexts = [[3, 4, 5, 11, 14, 20, 21], [6, 22]]
    for rows in (torch.tensor([0, 1]), torch.tensor([1])):
        state.select_rows(rows)
        fresh = drafter.start([torch.tensor(contexts[row]) for row in rows.tolist()])
        ours, theirs = state.session(Sampling()), fresh.session(Sampling())
        torch.testing.assert_close(ours.root().exp(), theirs.root().exp(), atol=1e-5, rtol=0)
        wave = (torch.zeros(len(rows), 1, dtype=torch.int64), torch.full((len(rows), 1), 30), valid[: len(rows), :1])
        torch.testing.assert_close(ours.expand(*wave).exp(), theirs.expand(*wave).exp(), atol=1e-5, rtol=0)


def test_paddings_of_different_size_are_aligned_and_never_drafted(target, tmp_path):
    """The tokenizer has 48 tokens; one vocabulary is padded to 56, the other to 64 (cases.md 23)."""
    padded = make_causal_lm(64, 32, 2, 2, 48, eos_token_ids=[2], tokenizer=tokenizer(), seed=1, name="padded")
    wide = TargetModel(padded.module.requires_grad_(False), padded.tokenizer, "padded")
    own = make_causal_lm(56, 16, 1, 2, 32, tokenizer=tokenizer(), name="draft")
    with torch.no_grad():
        own.embeddings.weight[48:] = 30.0 * own.embeddings.weight[:48].mean(0)  # would be the likeliest, if it counted
    drafter = load_drafter(CausalDrafter(own).save(tmp_path / "drafter"), wide)
    assert drafter.vocab_size == 64 and drafter.draft_ids.tolist() == list(range(48))
    logprobs = drafter.session([IDS[0]], torch.tensor([0]), torch.tensor([3]), Sampling()).root()
    assert logprobs.shape == (1, 64) and (logprobs[0, 48:] == -torch.inf).all()
    torch.testing.assert_close(logprobs.exp().sum(), torch.tensor(1.0))
    answer = decode(wide, drafter, IDS[0], temperature=0, max_new_tokens=12, eos_token_ids=[])
    assert answer.token_ids == decode(wide, None, IDS[0], temperature=0, max_new_tokens=12, eos_token_ids=[]).token_ids
    layers = load_drafter("layers:1", wide)
    assert len(layers.draft_ids) == 48 and layers.head(torch.zeros(1, 32)).shape == (1, 48)
    short = make_causal_lm(40, 16, 1, 2, 32, tokenizer=tokenizer(), name="short")
    with pytest.raises(InputError, match="has 40 columns for the 48 tokens"):
        load_drafter(CausalDrafter(short).save(tmp_path / "short"), wide)


def test_a_target_of_full_layers_drafts_what_it_scores(target):
    drafter = load_drafter("layers:4", target)
    tree = DraftTree([5, 6, 7], [-1, 0, 1])
    packed = pack([IDS[0]], TreeBatch.from_trees([tree]), torch.tensor([0]), torch.tensor([2]))
    ours = drafter.head(packed.gather(tree_hidden(drafter, packed)))[0].log_softmax(-1)
    torch.testing.assert_close(ours, target.score_trees(IDS[0], [2], [tree])[0], atol=1e-5, rtol=1e-5)


def test_saved_files_are_as_readable_as_any_other(target: TargetModel, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    folder = load_drafter("layers:1", target).save(tmp_path / "drafter")
    assert {file.stat().st_mode for file in folder.iterdir()} == {plain.stat().st_mode}
