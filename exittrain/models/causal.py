"""A Hugging Face causal LM as this package sees it: hidden states under an explicit mask, and a head.

Shapes: S sequences, L columns of a forward (tokens and tree nodes), K cached columns, H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from exittrain.models.loading import Match, load_pretrained
from exittrain.models.placement import Spread, whole
from exittrain.models.support import check_architecture, probe

Self = TypeVar("Self", bound="CausalModel")

HEAD_ROWS = 256  # rows through a head at once: beyond these, only memory grows

# What a config holds that says nothing about the numbers: places, versions and how it was loaded.
_NOT_IDENTITY = (
    "_name_or_path",
    "_model_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "use_cache",
)


class CausalModel:
    """A causal LM whose every forward names its positions and its mask.

    module: any Hugging Face causal LM with full attention; tokenizer: or None; name: for messages and tables only.
    match: how the weights it was loaded from fitted, or None.
    Raises InputError for an architecture whose state cannot be masked or rolled back (sliding window, recurrent,
    encoder-decoder) and, unless verify=False, where a tiny packed forward differs from the plain one.
    """

    def __init__(self, module: Any, tokenizer: Any = None, name: str = "model", verify: bool = True) -> None:
        check_architecture(module, name)
        self.module = module.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.match: Match | None = None
        self._base = module.base_model
        parameters = inspect.signature(type(self._base).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._fingerprint: tuple[tuple[int, ...], str] | None = None
        if verify:
            probe(self)

    @classmethod
    def from_pretrained(
        cls: type[Self],
        source: str | Path,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        device: str | torch.device = "cpu",
        verify: bool = True,
        spread: Spread | None = None,
    ) -> Self:
        """Load a Hugging Face folder, a GGUF file (or a folder with one), a known name, or a hub id.

        spread: layers over several devices, in place of all on `device`.
        Raises InputError with one line for anything that cannot be found, read whole, or used.
        """
        module, tokenizer, name, match = load_pretrained(source, dtype, attention, spread)
        module = module if spread is not None else module.to(device)
        model = cls(module.requires_grad_(False), tokenizer, name, verify)
        model.match = match
        return model

    @property
    def config(self) -> Any:
        """The text model's config (a multimodal config's text part)."""
        return self.module.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where tokens go in, and states and logits come out."""
        return self.embeddings.weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.weight.dtype  # type: ignore[no-any-return]

    @property
    def embeddings(self) -> Any:
        """The input embedding module."""
        return self.module.get_input_embeddings()

    @property
    def output(self) -> Any:
        """The output projection module: head(h) = post-processing(output(h))."""
        return self.module.get_output_embeddings()

    @property
    def is_offloaded(self) -> bool:
        """Whether layers lie in host memory or on disk and are brought in for every forward, which is then dear."""
        return any(parameter.device.type == "meta" for parameter in self.module.parameters())

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, padding rows of the vocabulary included."""
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def max_positions(self) -> int:
        """The longest context the model was made for, and in which a key's rotation never depends on the length."""
        limit = int(getattr(self.config, "max_position_embeddings", None) or 2**31 - 1)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # past its original length all cached keys would have to turn again
            limit = int(rope.get("original_max_position_embeddings") or limit)
        return limit

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a response, from the generation config, the config, then the tokenizer."""
        places = (getattr(self.module, "generation_config", None), self.config, self.tokenizer)
        for place in places:
            ids = getattr(place, "eos_token_id", None)
            if ids is not None:
                return [int(i) for i in ids] if isinstance(ids, (list, tuple)) else [int(ids)]
        return []

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Last hidden states [S, L, H] after the final norm, of input_ids [S, L] at position_ids [S, L].

        mask [S, 1, L, K+L] additive (see masks.py); None means causal, which is also right for right-padded
        rows at positions 0..L-1. cache: a transformers cache that is appended to. Differentiable.
        """
        extra = {} if cache is None else {self._cache_argument: cache}
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        out = self._base(
            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=cache is not None, **extra
        )
        return out.last_hidden_state  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Raw logits [..., V] float32 of hidden states [..., H], softcap and scale of the architecture applied."""
        logits = self.output(hidden)
        if (scale := getattr(self.module, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits.float()  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        """sha256 (hex) over config and weights as loaded; the same wherever the files lie. Cached until they change."""
        tensors = sorted((*self.module.named_parameters(), *self.module.named_buffers()), key=lambda item: item[0])
        frozen = not any(tensor.requires_grad for _, tensor in tensors)
        versions = tuple(tensor._version for _, tensor in tensors)
        if frozen and self._fingerprint is not None and self._fingerprint[0] == versions:
            return self._fingerprint[1]
        config = {k: v for k, v in self.config.to_dict().items() if k not in _NOT_IDENTITY}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            stored = whole(self.module, name, tensor).detach().cpu().contiguous()
            digest.update(stored.reshape(-1).view(torch.uint8).numpy().data)
        self._fingerprint = (versions, digest.hexdigest())
        return self._fingerprint[1]
