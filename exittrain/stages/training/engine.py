"""The DeepSpeed engine behind the one training loop: gradients summed over micro-batches and ranks, clipped, stepped.

Only this file, `zero_config.py` and `zero_state.py` know DeepSpeed. The loss is already divided by global counts, so
nothing here averages.

ZeRO 3 keeps a part of every parameter on each rank. Ranks draw other trees and so call a drafter's layers in other
numbers and orders; no collective may hang on that. So DeepSpeed is given the parameters in one flat module: they are
gathered as one when a forward begins, whatever happens in it, and `whole` gathers them for drawing, evaluating and
saving. Between steps each rank holds its part of parameters, gradients and optimiser alone.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from exittrain.errors import InputError
from exittrain.runtime.ranks import world_size
from exittrain.stages.training import zero_state
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.zero_config import full_config


class FlatModule(nn.Module):
    """All parameters of `module` as its own, each once, and `module` itself hidden from those who look for children.

    Its forward runs `module` on `arguments` and keeps the second of what that returns in `sums`: DeepSpeed's hooks see
    nothing but the loss.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._inner: tuple[nn.Module, ...] = (module,)
        for index, parameter in enumerate(module.parameters()):
            self.register_parameter(f"p{index}", parameter)
        self.arguments: tuple[Any, ...] = ()
        self.sums: Any = None

    def forward(self) -> Tensor:
        loss: Tensor
        loss, self.sums = self._inner[0](*self.arguments)
        return loss

    def make_plain(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Put new parameters of these values in the place of the old ones, wherever the module has them."""
        fresh = {old: nn.Parameter(value, old.requires_grad) for old, value in values.items()}
        for part in self._inner[0].modules():
            own = {name: fresh.get(p, p) if p is not None else None for name, p in part._parameters.items()}
            part._parameters.update(own)

    def let_go(self) -> None:
        """Drop everything: DeepSpeed keeps a module that it has seen in a global list."""
        self._parameters.clear()
        self._inner, self.arguments, self.sums = (), (), None


class Engine:
    """Call it for a loss, `backward` the loss, `step` once a batch. Parameters with requires_grad are trained.

    Raises InputError when the module has no such parameter.
    """

    def __init__(self, module: nn.Module, settings: LoopSettings, config: Mapping[str, Any]) -> None:
        _join_ranks()
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError("the model has no trainable parameter")
        self._clip, self._flat = settings.clip, FlatModule(module)
        optimizer = _optimizer(list(self.parameters.values()), settings)
        self._engine = _initialize(self._flat, optimizer, full_config(config, settings.clip))
        engine = self._engine
        # Plain float32: parameters and optimiser are ordinary tensors, ours to clip, check and save.
        self.plain = not (engine.zero_optimization() or engine.bfloat16_enabled())
        self.partitioned = engine.zero_optimization_stage() == 3

    def __call__(self, *args: Any) -> Any:
        """(loss, sums) of the module on `args`."""
        self._flat.arguments = args
        loss = self._engine()
        sums, self._flat.sums, self._flat.arguments = self._flat.sums, None, ()
        return loss, sums

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add this micro-batch's gradient; with `last`, sum it over the ranks (DeepSpeed divides by their number)."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * world_size(), scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip and update with this learning rate; returns the gradient's norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; parameters are as before.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self.plain:
            norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self._clip))
            if not norm < float("inf"):
                raise FloatingPointError(f"the gradient's norm is {norm}")
            self._engine.step()
            return norm
        self._engine.step()
        if self._engine.optimizer.overflow:
            raise FloatingPointError("the gradient's norm is not finite")
        return float(self._engine.get_global_grad_norm() or 0.0)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the module is an ordinary one on every rank, to be read and run but not to be changed; all ranks
        enter and leave together. Only ZeRO 3 has anything to do for it."""
        if not self.partitioned:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self._flat.parameters())):
            yield

    def make_plain(self) -> None:
        """The end of training: the module is an ordinary one from now on. Every rank calls it, and then `close`."""
        if self.partitioned:
            with self.whole():
                values = {p: p.detach().clone() for p in self._flat.parameters()}
            self._flat.make_plain(values)

    def state(self) -> dict[str, Any]:
        """Parameters and moments in float32, whole and by name; every rank calls it, the main one gets them."""
        return zero_state.gather(
            self.parameters, self._engine.optimizer, self.plain, keep=self._engine.global_rank == 0
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave the main rank, exactly, whatever the ZeRO stage and the number of ranks then and
        now; every rank calls it, before the first step."""
        zero_state.scatter(state, self.parameters, self._engine.optimizer, self.plain)

    def close(self) -> None:
        """Let go of hooks and buffers: a process may train many models in turn."""
        self._engine.destroy()
        for parameter in self._flat.parameters() if self.partitioned else ():
            zero_state.empty(parameter)
        self._flat.let_go()
        gc.collect()  # the engine is full of cycles: left to themselves, optimiser states of several arms pile up


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


def _initialize(module: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unset, DeepSpeed warns that it had to guess
    import deepspeed
    import deepspeed.ops

    # Its ZeRO collectives use names torch is about to retire.
    warnings.filterwarnings("ignore", message=".*(_into_tensor|_scatter_tensor).*deprecated", category=FutureWarning)
    # Its shared-memory collectives would be compiled at start-up, for half a minute and with a compiler; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which it imports
        return deepspeed.initialize(model=module, optimizer=optimizer, config=dict(config), dist_init_required=False)[0]
