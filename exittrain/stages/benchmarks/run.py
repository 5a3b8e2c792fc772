"""`exittrain bench`: what was asked for is measured, printed, and written as one JSON file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from exittrain.errors import InputError, nearest
from exittrain.records.files import write_json
from exittrain.runtime.provenance import collect_provenance
from exittrain.stages.benchmarks.models import compare_models, model_table
from exittrain.stages.benchmarks.schema import BenchResult
from exittrain.stages.benchmarks.verify import VerifySettings, measure_verify, verify_tables
from exittrain.stages.evaluation.output import PIPE_WIDTH

PARTS = ("verify", "models", "all")


def run_bench(part: str, settings: VerifySettings, file: str | Path | None = None) -> BenchResult:
    """part: one of PARTS. Verifiers run on the CPU and, where there is a GPU, on it too; models on the better one.

    Raises InputError, before anything is measured, on an unknown part or a file that cannot be written.
    """
    if part not in PARTS:
        raise InputError(f"bench has no part {part!r}{nearest(part, list(PARTS))} (known: {', '.join(PARTS)})")
    if file is not None:
        _check_writable(Path(file))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    result = BenchResult(
        repeats=settings.repeats,
        threads=torch.get_num_threads(),
        verify=None if part == "models" else measure_verify(settings, devices),
        models=None if part == "verify" else compare_models(repeats=settings.repeats, device=devices[-1]),
        provenance=collect_provenance(),
    )
    if file is not None:
        write_json(file, result.model_dump(mode="json"))
    return result


def print_result(result: BenchResult) -> None:
    """The tables on standard output."""
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    tables = [] if result.verify is None else verify_tables(result.verify)
    tables += [] if result.models is None else [model_table(result.models)]
    for table in tables:
        console.print(table.rich())
        console.print()


def _check_writable(file: Path) -> None:
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--json {file} cannot be written: name a file in a folder that can be")
