"""What a block drafter computes: the same in training, in sessions and in decoding, and what DFlash's own code does."""

from __future__ import annotations

import pytest
import torch
from tiny_block import IDS, PARTS, blocks_of, plain_block, tiny_block, training_inputs, with_anchors
from tiny_eagle import random_ids, tiny_target

from exittrain.drafters.block.blocks import block_states
from exittrain.law.sampling import Sampling

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def plain_logprobs(drafter, sequence, anchor, place):
    """[V] log-probabilities of the token at anchor + place."""
    full = torch.full((drafter.vocab_size,), -torch.inf)
    ids = torch.arange(drafter.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    full[ids] = plain_block(drafter, sequence, anchor)[place - 1].detach().log_softmax(-1)
    return full


@pytest.mark.parametrize("parts", PARTS)
def test_training_computes_what_one_block_alone_gives(parts):
    drafter = with_anchors(tiny_block(**parts), 4)
    sequences = random_ids(11, 3, 7)
    layout = drafter.lay_out(training_inputs(drafter, sequences))
    with torch.no_grad():
        logits = drafter.head(drafter.states(layout)[0])
        plain = torch.stack([
            plain_block(drafter, sequences[row], anchor)[place - 1]
            for row, anchor, place in blocks_of(layout, 5, layout.inputs.token_places)
        ])  # fmt: skip
    assert len(logits) >= 30 and logits.std() > 0.5  # many rows, and they differ
    torch.testing.assert_close(logits, plain, **CLOSE)


@pytest.mark.parametrize("parts", PARTS)
def test_drafting_computes_what_training_does(parts):
    """Row 64: place k of a session and of decoding, anchor 0 (no context at all) among them."""
    drafter, sequences = tiny_block(**parts), random_ids(11, 3, 7)
    rows, anchors = [0, 1, 2, 0, 1], [10, 0, 4, 3, 2]
    session = drafter.session(sequences, torch.tensor(rows), torch.tensor(anchors), Sampling())
    prefixes = [sequences[row][: anchor + 1] for row, anchor in zip(rows, anchors, strict=True)]
    features = [drafter.target.states((1, 3)).of(prefix)[1][:-1] for prefix in prefixes]
    state = drafter.start(prefixes, torch.nn.utils.rnn.pad_sequence(features, batch_first=True))
    assert session.root_tokens.tolist() == [int(prefix[-1]) for prefix in prefixes]
    for drafted in (places(session), places(state.session(Sampling()))):
        for row, prefix in enumerate(prefixes):
            for place in range(1, 5):
                expected = plain_logprobs(drafter, prefix, len(prefix) - 1, place)
                torch.testing.assert_close(drafted[place - 1][row], expected, **CLOSE)


def places(session):
    """[P][R, V]: the marginals of all places, by expanding a chain."""
    marginals, ones = [session.root()], torch.ones((len(session.root_tokens), 1), dtype=torch.int64)
    for depth in range(3):
        marginals.append(session.expand(ones * depth, ones, ones.bool())[:, 0])
    return marginals


def test_a_session_knows_depths_not_tokens():
    drafter = tiny_block()
    session = drafter.session(random_ids(6), torch.tensor([0, 0]), torch.tensor([2, 5]), Sampling(0.7))
    first = session.expand(torch.zeros(2, 2).long(), torch.tensor([[3, 4], [5, 6]]), torch.ones(2, 2).bool())
    assert torch.equal(first[:, 0], first[:, 1])
    # Slots 1 (depth 1) and 0 in one wave: nodes of depth 2 and 1; the second of row 1 is padding.
    valid = torch.tensor([[True, True], [True, False]])
    mixed = session.expand(torch.tensor([[1, 0], [0, 1]]), torch.tensor([[7, 8], [9, 0]]), valid)
    assert torch.equal(mixed[0, 1], first[0, 0]) and torch.equal(mixed[1, 0], first[1, 0])
    assert not torch.allclose(mixed[0, 0], first[0, 0])


def test_tokens_at_and_after_the_anchor_are_no_context():
    """Only the root's token enters a block: other tokens from there on, and neighbours, change nothing."""
    drafter = tiny_block()
    one, other = random_ids(9, 12)
    changed = torch.cat([one[:5], other[5:9]])
    changed[4] = one[4]
    ours = drafter.session([one], torch.tensor([0]), torch.tensor([4]), Sampling()).root()
    theirs = drafter.session([other, changed], torch.tensor([1, 0]), torch.tensor([4, 11]), Sampling()).root()
    torch.testing.assert_close(ours[0], theirs[0], **CLOSE)


def test_greedy_serving_ranks_by_probabilities():
    drafter, (prompt,) = tiny_block(), random_ids(6)
    state = drafter.start([prompt], drafter.target.states((1, 3)).of(prompt)[1][None, :-1])
    plain = drafter.session([prompt], torch.tensor([0]), torch.tensor([5]), Sampling()).root()
    greedy = drafter.session([prompt], torch.tensor([0]), torch.tensor([5]), Sampling(0)).root()
    assert plain.isfinite().all() and torch.equal(plain, greedy)
    torch.testing.assert_close(state.session(Sampling(0)).root(), plain, **CLOSE)


def test_features_of_another_dtype_enter_in_the_drafters():
    drafter = tiny_block(tiny_target())
    drafter.target.module.to(torch.bfloat16)
    drafter.target._states.clear()
    session = drafter.session(random_ids(6), torch.tensor([0]), torch.tensor([4]), Sampling())
    assert drafter.dtype == torch.float32 and session.root().dtype == torch.float32


def test_the_numbers_are_those_of_speculators_dflash():
    """Its own layers, masks and packed documents; the head that it would serve."""
    models = pytest.importorskip("speculators.models.dflash", exc_type=ImportError)
    from transformers import Qwen3Config

    drafter, sequences = tiny_block(draft_ids=IDS, num_layers=2), random_ids(9, 6)
    config = drafter.network.config
    layer: dict = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": config.intermediate_size, "num_hidden_layers": 2,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": 128,
        "rope_parameters": dict(config.rope_parameters),
    }  # fmt: skip
    theirs = models.DFlashDraftModel(
        models.DFlashSpeculatorConfig(
            transformer_layer_config=Qwen3Config(**layer, attn_implementation="eager"), draft_vocab_size=len(IDS),
            block_size=5, aux_hidden_state_layer_ids=[1, 3], mask_token_id=config.mask_token_id,
        )
    )  # fmt: skip
    loose = theirs.load_state_dict(drafter.network.state_dict(), strict=False)
    assert not loose.unexpected_keys and all(
        "verifier" in n or n in ("d2t", "t2d", "embed_tokens.weight") for n in loose.missing_keys
    )
    theirs.embed_tokens.weight.data.copy_(drafter.target.embeddings.weight)
    features = [drafter.target.states((1, 3)).of(sequence)[1] for sequence in sequences]
    lengths, width = torch.tensor([9, 6]), 15
    with torch.no_grad():
        _, logits, _, _, indices = theirs._backbone_forward(
            torch.cat(features)[None], torch.cat(sequences)[None], torch.ones(1, width), torch.randn(1, width, 32),
            torch.arange(2).repeat_interleave(lengths)[None],
            torch.cat([torch.arange(length) for length in lengths])[None], max_anchors=8,
        )  # fmt: skip
        starts = indices[::5]  # packed; sequence 1 begins at 9
        rows = (starts >= 9).long()
        anchors = starts - 9 * rows
        padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        context = drafter.network.context(padded, torch.arange(9).expand(2, 9))
        ours = drafter.head(
            block_states(
                drafter.network, drafter.target.embeddings.weight, context, rows, anchors, torch.cat(sequences)[starts]
            )
        )
    assert len(rows.unique()) == 2
    torch.testing.assert_close(ours, logits.view(8, 5, -1), **CLOSE)
