"""The benchmarks run and say what they compare; their ratios are held at real sizes by the slow tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from exittrain.cli.main import main
from exittrain.errors import InputError
from exittrain.law.seeding import generator_for
from exittrain.stages.benchmarks import run
from exittrain.stages.benchmarks.models import ModelSizes, compare_models, model_table, random_tree
from exittrain.stages.benchmarks.schema import BenchResult
from exittrain.stages.benchmarks.timing import race
from exittrain.stages.benchmarks.trees import VerifyCase, _drawn, make_case, make_cases, tree_parents
from exittrain.stages.benchmarks.verify import (
    DDTREE,
    RATIOS,
    RULES,
    VerifySettings,
    measure_cell,
    measure_verify,
    memory_bytes,
    verify_jobs,
    verify_tables,
)  # fmt: skip
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.verify.registry import VERIFIERS, get_verifier

SMALL_MODELS = ModelSizes(hidden=16, layers=1, vocab=64, length=24, trees=3, nodes=5)
SMALL = VerifySettings(nodes=(6,), vocab=(50,), batch=(1, 3), repeats=1)
FIXED = ("tev", DDTREE, "predraw", "residual")
WORDS = ["--nodes", "6", "--vocab", "50", "--batch", "1,3", "--repeats", "1"]


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    return int(caught.value.code or 0)


def test_a_race_runs_all_in_turn_and_does_not_count_the_first_round():
    order: list[str] = []
    jobs: dict[str, Callable[[], int]] = {
        "a": lambda: order.append("a") or len(order),
        "b": lambda: order.append("b") or len(order),
    }
    runs = race(jobs, 2)
    assert order == ["a", "b"] * 3
    assert runs["a"].results == [3, 5] and runs["b"].results == [4, 6]
    assert len(runs["a"].milliseconds) == 2 and runs["a"].median > 0


def test_the_shape_is_wide_at_the_top_and_bounded():
    parents = tree_parents(64)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    assert len(parents) == 65 and max(depths) == 8 and all(parent < node for node, parent in enumerate(parents))
    assert parents.count(0) == max(parents.count(node) for node in range(65)) == 8
    assert tree_parents(16) == parents[:17]  # the likeliest first, whatever the budget


def test_children_come_from_the_drafters_rows_in_draw_order():
    case = make_case(6, 50, 3)
    assert case.trees.drawn == "without_replacement" and case.target_logits.shape == (3, 7, 50)
    assert torch.equal(case.draft_rows.row_of >= 0, case.trees.has_children())
    assert torch.allclose(case.draft_rows.probs.sum(1), torch.ones(len(case.draft_rows.probs)), atol=1e-5)
    again = make_case(6, 50, 3)
    assert torch.equal(again.trees.token_ids, case.trees.token_ids)
    assert torch.equal(again.target_logits, case.target_logits)
    assert not torch.equal(case.trees.token_ids[0], case.trees.token_ids[1])

    generator, probs = generator_for(0, "draw order"), torch.tensor([[0.7, 0.2, 0.1]])
    pairs = [tuple(_drawn([-1, 0, 0], [0], probs, generator).token_ids[1:].tolist()) for _ in range(4000)]
    for pair, chance in {(0, 1): 0.7 * 2 / 3, (1, 0): 0.2 * 7 / 8, (2, 0): 0.1 * 7 / 9}.items():
        assert abs(pairs.count(pair) / 4000 - chance) < 4 * (chance * (1 - chance) / 4000) ** 0.5


def test_the_drafter_is_accepted_about_two_times_in_three():
    case = make_case(64, 2000, 2)
    known = case.draft_rows.row_of >= 0
    target = case.target_logits[known].float().softmax(-1)
    accepted = torch.minimum(target, case.draft_rows.probs[case.draft_rows.row_of[known]]).sum(1).mean()
    assert 0.55 < float(accepted) < 0.8


@pytest.mark.parametrize("rule", RULES)
def test_every_verdict_is_legal(rule: str):
    case = make_case(6, 50, 3)
    job = verify_jobs([case])[rule]
    seen = set()
    for _ in range(20):
        verdict = job()
        for tree, node, bonus in zip(
            case.trees.trees(), verdict.nodes.tolist(), verdict.bonus_tokens.tolist(), strict=True
        ):
            assert 0 <= node <= 6 and 0 <= bonus < 50
            assert rule not in FIXED or bonus not in tree.token_ids[tree.children(node)].tolist()
            seen.add((node, bonus))
    assert len(seen) > 3  # new draws at every call


def test_rounds_go_through_the_cases_and_rules_share_them():
    """The target is made certain of the root's first child in one case, of its second in the next, and of no other."""
    cases = make_cases(6, 50, 3)
    assert len(cases) == 3 and len(make_cases(6, 50, 8)) == 1
    assert len({tuple(case.trees.token_ids.flatten().tolist()) for case in cases}) == 3
    first, second = cases[0].trees.trees()[0].children(0)
    for case, child in zip(cases, (first, second, first), strict=True):
        free = min(set(range(50)) - set(case.trees.token_ids.flatten().tolist()))
        case.target_logits[:] = -50.0
        case.target_logits[:, 1:, free] = 50.0
        case.target_logits[torch.arange(3), 0, case.trees.token_ids[:, child]] = 50.0
    jobs = verify_jobs(cases)
    for child in (first, second, first, first):
        assert {tuple(jobs[rule]().nodes.tolist()) for rule in FIXED} == {(child,) * 3}


