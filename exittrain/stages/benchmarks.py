"""Costs side by side in one process: what packing, level-parallel verification and batched drafting save.

Ratios travel between machines better than seconds: both sides of a row run in turn, the median of each is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from exittrain.build.base import TreeShape
from exittrain.build.registry import get_builder
from exittrain.drafters.base import Drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.law.sampling import Sampling, process_logits
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.stages.evaluation.tables import Table
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.registry import get_verifier


@dataclass(frozen=True)
class Benchmark:
    """One comparison. milliseconds and baseline_milliseconds: medians; ratio: the first over the second."""

    name: str
    baseline: str
    milliseconds: float
    baseline_milliseconds: float

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.baseline_milliseconds


@dataclass(frozen=True)
class BenchmarkSizes:
    """The defaults are what is quoted: 16 trees of 32 nodes behind 200 tokens; verifying 64 nodes over 152k."""

    hidden: int = 256
    layers: int = 4
    model_vocab: int = 4096
    length: int = 200
    trees: int = 16
    nodes: int = 32
    verify_nodes: int = 64
    verify_vocab: int = 151_936


@torch.no_grad()
def run_benchmarks(
    sizes: BenchmarkSizes | None = None, repeats: int = 5, device: str | torch.device = "cpu"
) -> list[Benchmark]:
    """Every comparison, measured now. Models are made on the spot: only their speed counts."""
    sizes = sizes or BenchmarkSizes()
    return [*_scoring(sizes, repeats, device), *_drafting(sizes, repeats, device), *_verifying(sizes, repeats, device)]


def benchmark_table(rows: list[Benchmark]) -> Table:
    """The rows as a table for print, Markdown or HTML."""
    return Table(
        "Costs side by side",
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


def _race(
    first: Callable[[], object], second: Callable[[], object], repeats: int, device: object
) -> tuple[float, float]:
    """Median milliseconds of two jobs run in turn, after one unmeasured run of each."""
    spent: tuple[list[float], list[float]] = ([], [])
    for round_number in range(repeats + 1):
        for job, seconds in zip((first, second), spent, strict=True):
            _wait(device)
            began = time.perf_counter()
            job()
            _wait(device)
            if round_number:
                seconds.append(1e3 * (time.perf_counter() - began))
    return median(spent[0]), median(spent[1])


def _wait(device: object) -> None:
    if torch.device(str(device)).type == "cuda":
        torch.cuda.synchronize()


def _model(sizes: BenchmarkSizes, layers: int, device: str | torch.device) -> TargetModel:
    made = make_causal_lm(sizes.model_vocab, sizes.hidden, layers, 4, 2 * sizes.hidden, max_positions=1024)
    return TargetModel(made.module.to(device), name="benchmark")


def _scoring(sizes: BenchmarkSizes, repeats: int, device: str | torch.device) -> list[Benchmark]:
    target, generator = _model(sizes, sizes.layers, device), generator_for(0, "benchmarks", "scoring")
    sequence = torch.randint(1, sizes.model_vocab, (sizes.length,), generator=generator)
    anchors = torch.linspace(sizes.length // 2, sizes.length - 1, sizes.trees).long().tolist()
    trees = [random_tree(sizes.nodes, sizes.model_vocab, 6, generator, int(sequence[anchor])) for anchor in anchors]
    packed, alone = _race(
        lambda: target.score_trees(sequence, anchors, trees),
        lambda: [target.score_trees(sequence, [a], [t]) for a, t in zip(anchors, trees, strict=True)],
        repeats, device,
    )  # fmt: skip
    name = f"packed scoring of {sizes.trees} trees of {sizes.nodes} nodes on {sizes.length} tokens"
    return [Benchmark(name, "each tree alone behind the full context", packed, alone)]


def _drafting(sizes: BenchmarkSizes, repeats: int, device: str | torch.device) -> list[Benchmark]:
    drafter, generator = Drafter(_model(sizes, 1, device)), generator_for(0, "benchmarks", "drafting")
    sequence = torch.randint(1, sizes.model_vocab, (sizes.length,), generator=generator)
    anchors = torch.linspace(sizes.length // 2, sizes.length - 1, sizes.trees).long()
    shape, build = TreeShape(budget=sizes.nodes, depth=6, width=4), get_builder("best_first")

    def draw(places: Tensor) -> TreeBatch:
        rows = torch.zeros(len(places), dtype=torch.int64)
        return build(drafter.session([sequence], rows, places, Sampling()), shape).trees

    together, alone = _race(lambda: draw(anchors), lambda: [draw(a[None]) for a in anchors], repeats, device)
    name = f"best_first trees of {sizes.nodes} nodes at {sizes.trees} anchors of one sequence"
    return [Benchmark(name, "one anchor at a time", together, alone)]


def _verifying(sizes: BenchmarkSizes, repeats: int, device: str | torch.device) -> list[Benchmark]:
    generator = generator_for(0, "benchmarks", "verifying")
    tree = random_tree(sizes.verify_nodes, sizes.verify_vocab, 6, generator)
    shape = (1, sizes.verify_nodes + 1, sizes.verify_vocab)
    logits = 4 * torch.randn(shape, generator=generator)
    for node in range(len(tree.token_ids)):  # a tree that is followed: each node's first child has most of the mass
        if children := tree.children(node):
            logits[0, node, tree.token_ids[children[0]]] = logits[0, node].logsumexp(0) + 0.5
    logits = logits.to(device, torch.bfloat16)
    trees = TreeBatch.from_trees([tree], device)

    def stage(rule: str) -> Callable[[], object]:
        verifier = get_verifier(rule)
        return lambda: verifier.verify_batch(trees, logits, Sampling(), [generator_for(0, "benchmarks", rule)])

    def everywhere() -> list[int]:
        """The plain way: softmax and one draw at every node, then the walk down."""
        drawn = torch.multinomial(process_logits(logits[0], Sampling()).exp(), 1)[:, 0].tolist()
        node, path = 0, list[int]()
        while True:
            step = [child for child in tree.children(node) if int(tree.token_ids[child]) == drawn[node]]
            if not step:
                return [*path, drawn[node]]
            node = step[0]
            path.append(node)

    name = f"verify stage, {sizes.verify_nodes} nodes, {sizes.verify_vocab:,} tokens, bfloat16: "
    rows = []
    for rule in ("tev", "predraw", "residual"):
        ours, plain = _race(stage(rule), everywhere, repeats, device)
        rows.append(Benchmark(name + rule, "softmax and draw at every node, then walk", ours, plain))
    return rows
