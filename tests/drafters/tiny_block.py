"""Block drafters on a tiny target whose every part matters, and one block at a time by plain arithmetic as a reference.

The reference has neither mask nor cache: keys are those of [context ; block], as z-lab and speculators describe DFlash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_eagle import tiny_target
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.drafters.base import Dials, Layout, TrainingInputs
from exittrain.drafters.block.drafter import BlockDrafter
from exittrain.drafters.block.fresh import make_block
from exittrain.drafters.head_config import HeadConfig, config_like
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.tree.batch import TreeBatch

IDS = [0, 3, 4, 9, 17, 40, 46]
PARTS: list[dict[str, Any]] = [
    {},
    {"draft_ids": IDS, "num_layers": 2},
    {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "attention_bias": True},
]


def block_config(target: TargetModel, size: int | None = None, **changes: Any) -> HeadConfig:
    values = {"block_size": 5, "mask_token_id": target.vocab_size - 1, **changes}
    return config_like(target.config, "block", (1, 3), target.vocab_size if size is None else size, **values)


def tiny_block(
    target: TargetModel | None = None, draft_ids: Sequence[int] | None = None, seed: int = 0, **changes: Any
) -> BlockDrafter:
    """A drafter with no parameter at a value that hides a mistake: sharp matrices, uneven norms, biases not 0."""
    target = tiny_target() if target is None else target
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    drafter = make_block(target, block_config(target, None if ids is None else len(ids), **changes), ids, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.3 * noise)
    return drafter


def plain_block(drafter: BlockDrafter, sequence: Tensor, anchor: int) -> Tensor:
    """[B - 1, D] logits of the places 1..B-1 of the block at one anchor; differentiable."""
    config, weights = drafter.network.config, dict(drafter.network.named_parameters())
    features = drafter.target.states(drafter.feature_layers).of(sequence)[1][:anchor]

    def norm(states: Tensor, name: str) -> Tensor:
        return (
            states / (states.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]
        )

    def linear(states: Tensor, name: str) -> Tensor:
        out = states @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    context = norm(linear(features, "fc"), "hidden_norm")
    masks = [config.mask_token_id] * (config.block_size - 1)
    states = drafter.target.embeddings.weight[torch.tensor([int(sequence[anchor]), *masks])]
    positions = torch.arange(anchor + config.block_size)
    for index in range(config.num_layers):
        name = f"layers.{index}"
        inputs = norm(states, f"{name}.input_layernorm")
        keyed = torch.cat([context, inputs])

        def heads(states: Tensor, part: str, name: str = name) -> Tensor:
            return linear(states, f"{name}.self_attn.{part}").view(len(states), -1, config.head_dim)

        queries = norm(heads(inputs, "q_proj"), f"{name}.self_attn.q_norm")
        keys = norm(heads(keyed, "k_proj"), f"{name}.self_attn.k_norm")
        queries, keys = turned(queries, positions[anchor:], config), turned(keys, positions, config)
        shared = config.num_heads // config.num_kv_heads
        keys, values = (part.repeat_interleave(shared, dim=1) for part in (keys, heads(keyed, "v_proj")))
        scores = torch.einsum("qnd,knd->nqk", queries, keys) / config.head_dim**0.5
        mixed = torch.einsum("nqk,knd->qnd", scores.softmax(-1), values).flatten(1)
        states = states + linear(mixed, f"{name}.self_attn.o_proj")
        inputs = norm(states, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(inputs, f"{name}.mlp.gate_proj"))
        states = states + linear(gate * linear(inputs, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    out = norm(states, "norm")[1:]
    return linear(out, "lm_head") if "lm_head.weight" in weights else out @ drafter.target.output.weight.T


def turned(heads: Tensor, positions: Tensor, config: HeadConfig) -> Tensor:
    """Rotary positions [L] on heads [L, n, d] by complex numbers: pair i turns by position * theta^(-2i/d)."""
    half = config.head_dim // 2
    speeds = config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions[:, None] * speeds)
    pairs = torch.complex(heads[..., :half].double(), heads[..., half:].double()) * turn[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(heads.dtype)


def training_inputs(drafter: BlockDrafter, sequences: list[Tensor], trained: list[Tensor] | None = None, **trees: Any):
    """trained: by default every token. The same generators at every call."""
    masks = [torch.ones(len(s), dtype=torch.bool) for s in sequences] if trained is None else trained
    features = drafter.target.states(drafter.feature_layers).batch(sequences)[1]
    generators = [torch.Generator().manual_seed(7 + index) for index in range(len(sequences))]
    return TrainingInputs(sequences, masks, features, generators=generators, **trees)


def best_first(drafter: BlockDrafter, sequences: list[Tensor], rows: list[int], anchors: list[int], **shape: Any):
    session = drafter.session(sequences, torch.tensor(rows), torch.tensor(anchors), Sampling())
    return get_builder("best_first")(session, TreeShape(**shape)).trees


def inner_nodes(trees: TreeBatch, rows: list[int], anchors: list[int]) -> dict[str, Any]:
    """Trees as fields of TrainingInputs; every node with a child is wanted."""
    places = trees.has_children().flatten().nonzero().flatten()
    return {"trees": trees, "tree_sequence": torch.tensor(rows), "anchors": torch.tensor(anchors), "places": places}


def blocks_of(layout: Layout, block_size: int, places: Tensor) -> list[tuple[int, int, int]]:
    """(sequence, anchor, place of the block) of flat places."""
    blocks = layout.inputs
    block, place = places // block_size, places % block_size
    return list(zip(blocks.rows[block].tolist(), blocks.anchors[block].tolist(), place.tolist(), strict=True))


def with_anchors(drafter: BlockDrafter, count: int) -> BlockDrafter:
    drafter.dials = Dials(block_anchors=count, block_decay=2.0)
    return drafter
