"""Who made a result, with what: git commit and changes, versions, command line, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import exittrain
from exittrain.runtime.ranks import world_size

SLURM = ("JOB_ID", "ARRAY_JOB_ID", "RESTART_COUNT", "JOB_NAME", "JOB_PARTITION", "CLUSTER_NAME", "JOB_NUM_NODES")
PACKAGES = ("exittrain", "torch", "transformers", "deepspeed", "datasets", "peft", "safetensors", "numpy", "wandb")


def collect_provenance(argv: list[str] | None = None) -> dict[str, Any]:
    """JSON-able facts about this process; `git` is None outside a checkout. Contains no clock and no environment."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "argv": list(sys.argv if argv is None else argv),
        "git": _git(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": gpus,
        },
    }


def public_facts() -> dict[str, Any]:
    """What may be shown elsewhere of this process: `shown`, and of the environment only how many ranks there are and
    which SLURM job this is."""
    slurm = {name.lower(): value for name in SLURM if (value := os.environ.get(f"SLURM_{name}"))}
    return {**shown(collect_provenance()), "world_size": world_size(), "slurm": slurm}


def shown(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Without the command line, and of changes to the code only whether there are some."""
    git = provenance.get("git")
    kept = {name: provenance[name] for name in ("python", "versions", "hardware") if name in provenance}
    return {**kept, "git": None if git is None else {"commit": git["commit"], "dirty": bool(git["diff"])}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git() -> dict[str, Any] | None:
    root = Path(exittrain.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit, changes = _run_git(root, "rev-parse", "HEAD"), _run_git(root, "diff", "HEAD")
    return None if commit is None else {"commit": commit.strip(), "diff": changes or ""}


def _run_git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
