"""Rows of cases.md that no other file covers: data (A), stored keys (B), trees (C), losses (D) and shards (F)."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exittrain
from exittrain.build.base import TreeShape
from exittrain.cli import main as cli
from exittrain.drafters.base import Drafter
from exittrain.drafters.causal import CausalDrafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.exit_law import batch_exit_law, exit_law
from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.packed import pack
from exittrain.models.target import TargetModel
from exittrain.records import files, shards
from exittrain.stages.context import file_hash
from exittrain.stages.training.drafter_loss import LossSettings
from exittrain.stages.training.drafter_task import DrafterTask
from exittrain.stages.training.loop import Trainer
from exittrain.stages.training.sequences import SequenceSet
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.training.trees import StoredTrees
from exittrain.stages.training.zero_config import deepspeed_config
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.registry import get_verifier

VOCAB = 40


def tiny(seed: int, hidden: int = 16, **shape: int) -> object:
    return make_causal_lm(VOCAB, hidden, 1, 2, 32, seed=seed, **shape)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    made = tiny(1)
    with torch.no_grad():
        made.module.lm_head.weight.mul_(10)
    return TargetModel(made.module.requires_grad_(False), None, "target", verify=False)


def sequences(count: int = 4) -> SequenceSet:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"sequence_id": f"s{i}", "token_ids": torch.randint(VOCAB, (9 + i,), generator=generator).tolist()}
        for i in range(count)
    ]
    return SequenceSet.from_rows([{**row, "loss_mask": [0, 0] + [1] * (len(row["token_ids"]) - 2)} for row in rows])


def one_step(target: TargetModel, drafter: Drafter, config: str = "zero0", stored=None, **loss: object):
    settings = LoopSettings(steps=2, batch_size=4, micro_batch_size=2, lr=1e-2, warmup_ratio=0.0)
    losses = LossSettings(**{"shape": TreeShape(4, 3, 2), "anchors_per_sequence": 2, **loss})
    task = DrafterTask(drafter, target, sequences(), settings, losses, stored)
    trainer = Trainer(task, settings, deepspeed_config(config))
    sums, totals, norm = trainer.step(0)
    trainer.engine.close()
    return task.metrics(0, sums, totals), totals, norm


# A. Data


@pytest.mark.parametrize("objective", ["exit", "exit_kl"])
def test_7_trees_without_a_drafted_node(target: TargetModel, objective: str) -> None:
    """Bare roots have no edge to raise, yet all mass leaves there: exit_kl is the KL at the roots. Nothing is NaN."""
    data = sequences()
    roots = [DraftTree(tokens[3:4], [-1]) for tokens in data.tokens]
    trees = TreeBatch.from_trees([DraftTree(tree.token_ids, [-1], "top", [0.0]) for tree in roots])
    edges = torch.zeros(4, 1, dtype=torch.float64)
    stored = StoredTrees(trees, torch.full((4,), 3), edges, [torch.tensor([i]) for i in range(4)])
    drafter = CausalDrafter(tiny(2))
    metrics, totals, norm = one_step(target, drafter, stored=stored, objective=objective)
    assert metrics["coverage"] == 0.0 and totals["trees"] == 4 and 0 < norm < float("inf")
    assert (metrics["node_loss"] == 0.0) == (objective == "exit")
    assert all(p.isfinite().all() for p in drafter.model.module.parameters())


# B. What is stored belongs to what made it


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_29_a_changed_tokenizer_or_template_changes_the_targets_key(tmp_path: Path, name: str) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (tmp_path / file).write_text("{}")
    before = file_hash(str(tmp_path))
    (tmp_path / name).write_text("{ }")
    assert file_hash(str(tmp_path)) != before


def test_6_sequences_longer_than_the_drafters_positions_are_refused(target: TargetModel) -> None:
    with pytest.raises(InputError, match="up to 12 tokens, target and drafter share 10 positions"):
        one_step(target, CausalDrafter(tiny(2, max_positions=10)))


# C. Trees


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rule", ["tev", "predraw", "residual"])
def test_36_a_trees_law_is_the_scaled_targets_at_every_temperature(temperature: float, rule: str) -> None:
    """Two tokens of a full tree over three: enumerated, with the temperature put in by hand on the other side."""
    logits = torch.randn(13, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tree = DraftTree([0, 0, 1, 2, *[0, 1, 2] * 3], [-1, 0, 0, 0, *[1] * 3, *[2] * 3, *[3] * 3], "top")
    law = get_verifier(rule).block_law(tree, process_logits(logits, Sampling(temperature)).exp())
    plain = (logits / temperature).softmax(-1)
    for first in range(3):
        for second in range(3):
            found = sum(p for block, p in law.items() if block[:2] == (first, second))
            assert found == pytest.approx(float(plain[0, first] * plain[1 + first, second]), abs=1e-12)


# D. Losses


def test_65_shapes_that_change_leave_nothing_behind(target: TargetModel) -> None:
    """Lengths 12, then 7, then 12 through one model: no mask or position of an earlier batch is kept."""

    def run(length: int, model: TargetModel) -> torch.Tensor:
        ids = torch.arange(length) % VOCAB
        trees = TreeBatch.from_trees([DraftTree([int(ids[4]), 5, 6], [-1, 0, 1])])
        packed = pack([ids], trees, torch.tensor([0]), torch.tensor([4]))
        return model.hidden(packed.input_ids, packed.position_ids, packed.mask).detach()

    first, _, third = run(12, target), run(7, target), run(12, target)
    assert torch.equal(first, third)


def test_67_no_epsilon_inside_a_logarithm_or_a_quotient() -> None:
    """1e-8 is 0 in half precision: probabilities are handled in log space or excluded, never padded."""
    epsilon = re.compile(r"(log|/)[^\n#]*\+ ?(1e-|eps)|clamp\(min=1e-|clamp_min\(1e-")
    root = Path(exittrain.__file__).parent
    found = [
        f"{file.name}:{number}"
        for file in root.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if epsilon.search(line)
    ]
    assert found == []


def test_68_twelve_nearly_certain_steps_keep_their_mass(tmp_path: Path) -> None:
    """Also after a shard has been written and read: what is stored is as exact as what was computed."""
    tree = DraftTree([0] + [1] * 12, list(range(-1, 12)))
    rows = torch.tensor([[0.0, 0.999, 0.001]], dtype=torch.float64).expand(13, -1)
    single = exit_law(tree, rows)
    edges = torch.tensor([[0.0] + [0.999] * 12], dtype=torch.float64)
    batch = batch_exit_law(TreeBatch.from_trees([tree]), edges.log().nan_to_num(neginf=0.0))
    for law in (single.exit, batch.exit[0]):
        assert float(law.sum()) == pytest.approx(1, abs=1e-12) and (law > 0).all() and law.log().isfinite().all()
    numbers = {"reach": single.reach, "miss": single.miss, "exit": single.exit}
    row = {
        "sequence_id": "s", "anchor": 0, "token_ids": tree.token_ids.tolist(), "parents": tree.parents.tolist(),
        "depths": tree.depths.tolist(), "draft_logprob": [0.0] * 12, "target_logprob": edges[0, 1:].log().tolist(),
        "top_ids": [], "top_logprobs": [], "tail_mass": [], "coverage": float(single.coverage), "temperature": 1.0,
        "drafter_hash": "d", "target_hash": "t", **{name: values.tolist() for name, values in numbers.items()},
    }  # fmt: skip
    shards.write_shard(tmp_path / shards.shard_name(0, 1), [row])
    shards.write_manifest(tmp_path, 1)
    (stored,) = shards.read_shards(tmp_path)
    assert all(stored[name] == values.tolist() for name, values in numbers.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # DeepSpeed's own, on its first import
def test_71_a_bf16_recipe_takes_the_same_step(target: TargetModel) -> None:
    """Micro-batches are summed in bfloat16 too: loss and gradient are those of float32 but for rounding."""
    whole, half = (
        one_step(target, CausalDrafter(tiny(2)), config, objective="reach_kl") for config in ("zero0", "zero1-bf16")
    )
    for name in ("token_loss", "node_loss", "num_tokens", "num_trees"):
        assert half[0][name] == pytest.approx(whole[0][name], rel=0.02)
    assert half[2] == pytest.approx(whole[2], rel=0.05)


# F. Disk


def test_91_a_full_disk_leaves_no_half_shard_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards.write_rows(tmp_path / "a.parquet", [], shards.tree_features())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        shards.write_shard(tmp_path / "b.parquet", [])
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]
    monkeypatch.setattr(cli, "app", lambda **_: full(0))
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 1
    assert capsys.readouterr().err == (
        "exittrain: no space left on the disk: make room and run the same command again, it goes on\n"
    )


def test_93_staging_never_holds_more_than_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[int] = []
    replace = os.replace

    def counted(source: Path, destination: Path) -> None:
        staged.append(len(list(tmp_path.glob(f"{files.TEMPORARY}*"))))
        replace(source, destination)

    monkeypatch.setattr(files.os, "replace", counted)
    for index in range(50):
        shards.write_shard(tmp_path / shards.shard_name(index, 50), [])
    assert max(staged) == 1 and not list(tmp_path.glob(f"{files.TEMPORARY}*"))


def test_95_what_one_rank_cannot_read_stops_them_all(tmp_path: Path) -> None:
    """Rank 1 finds no manifest: both leave with an error that says which, none waits for the other."""
    code = (
        "import sys, torch.distributed as dist; from exittrain.runtime import ranks\n"
        "from exittrain.errors import InputError; from exittrain.records.shards import read_shards\n"
        "from pathlib import Path; number = int(sys.argv[1])\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[2]}/store', rank=number, world_size=2)\n"
        "folder = Path(sys.argv[2], 'shards' if number == 0 else 'absent')\n"
        "assert ranks.on_all(lambda: number) == number\n"
        "try:\n    ranks.on_all(lambda: read_shards(folder))\nexcept InputError as error:\n    print(error)\n"
        "dist.destroy_process_group()"
    )
    shards.write_manifest(tmp_path / "shards", 0)
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen([*command, str(r), str(tmp_path)], stdout=subprocess.PIPE, text=True) for r in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert "rank 1 could not go on: " in said[0] and "does not exist" in said[1]


# The table itself


def test_every_test_that_cases_md_names_exists() -> None:
    """`::name` belongs to the file named before it; `name_*` and `name_...` stand for all that begin so."""
    here = Path(__file__).parent
    tests = {str(path.relative_to(here)): path.read_text(encoding="utf-8") for path in here.rglob("test_*.py")}
    table, count = (here / "cases.md").read_text(encoding="utf-8"), 0
    for number, cell in re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)", table, re.M):
        text = ""
        for path, own, name, rest in re.findall(r"([\w/]+\.py)|(::)?\b(test_\w+)(\*|\.\.\.)?", cell):
            if path:
                text = tests[path]
                continue
            end = "" if rest else r"\("
            assert re.search(f"def {name}{end}", text if own else "\n".join(tests.values())), f"{number}: {name}"
            count += 1
    assert count > 100
