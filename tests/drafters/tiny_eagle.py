"""A tiny target with sharp laws and EAGLE heads on it whose every part matters, so that a wrong row or mask shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exittrain.drafters.base import Dials, TrainingInputs
from exittrain.drafters.eagle.drafter import EagleDrafter
from exittrain.drafters.eagle.fresh import make_eagle
from exittrain.drafters.head_config import HeadConfig, config_like
from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree

VOCAB = 48
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc bias": {"fc_bias": True},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "norm_before_residual": True},
    "fc norm": {"fc_norm": True},
    "norm output": {"norm_output": True},
    "biases": {"attention_bias": True, "num_kv_heads": 1},
}


def tiny_target(vocab_size: int = VOCAB, seed: int = 1, scale: float = 8.0) -> TargetModel:
    model = make_causal_lm(vocab_size, 32, 4, 2, 48, tie_embeddings=False, max_positions=128, seed=seed)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    return TargetModel(model.module.requires_grad_(False), name="tiny")


def head_config(target: TargetModel, size: int | None = None, **changes: Any) -> HeadConfig:
    return config_like(target.config, "eagle3", (1, 2, 3), target.vocab_size if size is None else size, **changes)


def tiny_head(
    target: TargetModel, draft_ids: Sequence[int] | None = None, seed: int = 0, **changes: Any
) -> EagleDrafter:
    """A head with no parameter at a value that hides a mistake: sharp matrices, uneven norms, biases that are not 0."""
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    drafter = make_eagle(target, head_config(target, None if ids is None else len(ids), **changes), ids, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (0.2 if "fc" not in name else 0.05))
            else:
                parameter.copy_(0.3 * noise + (0 if "bias" in name else 1))
    return drafter


def random_ids(*lengths: int, vocab_size: int = VOCAB, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def training_inputs(
    target: TargetModel,
    drafter: EagleDrafter,
    sequences: list[Tensor],
    trained: list[Tensor] | None = None,
    **trees: Any,
) -> TrainingInputs:
    """trained: by default every token."""
    masks = [torch.ones(len(s), dtype=torch.bool) for s in sequences] if trained is None else trained
    features = target.states(drafter.feature_layers).batch(sequences)[1]
    return TrainingInputs(sequences, masks, features, **trees)


def all_nodes(trees: list[DraftTree], rows: list[int], anchors: list[int]) -> dict[str, Any]:
    """Trees as fields of TrainingInputs, every node wanted."""
    batch = TreeBatch.from_trees(trees)
    places = batch.valid.flatten().nonzero().flatten()
    return {"trees": batch, "tree_sequence": torch.tensor(rows), "anchors": torch.tensor(anchors), "places": places}


def random_trees(sequences: list[Tensor], rows: list[int], anchors: list[int], seed: int = 5) -> list[DraftTree]:
    """Trees of 1 to 9 drafted nodes, each node under a random earlier one."""
    generator = torch.Generator().manual_seed(seed)
    trees = []
    for row, anchor in zip(rows, anchors, strict=True):
        count = int(torch.randint(1, 10, (), generator=generator))
        tokens = [int(sequences[row][anchor]), *torch.randperm(VOCAB, generator=generator)[:count].tolist()]
        parents = [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, count + 1))]
        trees.append(DraftTree(tokens, parents))
    return trees


def unrolled(drafter: EagleDrafter, steps: int, decay: float = 0.8) -> EagleDrafter:
    drafter.dials = Dials(unroll_steps=steps, unroll_decay=decay)
    return drafter