def test_the_baseline_is_predraw():
    """The same mean as the verifier of that name, which is 1 + coverage: a baseline that does other work is none."""
    case, count = make_case(6, 50, 1), 4000
    tree = case.trees.trees()[0]
    many = VerifyCase(
        TreeBatch.from_trees([tree] * count),
        case.target_logits.expand(count, -1, -1),
        DraftRows(case.draft_rows.probs, case.draft_rows.row_of.expand(count, -1)),
    )
    lengths = tree.depths[verify_jobs([many])[DDTREE]().nodes] + 1.0
    expected = get_verifier("predraw").expected_block_length(tree, case.target_logits[0].double().softmax(-1))
    assert abs(float(lengths.mean()) - expected) < 4 * float(lengths.std()) / count**0.5


def test_cells_tables_and_ratios_fit_together():
    part = measure_verify(SMALL)
    assert [(cell.nodes, cell.vocab, cell.batch, cell.inner_nodes) for cell in part.cells] == [
        (6, 50, 1, 4),
        (6, 50, 3, 4),
    ]
    for cell in part.cells:
        assert [time.rule for time in cell.rules] == list(RULES)
        assert all(len(time.milliseconds) == 1 and 1 <= time.mean_block_length <= 5 for time in cell.rules)
        medians = {time.rule: time.median for time in cell.rules}
        assert cell.ratios == {f"{a} / {b}": medians[a] / medians[b] for a, b in RATIOS}
    for table, columns in zip(verify_tables(part), (RULES, RATIOS), strict=True):
        assert len(table.rows) == 2 and all(len(row) == len(table.columns) == 4 + len(columns) for row in table.rows)


def test_a_cell_beyond_the_memory_is_skipped_with_its_reason():
    settings = replace(SMALL, batch=(1, 1000), max_gib=1.5 * memory_bytes(6, 50, 1) / 2**30)
    part = measure_verify(settings)
    assert [cell.batch for cell in part.cells] == [1] and [cell.batch for cell in part.skipped] == [1000]
    assert "--max-gib" in part.skipped[0].reason and part.skipped[0].reason in verify_tables(part)[0].note


def test_the_default_grid_fits_the_default_memory():
    settings = VerifySettings()
    assert max(memory_bytes(*cell) for cell in settings.cells()) < settings.max_gib * 2**30


