"""Which tensors a head has and of what shape, and how the part of the vocabulary it drafts from is stored.

Shapes: H hidden, Ht the target's hidden, A feature layers, V target vocabulary, D draft vocabulary, I input of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exittrain.drafters.head_config import HeadConfig
from exittrain.drafters.vocabulary import check_draft_ids
from exittrain.errors import InputError

EMBEDDINGS = "embed_tokens.weight"
VOCABULARY = ("d2t", "t2d")
# What belongs to the head itself: such a tensor is never left out in silence.
_OWN = ("fc.", "fc_norm", "input_norm", "hidden_norm", "norm.", "layers.", "midlayer", "additional_layers",
        "lm_head.bias")  # fmt: skip


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor of a head, embeddings and vocabulary apart."""
    hidden, features = config.hidden_size, config.feature_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, features), "norm.weight": (hidden,)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.feature_layers))}
    if config.kind == "block":
        shapes["hidden_norm.weight"] = (hidden,)
    if config.kind == "eagle3" or config.draft_vocab_size < config.vocab_size:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    for index in range(config.num_layers):
        first = config.kind == "eagle3" and index == 0
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config, first).items()}
    return shapes


def _layer_shapes(config: HeadConfig, first_of_eagle: bool) -> dict[str, tuple[int, ...]]:
    """first_of_eagle: reads [embedding ; hidden], and normalises the second by a norm of its own."""
    hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    wide, key_wide = config.num_heads * head_dim, config.num_kv_heads * head_dim
    given = 2 * hidden if first_of_eagle else hidden
    linear = {
        "self_attn.q_proj": (wide, given), "self_attn.k_proj": (key_wide, given),
        "self_attn.v_proj": (key_wide, given), "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if first_of_eagle:
        norms["hidden_norm"] = hidden
    if config.style == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    biased = {"self_attn": config.attention_bias, "mlp": config.mlp_bias}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if biased[name.split(".")[0]]}
    return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}


def split_tensors(
    found: Mapping[str, Tensor], config: HeadConfig, where: str
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None, tuple[str, ...]]:
    """(the head's tensors, draft_ids [D] or None, embeddings [V, H] or None, names that have no place).

    A block drafter's readers take the target's embeddings whatever is stored, and so its own have no place.

    Raises InputError naming a tensor that is missing, of another shape or no floating numbers, one that belongs to an
    option the config has off, and a vocabulary that contradicts itself.
    """
    shapes, beside = head_shapes(config), {*VOCABULARY}
    if config.kind == "eagle3":
        beside.add(EMBEDDINGS)
    extra = sorted(found.keys() - shapes.keys() - beside)
    off = [name for name in extra if name.startswith(_OWN) and not name.endswith("rotary_emb.inv_freq")]
    others = f"; it has {len(extra)} with no place in it, first {(off or extra)[0]}" if extra else ""
    if missing := sorted(shapes.keys() - found.keys()):
        raise InputError(f"{where} lacks {len(missing)} tensors that its config asks for, first {missing[0]}{others}")
    if off:
        raise InputError(f"{where} holds {off[0]}, for which its config has no place: an option of the config is wrong")
    if EMBEDDINGS in found.keys() & beside:
        shapes[EMBEDDINGS] = (config.vocab_size, config.hidden_size)
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise InputError(
                f"{where}: tensor {name} has shape {tuple(found[name].shape)}, its config asks for {shape}"
            )
        if found[name].dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise InputError(f"{where}: tensor {name} is {found[name].dtype}; a head is of float32, float16, bfloat16")
    embeddings = found[EMBEDDINGS] if EMBEDDINGS in shapes else None
    ids = _draft_ids(found.get("d2t"), found.get("t2d"), config, where)
    return {name: found[name] for name in shapes if name != EMBEDDINGS}, ids, embeddings, tuple(extra)


def offsets_of(draft_ids: Tensor) -> Tensor:
    """d2t as files hold it: draft_ids [D] less each one's own place."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def ids_of(offsets: Tensor) -> Tensor:
    """Target ids [D] of d2t offsets [D]."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def _draft_ids(d2t: Tensor | None, t2d: Tensor | None, config: HeadConfig, where: str) -> Tensor | None:
    """draft_ids of the two stored maps, which must agree; None for a full vocabulary."""
    for name, stored in (("d2t", d2t), ("t2d", t2d)):
        if stored is not None and (stored.dim() != 1 or stored.is_floating_point()):
            raise InputError(f"{where}: {name} is {stored.dtype} of shape {tuple(stored.shape)}, no list of ids")
    ids = None if d2t is None else ids_of(d2t.to(torch.int64))
    check_draft_ids(ids, config.draft_vocab_size, config.vocab_size, where)
    if t2d is not None:
        if len(t2d) != config.vocab_size:
            raise InputError(f"{where}: t2d has {len(t2d)} entries, its config asks for {config.vocab_size}")
        marked = t2d.bool().nonzero()[:, 0]
        if not torch.equal(marked, torch.arange(config.vocab_size) if ids is None else ids):
            raise InputError(f"{where}: d2t and t2d name different tokens; both must name the same ids")
    return ids if config.draft_vocab_size < config.vocab_size else None
