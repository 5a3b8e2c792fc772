"""EAGLE heads and block drafters made from nothing, for the target and the training data of a run."""

from __future__ import annotations

import torch
from torch import Tensor

from exittrain.config.schema import DrafterSection
from exittrain.drafters.base import Dials, Drafter
from exittrain.drafters.block.fresh import make_block
from exittrain.drafters.eagle.fresh import make_eagle
from exittrain.drafters.vocabulary import choose_draft_ids, covered_share, real_size
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.stages.context import say
from exittrain.stages.sizes import new_head
from exittrain.stages.training.sequences import SequenceSet


def make_head(section: DrafterSection, target: TargetModel, sequences: SequenceSet, seed: int) -> Drafter:
    """The head that the recipe describes. A pruned draft vocabulary is the most frequent tokens of the training
    responses; how much of those it covers is printed before anything is trained.

    Raises:
        InputError: sizes that contradict each other or the target.
    """
    counts = token_counts(sequences, target.vocab_size)
    config = new_head(section, target.config, unused_id(target, counts))
    draft_ids = None
    if config.draft_vocab_size < target.vocab_size:
        if config.draft_vocab_size <= len(target.eos_token_ids):
            raise InputError(
                f"'drafter.draft_vocab' {config.draft_vocab_size} has no room beside the ends of a response"
            )
        draft_ids = choose_draft_ids(counts, config.draft_vocab_size, target.eos_token_ids)
        share, seen = covered_share(counts, draft_ids), int((counts > 0).sum())
        say(
            f"draft vocabulary: {len(draft_ids)} of {target.vocab_size} tokens, {share:.2%} of the trained text "
            f"({seen} different tokens occur in it)"
        )
    if section.kind == "eagle3":
        return make_eagle(target, config, draft_ids, seed)
    return make_block(target, config, draft_ids, seed)


def token_counts(sequences: SequenceSet, vocab_size: int) -> Tensor:
    """[V] how often each token is trained."""
    pairs = zip(sequences.tokens, sequences.trained, strict=True)
    return torch.bincount(torch.cat([tokens[trained] for tokens, trained in pairs]), minlength=vocab_size)


def unused_id(target: TargetModel, counts: Tensor) -> int:
    """An id for a block's masks: the tokenizer's mask token, the first of the vocabulary's padding, or (a target whose
    ids are all in use) the last of those that are trained least, no end of a response."""
    mask = getattr(target.tokenizer, "mask_token_id", None)
    if mask is not None:
        return int(mask)
    if target.tokenizer is not None and real_size(target.tokenizer) < target.vocab_size:
        return real_size(target.tokenizer)
    free = counts.clone()
    free[target.eos_token_ids] = counts.max() + 1
    return int((free == free.min()).nonzero()[-1])


def dials_of(section: DrafterSection) -> Dials:
    """How the recipe has heads trained."""
    return Dials(section.unroll_steps, section.unroll_decay, section.block_anchors, section.block_decay)
