"""The benchmarks run and say what they compare; their ratios are held at real sizes by the slow test."""

from __future__ import annotations

import pytest
import torch

from exittrain.law.seeding import generator_for
from exittrain.stages.benchmarks import BenchmarkSizes, benchmark_table, random_tree, run_benchmarks

SMALL = BenchmarkSizes(
    hidden=16, layers=1, model_vocab=64, length=24, trees=3, nodes=5, verify_nodes=6, verify_vocab=200
)


def test_every_row_is_measured_and_named():
    rows = run_benchmarks(SMALL, repeats=1)
    assert [row.name.split()[0] for row in rows] == ["packed", "best_first", "verify", "verify", "verify"]
    assert all(row.milliseconds > 0 and row.ratio > 0 for row in rows)
    table = benchmark_table(rows)
    assert len(table.rows) == 5 and "ratio" in table.columns


def test_random_trees_have_the_asked_size():
    tree = random_tree(40, 50, 3, generator_for(0, "t"), root=7)
    assert tree.num_nodes == 40 and int(tree.depths.max()) == 3 and int(tree.token_ids[0]) == 7


@pytest.mark.slow
def test_packing_costs_less_than_a_third():
    """Issue bar: 16 trees of 32 nodes on 200 tokens, ratio in one process."""
    torch.set_num_threads(1)
    packed = run_benchmarks()[0]
    assert packed.ratio < 1 / 3, packed
