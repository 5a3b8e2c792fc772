"""Verifiers side by side: everything from target logits to (path, bonus) is on the clock, on the same trees.

Shapes: B trees, M = N+1 nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor

from exittrain.build.base import MAX_BUDGET
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.runtime.progress import track
from exittrain.stages.benchmarks.schema import RuleTime, SkippedCell, VerifyCell, VerifyPart
from exittrain.stages.benchmarks.timing import race
from exittrain.stages.benchmarks.trees import VerifyCase, make_cases, num_cases, tree_parents
from exittrain.stages.evaluation.tables import Table
from exittrain.tree.batch import TreeBatch
from exittrain.verify.base import BatchVerdict
from exittrain.verify.registry import get_verifier

DDTREE = "ddtree predraw"  # the rule `predraw`, with the work DDTree does for it
RULES = ("tev", DDTREE, "predraw", "residual", "rrs_wor", "traversal")
RATIOS = (
    ("tev", DDTREE),
    ("tev", "predraw"),
    ("tev", "residual"),
    ("tev", "rrs_wor"),
    ("traversal", "rrs_wor"),
)
MAX_BATCH = 1024
MAX_VOCAB = 2**24  # torch.multinomial draws from no more


@dataclass(frozen=True)
class VerifySettings:
    """Every combination of nodes (N), vocab (V) and batch (B) is a cell; repeats: measured rounds of each.

    Cells that would need more than max_gib are skipped. Raises InputError on anything that is no such list.
    """

    nodes: tuple[int, ...] = (16, 64, 256)
    vocab: tuple[int, ...] = (32_000, 151_936)
    batch: tuple[int, ...] = (1, 8)
    repeats: int = 5
    max_gib: float = 6.0

    def __post_init__(self) -> None:
        for name, most in (("nodes", MAX_BUDGET), ("vocab", MAX_VOCAB), ("batch", MAX_BATCH)):
            if max(getattr(self, name)) > most:
                raise InputError(f"--{name} {max(getattr(self, name))}: at most {most}")
        if min(self.vocab) <= max(self.nodes):
            raise InputError(
                f"--vocab {min(self.vocab)}: trees of {max(self.nodes)} nodes need a larger vocabulary than that"
            )
        if not self.max_gib > 0:
            raise InputError(f"--max-gib {self.max_gib}: give a number above 0")

    @classmethod
    def parse(cls, nodes: str, vocab: str, batch: str, repeats: int, max_gib: float) -> VerifySettings:
        """From the command line's words: "16,64,256"."""
        return cls(_counts("nodes", nodes), _counts("vocab", vocab), _counts("batch", batch), repeats, max_gib)

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """(nodes, vocab, batch)."""
        return product(self.nodes, self.vocab, self.batch)


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"--{option} {text!r}: give whole numbers above 0 with commas between, such as 16,64")
    return tuple(dict.fromkeys(int(word) for word in words))


@torch.no_grad()
def measure_verify(settings: VerifySettings, devices: Sequence[str] = ("cpu",)) -> VerifyPart:
    """Every cell on every device, one cell in memory at a time."""
    cells, skipped = [], []
    asked = [(device, *cell) for device in devices for cell in settings.cells()]
    for device, nodes, vocab, batch in track(asked, "bench verify", "cells"):
        needed = memory_bytes(nodes, vocab, batch) / 2**30
        if needed > settings.max_gib:
            reason = f"needs about {needed:.1f} GiB, more than --max-gib {settings.max_gib:g}"
            skipped.append(SkippedCell(device=device, nodes=nodes, vocab=vocab, batch=batch, reason=reason))
            continue
        cells.append(measure_cell(make_cases(nodes, vocab, batch, device), settings.repeats, device))
    return VerifyPart(cells=cells, skipped=skipped)


def memory_bytes(nodes: int, vocab: int, batch: int) -> int:
    """What a cell holds at its largest, rounded up: logits and the drafter's rows of all cases, and three float32 rows
    a node of one of them (DDTree's probabilities and draws, or what a rule makes of the inner nodes)."""
    inner = len(set(tree_parents(nodes)[1:]))
    return batch * vocab * (num_cases(batch) * (2 * (nodes + 1) + 4 * inner) + 12 * (nodes + 1))


def measure_cell(cases: Sequence[VerifyCase], repeats: int, device: str = "cpu") -> VerifyCell:
    """All rules in turn, round by round, on cases of one shape: in a round all rules see the same trees."""
    runs = race(verify_jobs(cases), repeats, device)
    medians = {rule: run.median for rule, run in runs.items()}
    batch, size, vocab = cases[0].target_logits.shape
    depths = cases[0].trees.depths[0]
    return VerifyCell(
        device=device, nodes=size - 1, depth=int(depths.max()), inner_nodes=int(cases[0].trees.has_children()[0].sum()),
        vocab=vocab, batch=batch,
        rules=[
            RuleTime(
                rule=rule, milliseconds=run.milliseconds, median=medians[rule],
                mean_block_length=1 + float(depths[torch.stack([v.nodes for v in run.results])].double().mean()),
            )
            for rule, run in runs.items()
        ],
        ratios={f"{first} / {second}": medians[first] / medians[second] for first, second in RATIOS},
    )  # fmt: skip


