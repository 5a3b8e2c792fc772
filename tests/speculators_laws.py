"""Run by a test in a process of its own, with vLLM's `speculators` on the path: what that library makes of folders.

Usage: python speculators_laws.py WORK. WORK/cases.json: folders, WORK/inputs.safetensors: tokens [L], features [L, F].
Writes WORK/laws.safetensors: for folder i of an EAGLE-3 head `i` [3, L - 1, D], logits of the first three steps of its
training-time test; of a block drafter `i` [A, B, D], logits of blocks at `i.anchors` [A].
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# What the library imports for talking to servers and for logs; a model that is loaded and run makes no use of them.
UNUSED = {name for name in ("openai", "loguru", "hs_connectors") if importlib.util.find_spec(name) is None}


class Unused(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Unused(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main(work: Path) -> None:
    sys.meta_path.append(Finder())
    import torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel, SpeculatorModelConfig

    given = load_file(work / "inputs.safetensors")
    tokens, features = given["tokens"], given["features"]
    documents, out = torch.zeros((1, len(tokens)), dtype=torch.int64), {}
    torch.manual_seed(0)  # the library draws anchors
    for index, folder in enumerate(json.loads((work / "cases.json").read_text())):
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(folder, config=config).eval()
        with torch.no_grad():
            if config.speculators_model_type == "eagle3":
                steps: list[torch.Tensor] = []
                model.lm_head.register_forward_hook(lambda module, inputs, output, to=steps: to.append(output[0]))
                model(features[None, :-1], tokens[None, 1:], documents[:, 1:], ttt_steps=3)
                out[str(index)] = torch.stack(steps)
            else:
                last = torch.zeros((1, len(tokens), config.transformer_layer_config.hidden_size))
                everywhere = torch.ones((1, len(tokens)))
                _, logits, _, _, places = model._backbone_forward(
                    features[None], tokens[None], everywhere, last, documents, max_anchors=6
                )
                out[str(index)] = logits[0].unflatten(0, (-1, config.block_size)).contiguous()
                out[f"{index}.anchors"] = places[:: config.block_size].contiguous()
    save_file(out, work / "laws.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
