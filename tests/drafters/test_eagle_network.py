"""The head's network against its parts as Transformers has them, put together by the published formulas."""

from __future__ import annotations

import pytest
import torch
from tiny_eagle import FLAGS, head_config, random_ids, tiny_head, tiny_target
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from exittrain.drafters.eagle.network import EagleNetwork
from exittrain.errors import InputError
from exittrain.models.masks import additive_mask


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def rms(states, weight, eps=1e-6):
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


class PlainHead:
    """EAGLE-3 along one text, from the tensors of a state dict."""

    def __init__(self, config, tensors, embeddings):
        self.config, self.tensors, self.embeddings = config, tensors, embeddings
        self.layer_config = config.layer_config()
        self.layer_config._attn_implementation = "eager"
        self.layer_config.mlp_bias = config.mlp_bias

    def part(self, kind, prefix, wide=False):
        module = kind(self.layer_config, 0) if "attn" in prefix else kind(self.layer_config)
        for name in ("q_proj", "k_proj", "v_proj") if wide else ():
            plain = getattr(module, name)
            setattr(module, name, nn.Linear(2 * plain.in_features, plain.out_features, plain.bias is not None))
        module.load_state_dict({n[len(prefix) :]: t for n, t in self.tensors.items() if n.startswith(prefix)})
        return module

    def states(self, tokens, features):
        config, w = self.config, self.tensors
        if config.norm_before_fc:
            features = rms(features, w["input_norm.weight"])
        if config.fc_norm:
            parts = features.chunk(3, -1)
            features = torch.cat([rms(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], -1)
        hidden = features @ w["fc.weight"].T + w.get("fc.bias", 0)
        positions = torch.arange(len(tokens))[None]
        rotation = LlamaRotaryEmbedding(self.layer_config)(hidden, positions)
        mask = additive_mask(torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril(), torch.float32)
        hidden, attention = hidden[None], LlamaAttention if config.style == "llama" else Qwen3Attention
        for layer in range(config.num_layers):
            name, residual = f"layers.{layer}.", hidden
            if layer == 0:
                normed = rms(hidden, w[name + "hidden_norm.weight"])
                residual = normed if config.norm_before_residual else hidden
                embedded = rms(self.embeddings(tokens)[None], w[name + "input_layernorm.weight"])
                inputs = torch.cat([embedded, normed], -1)
            else:
                inputs = rms(hidden, w[name + "input_layernorm.weight"])
            block = self.part(attention, name + "self_attn.", wide=layer == 0)
            hidden = residual + block(inputs, position_embeddings=rotation, attention_mask=mask)[0]
            inner = rms(hidden, w[name + "post_attention_layernorm.weight"])
            hidden = hidden + self.part(LlamaMLP, name + "mlp.")(inner)
        return hidden[0]

    def logits(self, states):
        return rms(states, self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("style", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", FLAGS)
@torch.no_grad()
def test_the_network_is_the_published_one(target, flags, style, num_layers):
    drafter = tiny_head(target, range(0, 48, 3), style=style, num_layers=num_layers, **FLAGS[flags])
    network, (sequence,) = drafter.network, random_ids(9)
    features = target.states(drafter.feature_layers).of(sequence)[1][:-1]
    plain = PlainHead(network.config, network.state_dict(), target.embeddings)
    expected = plain.states(sequence[1:], features)
    states = network.hidden(sequence[None, 1:], features=network.fuse(features)[None])[0]
    torch.testing.assert_close(network.head(states), plain.logits(expected), atol=2e-5, rtol=1e-5)
    if network.config.norm_output:
        expected = rms(expected, network.state_dict()["norm.weight"])
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-5)


def test_parameters_have_the_names_of_speculators(target):
    names = set(tiny_head(target, style="qwen3", num_layers=2, norm_before_fc=True).network.state_dict())
    parts = [f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected = {f"layers.{layer}.{part}" for layer in (0, 1) for part in parts} | {"layers.0.hidden_norm.weight"}
    assert names == expected | {"fc.weight", "input_norm.weight", "norm.weight", "lm_head.weight"}
    assert {"fc_norm.0.weight", "fc_norm.2.weight"} < set(tiny_head(target, fc_norm=True).network.state_dict())


def test_embeddings_are_the_targets_and_never_trained(target):
    network = tiny_head(target).network
    assert network.embeddings is target.embeddings and not any("embed" in n for n, _ in network.named_parameters())
    own = nn.Embedding(48, 32)
    network = EagleNetwork(head_config(target), own, own_embeddings=True)
    features = network.fuse(torch.randn(1, 3, 96))
    network.head(network.hidden(torch.tensor([[3, 4, 5]]), features=features)).sum().backward()
    assert "embed_tokens.weight" in network.state_dict() and own.weight.grad is None
    loose = tiny_target()
    network = EagleNetwork(head_config(loose), loose.module.requires_grad_(True).get_input_embeddings())
    network.head(network.hidden(torch.tensor([[3, 4, 5]]), features=features.detach())).sum().backward()
    assert loose.embeddings.weight.grad is None and network.lm_head.weight.grad.any()
    other = network.hidden(torch.tensor([[3, 4, 6]]), features=features)
    assert not torch.equal(other, network.hidden(torch.tensor([[3, 4, 5]]), features=features))


def test_a_narrower_head_needs_embeddings_of_its_own(target):
    config = head_config(target, hidden_size=16)
    with pytest.raises(InputError, match="hidden size 16 cannot read embeddings of size 32"):
        EagleNetwork(config, target.embeddings)
    network = EagleNetwork(config, nn.Embedding(48, 16), own_embeddings=True)
    states = network.hidden(torch.tensor([[3, 4]]), features=network.fuse(torch.randn(1, 2, 96)))
    assert network.head(states).shape == (1, 2, 48)


def test_a_cast_leaves_the_rotary_frequencies_exact(target) -> None:
    network = tiny_head(target).network
    exact = network.rotary.rotary.inv_freq.clone()
    network.to(torch.bfloat16)
    assert network.dtype == torch.bfloat16 and network.rotary.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(network.rotary.rotary.inv_freq, exact)
    cos, _ = network.rotary(torch.tensor([[3001]]), torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos[0, 0, : len(exact)].float(), (3001 * exact).cos(), atol=4e-3, rtol=0)
