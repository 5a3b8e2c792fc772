"""Tiny Llamas with sharp laws, so that a wrong mask or position shows, and the plain forwards they must match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from exittrain.models.target import TargetModel
from exittrain.tree.draft_tree import DraftTree

VOCAB = 64


def tiny_target(attention: str = "sdpa", seed: int = 0, **config: Any) -> TargetModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.3, "max_position_embeddings": 256,
        "eos_token_id": 2, "attn_implementation": attention,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = LlamaForCausalLM(LlamaConfig(**{**shape, **config}))
    return TargetModel(module.requires_grad_(False), name="tiny")


def random_tree(root: int, num_nodes: int, generator: torch.Generator) -> DraftTree:
    """Each node under a random earlier one, siblings different."""
    tokens, parents, seen = [root], [-1], set[tuple[int, int]]()
    while len(tokens) <= num_nodes:
        parent, token = (int(torch.randint(n, (1,), generator=generator)) for n in (len(tokens), VOCAB))
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tokens, parents)


def plain_probs(model: TargetModel, context: Sequence[int] | Tensor, path: Sequence[int] | Tensor = ()) -> Tensor:
    """[V] next-token probabilities after context and path, by an ordinary forward with nothing passed but the ids."""
    ids = torch.tensor([*map(int, context), *map(int, path)])[None]
    with torch.no_grad():
        return model.module(input_ids=ids, use_cache=False).logits[0, -1].float().softmax(-1)  # type: ignore[no-any-return]


def node_probs(model: TargetModel, context: Tensor, tree: DraftTree) -> Tensor:
    """[N+1, V] `plain_probs` at every node; context ends at the root."""
    return torch.stack([plain_probs(model, context, tree.token_ids[tree.path(i)]) for i in range(tree.num_nodes + 1)])
