"""A tiny target, drafters of every quality, and prompts of different lengths."""

from __future__ import annotations

import pytest
import torch

from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.layers import copy_layers
from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel

torch.set_num_threads(1)

# Every pair of a builder that draws and a verifier exact for it, with a shape.
FIXED = ("tev", "predraw", "residual")
SAMPLED_PAIRS = [
    ("sampled_iid", "rrs", "2-ary"), ("sampled_iid", "traversal", "2-ary"), ("sampled_iid", "block", "chain"),
    ("sampled_wor", "rrs_wor", "2-ary"), ("sampled_wor", "traversal", "2-ary"), ("sampled_wor", "block", "chain"),
]  # fmt: skip
DRAWN_PAIRS = [(builder, name, "2-ary") for builder in ("sampled_iid", "sampled_wor") for name in FIXED] + SAMPLED_PAIRS


def random_model(vocab_size=97, layers=3, seed=0, max_positions=256, hidden_size=32):
    """A random Llama, its weights enlarged until its context matters and its greedy text does not fall into a loop."""
    model = make_causal_lm(
        vocab_size, hidden_size, layers, 4, 64, tie_embeddings=False, max_positions=max_positions, seed=seed
    )
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "norm" not in name:
                parameter.mul_(60.0 if "lm_head" in name else 5.0 if "embed" in name else 12.0)
    return model


def as_target(model, tokenizer=None):
    return TargetModel(model.module, tokenizer, "tiny", verify=False)


@pytest.fixture(scope="session")
def target():
    return as_target(random_model())


@pytest.fixture(scope="session")
def drafters(target):
    """Drafters by name: none, another random model, one copied layer, two, and the target itself."""
    return {
        "none": None,
        "random": CausalDrafter(random_model(seed=5, layers=1)),
        "layers": copy_layers(target, 1),
        "near": copy_layers(target, [0, 1]),
        "itself": copy_layers(target, 3),
    }


@pytest.fixture(scope="session")
def prompts():
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 5, 9, 17, 30]
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
