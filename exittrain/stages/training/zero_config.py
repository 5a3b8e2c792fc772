"""DeepSpeed's JSON: what a user may say there (ZeRO, offload, precision), and what the engine adds to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exittrain.errors import InputError, nearest
from exittrain.records.share import share_names, share_path

FOLDER = "recipes/deepspeed"
RECIPES = ("optimizer", "scheduler", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu",
           "gradient_accumulation_steps")  # fmt: skip
OFFLOADS = ("offload_optimizer", "offload_param")


def deepspeed_config(name: str) -> dict[str, Any]:
    """A DeepSpeed JSON by path, or by its name in recipes/deepspeed. It holds ZeRO, offload and precision only.

    Raises:
        InputError: no such file, no JSON, a setting that belongs to the recipe, or one that is not supported.
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
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is no JSON object: it holds ZeRO and precision, as recipes/deepspeed/zero1.json does")
    foreign = sorted(set(config) & set(RECIPES))
    if foreign:
        raise InputError(f"{path} sets {', '.join(foreign)}: that is the recipe's; keep ZeRO and precision here")
    complaint = _complaint(config)
    if complaint:
        raise InputError(f"{path} {complaint}")
    return config


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def is_half(config: Mapping[str, Any]) -> bool:
    """Whether parameters are bfloat16 beside float32 masters."""
    return bool(config.get("bf16", {}).get("enabled"))


def _complaint(config: Mapping[str, Any]) -> str | None:
    """What cannot be used, or None."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        return "has no ZeRO stage of 0, 1, 2 or 3 in 'zero_optimization'"
    if config.get("fp16", {}).get("enabled"):
        return "asks for fp16, whose loss scale is not kept: use bf16 (zero1-bf16), or autocast (zero0-autocast)"
    if is_half(config) and not zero.get("stage", 0):
        return "asks for bf16 at ZeRO 0, where there are no float32 masters: use stage 1, or autocast (zero0-autocast)"
    if config.get("bf16", {}).get("check_grad_overflow") is False:
        return "has 'check_grad_overflow' off: a gradient that is not finite would go into the weights"
    for name in OFFLOADS:
        device, least = zero.get(name, {}).get("device", "none"), 3 if name == "offload_param" else 1
        if device not in ("none", "cpu"):
            return f"has '{name}' to {device}: only cpu is supported"
        if device == "cpu" and zero.get("stage", 0) < least:
            return f"has '{name}', which needs ZeRO stage {least} at least"
    return None


def full_config(config: Mapping[str, Any], clip: float) -> dict[str, Any]:
    """The user's settings with those that are the engine's own."""
    zero = dict(config.get("zero_optimization", {}))
    if stage_of(config) == 3:
        # True would put DeepSpeed's linear into torch for the whole process, the target's forwards included.
        zero["memory_efficient_linear"] = False
    return {
        **config,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,  # counts are ours: see the loop
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip if stage_of(config) or is_half(config) else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own CPU Adam would be compiled at start-up; torch's serves
        "steps_per_print": None,
    }
