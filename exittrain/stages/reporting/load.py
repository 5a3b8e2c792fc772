"""What a report shows of one run, read from its folder; what a run does not have is left out, never guessed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exittrain.errors import InputError
from exittrain.models.sums import check_folder
from exittrain.records.files import check_lines, is_whole, read_json
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import MANIFEST, read_shards
from exittrain.stages.evaluation.schema import Metrics
from exittrain.stages.evaluation.tables import Table

TREE_QUANTILES = (0.9, 0.5, 0.1)  # of coverage: a tree that catches much, one of the middle, one that loses much


@dataclass(frozen=True)
class ExampleTree:
    """One collected tree. labels: each node's token as text, root first; reach, exit: math.md section 2."""

    sequence_id: str
    anchor: int
    coverage: float
    labels: tuple[str, ...]
    parents: tuple[int, ...]
    reach: tuple[float, ...]
    exit: tuple[float, ...]


@dataclass(frozen=True)
class StudyData:
    """A finished study of the run. plots: name -> svg, as it lies on disk."""

    name: str
    description: str
    advice: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: dict[str, str]


@dataclass(frozen=True)
class RunData:
    """curves: an arm's (and the warm-up's) logged rows by name."""

    name: str
    metrics: Metrics
    timing: dict[str, Any]
    curves: dict[str, list[dict[str, Any]]]
    trees: tuple[ExampleTree, ...]
    studies: tuple[StudyData, ...]
    provenance: dict[str, Any]
    recipe: str


def load_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        InputError: it has no evaluation, or a damaged file (named).
    """
    path = folder / "eval" / "metrics.json"
    if not path.is_file():
        raise InputError(f"{folder} has no evaluation: run `exittrain eval` on it first")
    _check_sums(RunFolder(folder))
    try:
        metrics = Metrics.model_validate(read_json(path))
    except ValueError as error:
        raise InputError(
            f"{path} is of another schema ({str(error).splitlines()[0]}): run `exittrain eval` again"
        ) from None
    places = {"warm-up": folder / "warmup"} | {i.name: folder / "train" / i.name for i in metrics.drafters}
    curves = {name: read_lines(place / "metrics.jsonl") for name, place in places.items()}
    return RunData(
        metrics.name, metrics, read_json(folder / "eval" / "timing.json"),
        {name: rows for name, rows in curves.items() if rows},
        example_trees(folder), load_studies(folder), _optional_json(folder / "provenance.json"),
        _recipe(folder / "recipe.yaml"),
    )  # fmt: skip


def _check_sums(run: RunFolder) -> None:
    """Of what is shown here and lies in finished stages; shards, studies and the recipe bring sums of their own."""
    for stage, names in (("eval", "*"), ("train", "*.jsonl"), ("warmup", "*.jsonl")):
        line = run.damage(stage, names) if run.stored_key(stage) is not None else run.mark_damage(stage)
        if line is not None:
            raise InputError(f"{line}: `exittrain run {run.path}` makes it again")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; none when it does not exist, and a last line cut by a kill is left out."""
    rows = []
    for line in _optional_text(path).splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def load_studies(folder: Path) -> tuple[StudyData, ...]:
    """The run's finished studies, by name; of those that kept no tables the sentences.

    Raises:
        InputError: a study.json that is damaged or of another schema, or a plot that is not there (named).
    """
    found = []
    for path in sorted((folder / "studies").glob("*/study.json")):
        note = read_json(path)
        try:
            suite, plots = note["suite"], dict(note.get("plots", {}))
            found.append(
                StudyData(
                    suite["name"], suite["description"], tuple(note["advice"]),
                    tuple(map(_table, note.get("tables", ()))),
                    {name: _plot(path.parent / f"{name}.svg", record) for name, record in plots.items()},
                )
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
            remedy = f"`exittrain eval {folder} --suite {path.parent.name}` makes it again of what it has measured"
            raise InputError(f"study {path.parent} cannot be shown ({error}): {remedy}") from None
    return tuple(found)


def _plot(path: Path, record: dict[str, Any]) -> str:
    if not is_whole(path, record):
        raise ValueError(f"{path.name} is missing or damaged")
    return path.read_text(encoding="utf-8")


def _table(data: dict[str, Any]) -> Table:
    return Table(data["title"], data["note"], tuple(data["columns"]), tuple(map(tuple, data["rows"])))


def example_trees(folder: Path) -> tuple[ExampleTree, ...]:
    """A few of the collected trees, chosen by their coverage; none when nothing was collected."""
    if not (folder / "collect" / MANIFEST).is_file():
        return ()
    rows = sorted(read_shards(folder / "collect"), key=lambda r: (r["coverage"], r["sequence_id"], r["anchor"]))
    if not rows:
        return ()
    chosen = [rows[round(q * (len(rows) - 1))] for q in TREE_QUANTILES]
    tokenizer = _tokenizer(folder / "warmup" / "drafter")
    return tuple(
        ExampleTree(
            row["sequence_id"], row["anchor"], row["coverage"], _labels(row["token_ids"], tokenizer),
            tuple(row["parents"]), tuple(row["reach"]), tuple(row["exit"]),
        )
        for row in chosen
    )  # fmt: skip


def _labels(token_ids: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    if tokenizer is None:
        return tuple(str(token) for token in token_ids)
    texts = (tokenizer.decode([token]) for token in token_ids)
    return tuple(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "∅" for text in texts)


def _tokenizer(folder: Path) -> Any:
    """The tokenizer saved beside the drafter; None for a model without one."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer

    check_folder(folder)
    return AutoTokenizer.from_pretrained(folder)


def _optional_json(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


def _recipe(path: Path) -> str:
    text = _optional_text(path)
    check_lines(text, path)
    return text


def _optional_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
