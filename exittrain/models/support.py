"""Which architectures packed scoring and cache compaction are right for: told by the config, then by a tiny probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exittrain.errors import InputError

if TYPE_CHECKING:
    from exittrain.models.causal import CausalModel

# Relative error of hidden states between a packed and a plain forward: rounding lies far below, a wrong mask above.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 5e-2


def check_architecture(module: Any, name: str) -> None:
    """Raise InputError where the config says that attention is not full or that state cannot be rolled back."""
    config = module.config
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder model; a decoder-only causal LM is needed")
    if module.get_output_embeddings() is None:
        raise InputError(f"{name} has no language-model head; a causal LM is needed")
    text = config.get_text_config()
    named = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "attention_layers", None) or ())}
    kinds = sorted(named - {"full_attention", "global"})
    if kinds:
        raise InputError(f"{name} has {', '.join(kinds)} layers; only full attention can be masked and rolled back")
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        raise InputError(
            f"{name} attends in a sliding window of {window}; trees need full attention "
            "(set sliding_window to null in its config.json if contexts stay shorter than that)"
        )
    if getattr(module, "_is_stateful", False):
        raise InputError(f"{name} keeps a recurrent state, which cannot be rolled back; use a full-attention model")


@torch.no_grad()
def probe(model: CausalModel) -> None:
    """Score a 4-node tree packed, and behind a cache, and compare with plain forwards (math.md section 7).

    Catches architectures that ignore a prepared mask or explicit positions, and heads this package does not know.
    Raises InputError naming the model.
    """
    from exittrain.models.cache import TreeCache
    from exittrain.models.packed import pack
    from exittrain.tree.batch import TreeBatch
    from exittrain.tree.draft_tree import DraftTree

    ids = (torch.arange(1, 11) * 7919) % model.vocab_size
    context, drafted = ids[:5], ids[5:9]
    tree = DraftTree([int(context[2]), *drafted.tolist()], [-1, 0, 0, 2, 3], drawn="iid")
    trees = TreeBatch.from_trees([tree], model.device)
    plain_ids = torch.cat([context[:3], drafted[[1, 2, 3]]])[None].to(model.device)
    try:
        plain = model.hidden(plain_ids)
        logits = model.module(input_ids=plain_ids, use_cache=False).logits.float()
        packed = pack([context], trees, torch.tensor([0]), torch.tensor([2]), dtype=model.dtype).to(model.device)
        rows = packed.gather(model.hidden(packed.input_ids, packed.position_ids, packed.mask))
        cache = TreeCache(model, 1)
        cache.extend([context[:2]])
        cached = cache.score(trees)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{model.name} cannot score trees under a prepared mask: {reason}") from error
    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    for ours in (rows[0, [0, 2, 3, 4]], cached[0, [0, 2, 3, 4]]):
        if not _near(ours, plain[0, 2:], tolerance):
            raise InputError(f"{model.name} does not follow a tree mask: packed scores differ from a plain forward")
    if not _near(model.head(plain), logits, tolerance):
        raise InputError(f"{model.name} changes its logits after the head in a way that is not supported")


def _near(ours: torch.Tensor, plain: torch.Tensor, tolerance: float) -> bool:
    error = (ours.double() - plain.double()).norm()
    return bool(torch.isfinite(error)) and float(error) <= tolerance * float(plain.double().norm())