def test_json_holds_the_result(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "compare_models", lambda repeats, device: compare_models(SMALL_MODELS, repeats, device))
    assert bench(*WORDS, "--json", str(tmp_path / "new" / "bench.json")) == 0
    out = capsys.readouterr().out
    assert "Verify stage: ratios" in out and "Scoring and drafting" in out
    found = BenchResult.model_validate(json.loads((tmp_path / "new" / "bench.json").read_text(encoding="utf-8")))
    assert found.repeats == 1 and found.threads == torch.get_num_threads() and not torch.cuda.is_available()
    assert found.verify is not None and found.models is not None
    assert {cell.device for cell in found.verify.cells} == {"cpu"} and len(found.verify.cells) == 2
    assert found.provenance["versions"]["torch"] and "cpu" in found.provenance["hardware"]


@pytest.mark.parametrize(("part", "title"), [("verify", "Verify stage: ratios"), ("models", "Scoring and drafting")])
def test_one_part_alone(part, title, capsys, monkeypatch):
    monkeypatch.setattr(run, "compare_models", lambda repeats, device: compare_models(SMALL_MODELS, repeats, device))
    assert bench(part, *WORDS) == 0
    out = capsys.readouterr().out
    assert title in out and ("Scoring" in out) == (part == "models")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["verfy"], "bench has no part 'verfy', did you mean 'verify'?"),
        (["--nodes", "16,many"], "--nodes '16,many': give whole numbers above 0"),
        (["--nodes", ""], "--nodes '': give whole numbers above 0"),
        (["--batch", "0"], "--batch '0': give whole numbers above 0"),
        (["--nodes", "5000"], "--nodes 5000: at most 4096"),
        (["--batch", "9999"], "--batch 9999: at most 1024"),
        (["--vocab", "20000000"], "--vocab 20000000: at most 16777216"),
        (["--nodes", "64", "--vocab", "64"], "--vocab 64: trees of 64 nodes need a larger vocabulary"),
        (["--max-gib", "0"], "--max-gib 0.0: give a number above 0"),
        (["--max-gib", "nan"], "--max-gib nan: give a number above 0"),
        (["--json", "."], "--json . cannot be written"),
        (["--json", "file/bench.json"], "--json file/bench.json cannot be written"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_measured(
    arguments, expected, capsys, monkeypatch, tmp_path
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name in ("measure_verify", "compare_models"):
        monkeypatch.setattr(run, name, lambda *_, **__: pytest.fail("measured"))
    assert bench(*arguments) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_repeated_sizes_are_measured_once():
    assert VerifySettings.parse("6, 6", "50", "1", 1, 1.0).nodes == (6,)
    with pytest.raises(InputError, match="--vocab '5x'"):
        VerifySettings.parse("6", "5x", "1", 1, 1.0)


def test_every_rule_of_the_registry_is_timed_or_made_for_other_trees():
    """greedy: temperature 0; rrs: i.i.d. children; block: chains."""
    assert set(VERIFIERS) - set(RULES) == {"greedy", "rrs", "block"}


def test_model_rows_are_measured_and_named():
    rows = compare_models(SMALL_MODELS, repeats=1)
    assert [row.name.split()[0] for row in rows] == ["packed", "best_first"]
    assert all(row.milliseconds > 0 and row.ratio == row.milliseconds / row.baseline_milliseconds for row in rows)
    table = model_table(rows)
    assert len(table.rows) == 2 and "ratio" in table.columns


def test_random_trees_have_the_asked_size():
    tree = random_tree(40, 50, 3, generator_for(0, "t"), root=7)
    assert tree.num_nodes == 40 and int(tree.depths.max()) == 3 and int(tree.token_ids[0]) == 7


@pytest.mark.slow
def test_packing_costs_less_than_a_third():
    """Issue bar: 16 trees of 32 nodes on 200 tokens, ratio in one process."""
    torch.set_num_threads(1)
    packed = compare_models()[0]
    assert packed.ratio < 1 / 3, packed


@pytest.mark.slow
def test_the_bars_of_the_verify_stage():
    """Issue bars: tev at most half of DDTree's work (64 nodes, 152k tokens); traversal at most twice rrs_wor (32k)."""
    torch.set_num_threads(1)
    large, small = (measure_cell(make_cases(64, vocab, 1), 16).ratios for vocab in (151_936, 32_000))
    assert large[f"tev / {DDTREE}"] <= 0.5, large
    assert small["traversal / rrs_wor"] <= 2, small
