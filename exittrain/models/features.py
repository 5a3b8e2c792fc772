"""Features: what some of the target's layers put out, for drafters that read them (EAGLE-3, DFlash).

A layer is named by its index in Hugging Face's `hidden_states`: j is the output of decoder layer j - 1. (vLLM and
speculators count so too; SGLang, SpecForge and z-lab's DFlash name the layer itself, one less.)

Shapes: S sequences, L tokens, A layers read, Ht the target's hidden size, F = A * Ht.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.models.causal import CausalModel
from exittrain.models.placement import layers_name

CACHE_BYTES = 4 << 30  # of states kept in host memory, per target and choice of layers


class LayerTap:
    """While entered, keeps the chosen layers' outputs of the model's latest forward.

    layers: indices as above; none makes a tap that keeps nothing. Raises InputError for an index that is no layer, or
    the last (its entry in `hidden_states` comes after the final norm).
    """

    def __init__(self, model: CausalModel, layers: Sequence[int]) -> None:
        modules = decoder_layers(model) if layers else []
        for layer in layers:
            if not 1 <= layer < len(modules):
                raise InputError(
                    f"feature layer {layer} asked of {model.name}: hidden states 1 to {len(modules) - 1} can be read"
                )
        self._modules = [modules[layer - 1] for layer in layers]
        self._device = model.device
        self._kept: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> LayerTap:
        for place, module in enumerate(self._modules):
            self._handles.append(module.register_forward_hook(self._keeper(place)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> Tensor | None:
        """Features [S, L, F] of the latest forward, concatenated in the order of `layers`; None where there was none
        (or no layer to read)."""
        if not self._kept:
            return None
        features = torch.cat([self._kept[place].to(self._device) for place in range(len(self._modules))], dim=-1)
        self._kept.clear()
        return features

    def _keeper(self, place: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._kept[place] = output[0] if isinstance(output, tuple) else output

        return keep


def decoder_layers(model: CausalModel) -> Any:
    """The model's list of decoder layers. Raises InputError where it has none that is recognised."""
    if name := layers_name(model.module):
        return model.module.get_submodule(name)
    raise InputError(f"{model.name} keeps its layers in a way that is not supported: its features cannot be read")


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high, as EAGLE-3's trainers and servers choose them: (2, n // 2, n - 3)."""
    return 2, num_layers // 2, num_layers - 3


class TargetStates:
    """The target's last hidden states and features along whole sequences, kept from epoch to epoch.

    Every sequence is run alone, so that its numbers depend on no neighbour: the same on any number of ranks, and
    whether they were kept or computed again.
    """

    def __init__(self, target: CausalModel, layers: Sequence[int], max_bytes: int = CACHE_BYTES) -> None:
        self._target, self._layers, self._room = target, tuple(layers), max_bytes
        self._tap = LayerTap(target, layers)
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def of(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden [L, Ht] after the final norm, features [L, F]) of a 1-D id tensor, on the target's device."""
        key = sequence.to("cpu", torch.int64).numpy().tobytes()
        found = self._kept.get(key)
        if found is None:
            with self._tap as tap:
                hidden = self._target.hidden(sequence[None].to(self._target.device))[0]
            features = tap.take()
            found = hidden, hidden[:, :0] if features is None else features[0]
            size = sum(part.numel() * part.element_size() for part in found)
            if size <= self._room:
                self._room -= size
                self._kept[key] = found[0].cpu(), found[1].cpu()
        return found[0].to(self._target.device), found[1].to(self._target.device)

    def batch(self, sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(hidden [S, L, Ht], features [S, L, F]), right-padded with 0."""
        hidden, features = zip(*(self.of(sequence) for sequence in sequences), strict=True)
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(list(hidden), batch_first=True), pad(list(features), batch_first=True)
