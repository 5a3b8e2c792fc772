"""What packing saves at scoring and what batches save at drafting, on models made on the spot: only speed counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.stages.benchmarks.schema import Comparison
from exittrain.stages.benchmarks.timing import race
from exittrain.stages.evaluation.tables import Table
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class ModelSizes:
    """The defaults are what is quoted: 16 trees of 32 nodes behind 200 tokens."""

    hidden: int = 256
    layers: int = 4
    vocab: int = 4096
    length: int = 200
    trees: int = 16
    nodes: int = 32


@torch.no_grad()
def compare_models(
    sizes: ModelSizes | None = None, repeats: int = 5, device: str | torch.device = "cpu"
) -> list[Comparison]:
    """Packed scoring and batched drafting, each beside the plain way of doing the same."""
    sizes = sizes or ModelSizes()
    return [_scoring(sizes, repeats, device), _drafting(sizes, repeats, device)]


def model_table(rows: list[Comparison]) -> Table:
    """The rows as a table for print, Markdown or HTML."""
    return Table(
        "Scoring and drafting side by side",
        f"Medians, both sides in turn in one process; torch {torch.__version__}, {torch.get_num_threads()} threads.",
        ("what", "against", "ms", "ms against", "ratio"),
        tuple(
            (row.name, row.baseline, f"{row.milliseconds:.1f}", f"{row.baseline_milliseconds:.1f}", f"{row.ratio:.3f}")
            for row in rows
        ),
    )


def random_tree(num_nodes: int, vocab_size: int, depth: int, generator: torch.Generator, root: int = 1) -> DraftTree:
    """A tree of `num_nodes` drafted nodes, no deeper than `depth`, tokens of siblings different."""
    tokens, parents, depths = [root], [-1], [0]
    fresh = torch.randperm(vocab_size, generator=generator)[:num_nodes].tolist()
    for token in fresh:
        inner = [node for node, level in enumerate(depths) if level < depth]
        parent = inner[int(torch.randint(len(inner), (), generator=generator))]
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree(tokens, parents, "top")


def _model(sizes: ModelSizes, layers: int, device: str | torch.device) -> TargetModel:
    made = make_causal_lm(sizes.vocab, sizes.hidden, layers, 4, 2 * sizes.hidden, max_positions=1024)
    return TargetModel(made.module.to(device), name="benchmark")


def _compare(
    name: str,
    job: Callable[[], object],
    baseline: str,
    plain: Callable[[], object],
    repeats: int,
    device: str | torch.device,
) -> Comparison:
    runs = race({name: job, baseline: plain}, repeats, device)
    ours, theirs = runs[name].median, runs[baseline].median
    return Comparison(
        name=name, baseline=baseline, milliseconds=ours, baseline_milliseconds=theirs, ratio=ours / theirs
    )


def _scoring(sizes: ModelSizes, repeats: int, device: str | torch.device) -> Comparison:
    target, generator = _model(sizes, sizes.layers, device), generator_for(0, "benchmarks", "scoring")
    sequence = torch.randint(1, sizes.vocab, (sizes.length,), generator=generator)
    anchors = torch.linspace(sizes.length // 2, sizes.length - 1, sizes.trees).long().tolist()
    trees = [random_tree(sizes.nodes, sizes.vocab, 6, generator, int(sequence[anchor])) for anchor in anchors]
    return _compare(
        f"packed scoring of {sizes.trees} trees of {sizes.nodes} nodes on {sizes.length} tokens",
        lambda: target.score_trees(sequence, anchors, trees),
        "each tree alone behind the full context",
        lambda: [target.score_trees(sequence, [a], [t]) for a, t in zip(anchors, trees, strict=True)],
        repeats, device,
    )  # fmt: skip


def _drafting(sizes: ModelSizes, repeats: int, device: str | torch.device) -> Comparison:
    drafter, generator = CausalDrafter(_model(sizes, 1, device)), generator_for(0, "benchmarks", "drafting")
    sequence = torch.randint(1, sizes.vocab, (sizes.length,), generator=generator)
    anchors = torch.linspace(sizes.length // 2, sizes.length - 1, sizes.trees).long()
    shape, build = TreeShape(budget=sizes.nodes, depth=6, width=4), get_builder("best_first")

    def draw(places: Tensor) -> TreeBatch:
        rows = torch.zeros(len(places), dtype=torch.int64)
        return build(drafter.session([sequence], rows, places, Sampling()), shape).trees

    return _compare(
        f"best_first trees of {sizes.nodes} nodes at {sizes.trees} anchors of one sequence",
        lambda: draw(anchors),
        "one anchor at a time",
        lambda: [draw(anchor[None]) for anchor in anchors],
        repeats, device,
    )  # fmt: skip
