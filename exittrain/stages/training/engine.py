"""The DeepSpeed engine behind the one training loop: gradients summed over micro-batches and ranks, clipped, stepped.

The only file that knows DeepSpeed. The loss it gets is already divided by global counts, so nothing here averages.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from exittrain.errors import InputError, nearest
from exittrain.records.share import share_names, share_path
from exittrain.runtime.ranks import world_size
from exittrain.stages.training.settings import LoopSettings

FOLDER = "recipes/deepspeed"


def deepspeed_config(name: str) -> dict[str, Any]:
    """A DeepSpeed JSON by path, or by its name in recipes/deepspeed. It holds ZeRO and precision only.

    Raises:
        InputError: no such file, no JSON, ZeRO 3, or a setting that belongs to the recipe.
    """
    path = Path(name)
    if not path.is_file():
        known = [file.removesuffix(".json") for file in share_names(FOLDER)]
        if name not in known:
            raise InputError(
                f"no DeepSpeed config {name!r}{nearest(name, known)} (known: {', '.join(known)}, or a path)"
            )
        path = share_path(f"{FOLDER}/{name}.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    foreign = sorted(set(config) & {"optimizer", "scheduler", "gradient_clipping", "train_batch_size"})
    if foreign:
        raise InputError(f"{path} sets {', '.join(foreign)}: that is the recipe's; keep ZeRO and precision here")
    if config.get("zero_optimization", {}).get("stage", 0) > 2:
        raise InputError(f"{path} asks for ZeRO 3: a drafter is drawn from and saved whole, use zero0, zero1 or zero2")
    return config


class Engine:
    """Call it for a loss, `backward` the loss, `step` once a batch. Parameters with requires_grad are trained.

    Raises InputError when the module has no such parameter.
    """

    def __init__(self, module: nn.Module, settings: LoopSettings, config: Mapping[str, Any]) -> None:
        _join_ranks()
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError("the model has no trainable parameter")
        self._clip = settings.clip
        self._engine = _initialize(module, _optimizer(list(self.parameters.values()), settings), settings, config)
        engine = self._engine
        # Plain float32: parameters and optimiser are ordinary tensors, ours to clip, check and save.
        self.plain = not (engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled())

    def __call__(self, *args: Any) -> Any:
        return self._engine(*args)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add this micro-batch's gradient; with `last`, sum it over the ranks (DeepSpeed divides by their number)."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * world_size(), scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip and update with this learning rate; returns the gradient's norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; parameters are as before (plain float32 only).
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm = None
        if self.plain:
            norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self._clip))
            if not norm < float("inf"):
                raise FloatingPointError(f"the gradient's norm is {norm}")
        self._engine.step()
        return float(self._engine.get_global_grad_norm() or 0.0) if norm is None else norm

    def save(self, folder: Path) -> None:
        """This rank's part of parameters and optimiser into `folder`; every rank calls it."""
        if not self.plain:
            self._engine.save_checkpoint(str(folder), tag="zero", save_latest=False, exclude_frozen_parameters=True)
        elif self._engine.global_rank == 0:
            state = {"parameters": self._values(), "optimizer": self._engine.optimizer.state_dict()}
            torch.save(state, folder / "model.pt")

    def load(self, folder: Path) -> None:
        """What `save` wrote, exactly; every rank calls it."""
        if not self.plain:
            self._engine.load_checkpoint(str(folder), tag="zero", load_module_strict=False)
            return
        state = torch.load(folder / "model.pt", weights_only=True, map_location="cpu")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self._engine.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Let go of hooks and buffers: a process may train many models in turn."""
        self._engine.destroy()
        gc.collect()  # the engine is full of cycles: left to themselves, optimiser states of several arms pile up

    def _values(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}


def _join_ranks() -> None:
    """DeepSpeed wants a process group. Alone, it gets one without a port: any number of runs start side by side.

    Under a launcher `ranks.setup` has made it.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _optimizer(parameters: list[nn.Parameter], settings: LoopSettings) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, settings.beta2), fused=True)


def _initialize(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: LoopSettings, config: Mapping[str, Any]
) -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unset, DeepSpeed warns that it had to guess
    import deepspeed
    import deepspeed.ops

    # Its ZeRO collectives use a name torch is about to retire.
    warnings.filterwarnings("ignore", message=".*_into_tensor.*deprecated", category=FutureWarning)
    # Its shared-memory collectives would be compiled at start-up, for half a minute and with a compiler; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    zero = config.get("zero_optimization", {}).get("stage", 0) > 0
    half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    full = {
        **config,
        "train_micro_batch_size_per_gpu": 1,  # counts are ours: see the loop
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip if zero or half else 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    return deepspeed.initialize(model=module, optimizer=optimizer, config=full, dist_init_required=False)[0]
