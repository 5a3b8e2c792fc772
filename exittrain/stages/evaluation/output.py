"""The files of an evaluation, all atomic. metrics.json, rounds.jsonl and contexts.parquet hold no clock value."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from exittrain.law.seeding import seed_for
from exittrain.models.target import TargetModel
from exittrain.records.files import write_json, write_text
from exittrain.records.shards import write_rows
from exittrain.stages.evaluation import summary, tables
from exittrain.stages.evaluation.intervals import Bootstrap
from exittrain.stages.evaluation.pool import with_pooled
from exittrain.stages.evaluation.schema import SCHEMA_VERSION, DrafterInfo, Metrics, Settings
from exittrain.stages.evaluation.setup import Entrant, Results, Setup
from exittrain.stages.evaluation.tasks import Task

PIPE_WIDTH = 200  # columns where standard output is no terminal


def write_outputs(
    folder: Path,
    target: TargetModel,
    setup: Setup,
    entrants: Sequence[Entrant],
    tasks: Sequence[Task],
    results: Results,
) -> tuple[Metrics, dict[str, Any]]:
    """Summarise all cells and write every file; returns what metrics.json and timing.json hold."""
    metrics = summarise(target, setup, entrants, tasks, results)
    timing = timing_of(target, entrants, results)
    write_json(folder / "metrics.json", metrics.model_dump(mode="json"))
    write_json(folder / "timing.json", timing)
    write_text(folder / "rounds.jsonl", "".join(json.dumps(row, sort_keys=True) + "\n" for row in round_rows(results)))
    if results.contexts:
        write_contexts(folder / "contexts.parquet", results)
    else:
        (folder / "contexts.parquet").unlink(missing_ok=True)  # of an earlier call with other settings
    write_text(folder / "table.md", tables.markdown(metrics, timing))
    return metrics, timing


def summarise(
    target: TargetModel, setup: Setup, entrants: Sequence[Entrant], tasks: Sequence[Task], results: Results
) -> Metrics:
    settings, shape = setup.settings, setup.shape
    bootstrap = Bootstrap(settings.bootstrap, seed_for(setup.seed, "eval", "bootstrap"))
    contexts, oracles = with_pooled(results)
    infos = [
        DrafterInfo(
            name=e.name, role=e.role, objective=e.objective, steps=e.steps, sequences=e.sequences,  # type: ignore[arg-type]
            fingerprint=results.fingerprints[e.name],
        )
        for e in entrants
    ]  # fmt: skip
    return Metrics(
        name=setup.name,
        target_fingerprint=target.fingerprint(),
        settings=Settings(
            builder=setup.builder, budget=shape.budget, depth=shape.depth, width=shape.width,
            branching=shape.branching if isinstance(shape.branching, str) else list(map(list, shape.branching)),
            top_k=setup.sampling.top_k, top_p=setup.sampling.top_p, max_new_tokens=settings.max_new_tokens,
            bootstrap=settings.bootstrap, seed=setup.seed,
        ),
        tasks={task.name: task.source for task in tasks},
        drafters=infos,
        contexts=[
            summary.summarise_contexts(
                cell.task, cell.temperature, found, oracles.get(cell), setup.comparisons, bootstrap,
                setup.context_rule,
            )
            for cell, found in contexts.items()
        ],
        decode=[
            summary.summarise_decoding(
                cell.task, cell.temperature, cell.verifier, found,
                [pair for pair in setup.comparisons if {pair.drafter, pair.control} <= found.keys()], bootstrap,
                results.choices.get(cell),
            )
            for cell, found in results.decoded.items()
        ],
        verifiers=[
            summary.summarise_verifiers(cell.task, cell.temperature, name, result, bootstrap)
            for cell, found in results.verifiers.items()
            for name, result in found.items()
        ],
    )  # fmt: skip


def timing_of(target: TargetModel, entrants: Sequence[Entrant], results: Results) -> dict[str, Any]:
    """Everything a clock measured, and on what."""
    stages = [
        {
            "drafter": name, "task": cell.task, "temperature": cell.temperature, "verifier": cell.verifier,
            "milliseconds": {
                stage: 1e3 * seconds / max(1, sum(len(t.block_lengths) for t in result.traces))
                for stage, seconds in result.stage_seconds.items()
            },
        }
        for cell, found in results.decoded.items()
        for name, result in found.items()
    ]  # fmt: skip
    verifiers = [
        {"drafter": name, "task": cell.task, "temperature": cell.temperature, "seconds": result.seconds}
        for cell, found in results.verifiers.items()
        for name, result in found.items()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "hardware": hardware(target.device),
        "stages": stages,
        "verifiers": verifiers,
        "speed": [{"drafter": name, **result.numbers} for name, result in results.speed.items()],
        "training_seconds": {e.name: e.train_seconds for e in entrants if e.train_seconds is not None},
    }


def hardware(device: torch.device) -> str:
    """One line: where the clock ran."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def round_rows(results: Results) -> Iterator[dict[str, Any]]:
    """One row a round: any average can be redone from these."""
    for cell, found in results.decoded.items():
        for name, result in found.items():
            for trace in result.traces:
                for index, length in enumerate(trace.block_lengths):
                    yield {
                        "drafter": name, "task": cell.task, "temperature": cell.temperature, "verifier": cell.verifier,
                        "prompt_id": trace.prompt_id, "round": index, "block_length": length,
                        "expected_block_length": _at(trace.expected_block_lengths, index),
                        "coverage": _at(trace.coverages, index),
                    }  # fmt: skip


def _at(values: Sequence[float] | None, index: int) -> float | None:
    return None if values is None else values[index]


def write_contexts(path: Path, results: Results) -> None:
    """contexts.parquet: one row a drafter and context; reach_by_depth[d-1] is P(accepted >= d), summing to C."""
    from datasets import Features, List, Value

    features = Features(
        {
            "task": Value("string"),
            "temperature": Value("float64"),
            "drafter": Value("string"),
            "sequence_id": Value("string"),
            "anchor": Value("int32"),
            "coverage": Value("float64"),
            "oracle_coverage": Value("float64"),
            "reach_by_depth": List(Value("float64")),
        }
    )
    rows = []
    for cell, found in results.contexts.items():
        oracle = results.oracles[cell].coverage.tolist() if cell in results.oracles else None
        for name, result in found.items():
            for place, sequence in enumerate(result.sequence_ids):
                rows.append(
                    {
                        "task": cell.task, "temperature": cell.temperature, "drafter": name, "sequence_id": sequence,
                        "anchor": result.anchors[place], "coverage": float(result.coverage[place]),
                        "oracle_coverage": None if oracle is None else oracle[place],
                        "reach_by_depth": result.reach[place].tolist(),
                    }
                )  # fmt: skip
    write_rows(path, rows, features)


def print_tables(metrics: Metrics, timing: dict[str, Any]) -> None:
    """The tables on standard output; accepted tokens by depth are in table.md and the report."""
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    for table in tables.main_tables(metrics, timing):
        console.print(table.rich())
        console.print()
    console.print(tables.WORDS)