def verify_jobs(cases: Sequence[VerifyCase]) -> dict[str, Callable[[], BatchVerdict]]:
    """Each rule as a job: one verdict a tree of the next case, new draws at every call."""
    return {rule: _in_turn([_job(rule, case, number) for number, case in enumerate(cases)]) for rule in RULES}


def _in_turn(jobs: Sequence[Callable[[], BatchVerdict]]) -> Callable[[], BatchVerdict]:
    turns = cycle(jobs)
    return lambda: next(turns)()


def _job(rule: str, case: VerifyCase, number: int) -> Callable[[], BatchVerdict]:
    if rule == DDTREE:
        generator = _generator(rule, number, 0, case.target_logits.device)
        return partial(ddtree_predraw, child_maps(case.trees), case.target_logits, generator)
    generators = [_generator(rule, number, row) for row in range(len(case.trees))]
    return partial(
        get_verifier(rule).verify_batch,
        case.trees, case.target_logits, Sampling(), generators, draft_rows=case.draft_rows,
    )  # fmt: skip


def _generator(rule: str, number: int, row: int, device: torch.device | str = "cpu") -> torch.Generator:
    return generator_for(0, "bench", rule, number, row, device=device)


def child_maps(trees: TreeBatch) -> list[list[dict[int, int]]]:
    """Of each tree and node: token -> child. DDTree has them from building the tree, so they are not on the clock."""
    maps = [[dict[int, int]() for _ in row] for row in trees.token_ids.tolist()]
    for tree, tokens, parents in zip(maps, trees.token_ids.tolist(), trees.parents.tolist(), strict=True):
        for node in range(1, len(tokens)):
            tree[parents[node]][tokens[node]] = node
    return maps


def ddtree_predraw(
    maps: list[list[dict[int, int]]], target_logits: Tensor, generator: torch.Generator, temperature: float = 1.0
) -> BatchVerdict:
    """`predraw` as DDTree does it (arXiv 2604.12989 and its code): softmax over the vocabulary and one draw at every
    node, then the walk on the host. Float32, not its model's bfloat16: the draws are to be exact.

    maps: `child_maps` of trees without padding; target_logits [B, M, V].
    """
    scaled = target_logits if temperature == 1 else target_logits / temperature
    probs = scaled.flatten(0, 1).softmax(-1, dtype=torch.float32)
    drawn = torch.multinomial(probs, 1, generator=generator).view(len(maps), -1).tolist()
    ends = []
    for tree, tokens in zip(maps, drawn, strict=True):
        node = 0
        while (child := tree[node].get(tokens[node])) is not None:
            node = child
        ends.append((node, tokens[node]))
    nodes, bonus_tokens = torch.tensor(ends, device=target_logits.device).unbind(1)
    return BatchVerdict(nodes, bonus_tokens)


def verify_tables(part: VerifyPart) -> list[Table]:
    """Milliseconds of each rule, and the ratios: two tables of a row a cell."""
    names = ("device", "nodes", "vocabulary", "batch")
    places = [(cell.device, f"{cell.nodes}", f"{cell.vocab:,}", f"{cell.batch}") for cell in part.cells]
    skipped = "".join(
        f" Skipped: {cell.device}, {cell.nodes} nodes, {cell.vocab:,} tokens, batch {cell.batch}: {cell.reason}."
        for cell in part.skipped
    )
    how = f"bfloat16 logits; torch {torch.__version__}, {torch.get_num_threads()} threads on the CPU."
    return [
        Table(
            "Verify stage: milliseconds a batch (mean block length)",
            "Everything from target logits to (path, bonus), medians, all rules in turn in one process on the same "
            f"trees, children drawn without replacement; {how}{skipped}",
            (*names, *RULES),
            tuple(
                (*place, *(f"{time.median:.2f} ({time.mean_block_length:.1f})" for time in cell.rules))
                for place, cell in zip(places, part.cells, strict=True)
            ),
        ),
        Table(
            "Verify stage: ratios",
            f"Time of the first rule over that of the second. {DDTREE}: softmax and a draw at every node, then the "
            "walk; predraw: the same law, only the nodes on the walk.",
            (*names, *(f"{first} / {second}" for first, second in RATIOS)),
            tuple(
                (*place, *(f"{ratio:.3f}" for ratio in cell.ratios.values()))
                for place, cell in zip(places, part.cells, strict=True)
            ),
        ),
    ]
