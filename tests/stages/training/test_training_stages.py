"""The stages target, warmup, collect and train on one tiny run, made once: files, damage, resuming, refusals."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import yaml

from exittrain.build.base import TreeShape
from exittrain.config.schema import Recipe, TreeSection
from exittrain.errors import InputError, Interrupted
from exittrain.law.exit_law import exit_law
from exittrain.law.sampling import Sampling
from exittrain.records.files import read_json, write_json
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import read_rows, read_shards, shard_name
from exittrain.runtime.tracker import read_metrics
from exittrain.stages import collect as collect_module
from exittrain.stages import disk
from exittrain.stages import train as train_module
from exittrain.stages.context import StageContext
from exittrain.stages.coverage import coverage_of, draw_and_score, reach_by_depth
from exittrain.stages.data import run_data
from exittrain.stages.evaluation.contexts import grow_scored
from exittrain.stages.run import run_stage, run_stages
from exittrain.stages.scratch import run_target
from exittrain.stages.train import arm_order, run_train
from exittrain.stages.training.held_out import HeldOut
from exittrain.stages.training.trees import tree_generators
from exittrain.stages.warmup import first_drafter, run_warmup, training_sequences, warm_drafter
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.registry import get_verifier

RECIPE = """
name: tiny
target:
  scratch:
    corpus: CORPUS
    vocab_size: 300
    length: 32
    steps: 40
    batch_size: 8
    lr: 1.0e-2
    shape: {hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64}
drafter:
  kind: causal_lm
  shape: {hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 32}
tree: {budget: 6, depth: 3, width: 3}
data:
  train: {kind: text, path: CORPUS, count: 24}
  heldout_fraction: 0.25
  max_length: 24
warmup: {steps: 10, batch_size: 4, lr: 5.0e-3}
collect: {anchors_per_sequence: 2, shards: 3, top_k_logprobs: 4}
train:
  steps: 6
  batch_size: 4
  lr: 1.0e-3
  anchors_per_sequence: 2
  eval_every: 3
  eval_sequences: 4
  save_every: 2
  log_every: 1
  arms:
    token: {}
    same_time: {match_time: reach_kl}
    reach_kl: {objective: reach_kl, refresh_every: 2}
    stored: {objective: exit, source: shards}
tracking: {wandb: disabled}
"""
MODULES = (
    "textwrap",
    "string",
    "shlex",
    "bisect",
    "heapq",
    "keyword",
    "sched",
    "queue",
    "glob",
    "fnmatch",
    "stat",
    "abc",
)


def make_context(run: Path, corpus: Path, **train: object) -> StageContext:
    recipe = yaml.safe_load(RECIPE.replace("CORPUS", str(corpus)))
    recipe["train"] |= train
    return StageContext(Recipe.model_validate(recipe), RunFolder(run))


def collect(context: StageContext) -> None:
    run_stages(context, ["collect"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", folder)
    return folder


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    """All four stages, run once; tests that change it work on a copy."""
    torch.set_num_threads(1)
    context = make_context(tmp_path_factory.mktemp("run"), corpus)
    for stage in (run_target, run_data, run_warmup, collect, run_train):
        stage(context)
    return context


@pytest.fixture
def copied(finished: StageContext, corpus: Path, tmp_path: Path) -> StageContext:
    shutil.copytree(finished.run.path, tmp_path / "run")
    return make_context(tmp_path / "run", corpus)


def test_the_target_learns_and_stands_alone(finished: StageContext) -> None:
    losses = [
        line["eval/loss"] for line in read_metrics(finished.run.path / "target/metrics.jsonl") if "eval/loss" in line
    ]
    assert losses[-1] < losses[0] - 0.1
    target = finished.target()
    text = "def f(x): return 'größe ⭢ 🙂'"
    assert target.tokenizer.decode(target.tokenizer(text)["input_ids"]) == text
    assert target.eos_token_ids == [target.tokenizer.eos_token_id] and target.vocab_size == 300


def test_warmup_learns(finished: StageContext) -> None:
    lines = read_metrics(finished.run.path / "warmup/metrics.jsonl")
    losses = [line["token_loss"] for line in lines if "token_loss" in line]
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines if "eval/coverage" in line] == [5, 10]


def test_records_hold_the_exit_law(finished: StageContext) -> None:
    rows, target = read_shards(finished.run.path / "collect"), finished.target()
    tokens = {row["sequence_id"]: row["token_ids"] for row in read_rows(finished.run.path / "data/train.parquet")}
    assert {row["drafter_hash"] for row in rows} == {finished.drafter(warm_drafter(finished)).fingerprint()}
    assert {row["target_hash"] for row in rows} == {target.fingerprint()}
    for row in rows[::5]:
        tree = DraftTree(row["token_ids"], row["parents"])
        (logprobs,) = target.score_trees(torch.tensor(tokens[row["sequence_id"]]), [row["anchor"]], [tree])
        law = exit_law(tree, logprobs.double().softmax(-1))
        for name in ("reach", "miss", "exit"):
            assert row[name] == pytest.approx(getattr(law, name).tolist(), abs=1e-5), name
        assert row["coverage"] == pytest.approx(float(law.coverage), abs=1e-5)
        assert row["depths"] == tree.depths.tolist()
        best = logprobs.topk(4)
        assert torch.tensor(row["top_logprobs"]).allclose(best.values, atol=1e-4)
        assert torch.tensor(row["tail_mass"]).allclose(1 - best.values.exp().sum(-1), atol=1e-4)
        assert len(row["draft_logprob"]) == len(row["target_logprob"]) == tree.num_nodes


def test_a_damaged_shard_alone_is_made_again(copied: StageContext, capsys: pytest.CaptureFixture) -> None:
    """Named, rebuilt to the same bytes; the others are not touched (cases.md 92, 96)."""
    folder = copied.run.path / "collect"
    before = {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")}
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*.parquet")}
    broken = folder / shard_name(1, 3)
    broken.write_bytes(broken.read_bytes()[:-7])
    with pytest.raises(InputError, match="shard-00001-of-00003"):
        read_shards(folder)
    collect(copied)
    assert {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")} == before
    assert [name for name, time in times.items() if (folder / name).stat().st_mtime_ns != time] == [broken.name]
    assert "shard-00001-of-00003.parquet is damaged" in capsys.readouterr().err


def test_collect_goes_on_where_it_stopped(copied: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made = copied.run.path / "collect", []
    before = {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")}
    copied.run.reset("collect")
    original = collect_module.write_shard

    def write(path: Path, rows: list, key: str) -> object:
        made.append(path.name)
        copied.stop.set("SIGTERM")
        (path.parent / ".tmp-left-behind").write_text("by a kill")
        return original(path, rows, key)

    monkeypatch.setattr(collect_module, "write_shard", write)
    for _ in range(2):
        with pytest.raises(Interrupted):
            collect(copied)
        copied.stop.name = None
    monkeypatch.setattr(collect_module, "write_shard", original)
    collect(copied)
    assert made == [shard_name(0, 3), shard_name(1, 3)]
    assert {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")} == before
    assert not list(folder.glob(".tmp-*"))


def test_collect_looks_at_the_disk_first(copied: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    copied.run.reset("collect")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage(1, 1, 100))
    with pytest.raises(InputError, match="are free: make room, or"):
        run_stage(copied, "collect")
    assert not list((copied.run.path / "collect").glob("shard-*"))


def test_every_arm_has_its_drafters(finished: StageContext) -> None:
    for arm in ("token", "same_time", "reach_kl", "stored"):
        folder = finished.run.path / "train" / arm
        for name in ("best", "last"):
            assert finished.drafter(folder / name).fingerprint()
        steps = read_json(folder / "DONE.json")["num_steps"]
        lines = read_metrics(folder / "metrics.jsonl")
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
        assert all("coverage" in line for line in lines if "loss" in line) == (arm in ("reach_kl", "stored"))
    assert "eval/still_drawn" in (folder / "metrics.jsonl").read_text()


def test_arms_start_alike_and_see_the_same_data(finished: StageContext) -> None:
    first = [
        read_metrics(finished.run.path / f"train/{arm}/metrics.jsonl")[0] for arm in ("token", "reach_kl", "stored")
    ]
    assert first[0]["token_loss"] == pytest.approx(first[1]["token_loss"], rel=1e-5)
    assert first[0]["token_loss"] == pytest.approx(first[2]["token_loss"], rel=1e-5)


def test_matched_time_is_written_once(copied: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a clock decided are kept when the arm runs again, and then give the same drafter."""
    folder = copied.run.path / "train/same_time"
    steps = read_json(folder / "steps.json")
    assert steps["matches"] == "reach_kl" and steps["matched_steps"] == 6
    assert steps["steps"] == max(1, round(6 * steps["step_time_ratio"]))
    weights = (folder / "last/model.safetensors").read_bytes()
    for path in [folder / "DONE.json", folder / "last", folder / "best", *folder.glob("step-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr(train_module, "_time_ratio", lambda *args: 1 / 0)
    run_train(copied)
    assert (folder / "last/model.safetensors").read_bytes() == weights


def test_an_arm_killed_on_the_way_ends_the_same(copied: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied.run.path / "train/reach_kl"
    weights = {name: (folder / name / "model.safetensors").read_bytes() for name in ("best", "last")}
    copied.run.reset("train/reach_kl")
    original = train_module.HeldOut.measure

    def measure(self: object, drafter: object) -> dict[str, float]:
        copied.stop.set("SIGTERM")
        return original(self, drafter)

    monkeypatch.setattr(train_module.HeldOut, "measure", measure)
    with pytest.raises(Interrupted):
        run_train(copied)
    assert not (folder / "DONE.json").exists() and (folder / "step-000003").exists()
    monkeypatch.setattr(train_module.HeldOut, "measure", original)
    copied.stop.name = None
    run_train(copied)
    assert {name: (folder / name / "model.safetensors").read_bytes() for name in ("best", "last")} == weights


def test_arms_at_zero_3_end_as_at_zero_0(finished: StageContext, corpus: Path, tmp_path: Path) -> None:
    """Redraws, evaluation, staleness of stored trees and both saves on a partitioned drafter (cases.md 84)."""
    run = tmp_path / "run"
    shutil.copytree(finished.run.path, run, ignore=shutil.ignore_patterns("train"))
    arms = {
        "reach_kl": {"objective": "reach_kl", "refresh_every": 2},
        "stored": {"objective": "exit", "source": "shards"},
    }
    context = make_context(run, corpus, deepspeed="zero3", arms=arms)
    run_train(context)
    for arm in arms:
        for name in ("best", "last"):
            ours, theirs = (c.drafter(c.run.path / "train" / arm / name).module for c in (context, finished))
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_done_arms_are_not_trained_again(copied: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "_run_arm", lambda *args: 1 / 0)
    run_train(copied)


@pytest.mark.parametrize("builder", ["sampled_wor", pytest.param("sampled_iid", marks=pytest.mark.slow)])
def test_sampled_trees_are_collected_and_trained_on(
    finished: StageContext, corpus: Path, tmp_path: Path, builder: str
) -> None:
    """Twins merged, the records' law exact, the same trees each time; the score is a verifier's expectation."""
    run = tmp_path / "run"
    shutil.copytree(finished.run.path, run, ignore=shutil.ignore_patterns("collect", "train"))
    arms = {
        "token": {},
        "drawn": {"objective": "accept_lk", "refresh_every": 2},
        "stored": {"objective": "accept_tv", "source": "shards", "lr": 1e-9},
    }
    context = make_context(run, corpus, steps=2, eval_every=1, arms=arms)
    tree = TreeSection(builder=builder, budget=9, depth=3, branching="3-ary")
    context = StageContext(context.recipe.model_copy(update={"tree": tree}), context.run)
    collect(context)
    rows, target = read_shards(run / "collect"), context.target()
    tokens = {row["sequence_id"]: row["token_ids"] for row in read_rows(run / "data/train.parquet")}
    for row in rows[::5]:
        tree = DraftTree(row["token_ids"], row["parents"])
        (logprobs,) = target.score_trees(torch.tensor(tokens[row["sequence_id"]]), [row["anchor"]], [tree])
        law = exit_law(tree, logprobs.double().softmax(-1))
        assert row["exit"] == pytest.approx(law.exit.tolist(), abs=1e-5)
    shards = {path.name: path.read_bytes() for path in (run / "collect").glob("*.parquet")}
    context.run.reset("collect")
    collect(context)
    assert {path.name: path.read_bytes() for path in (run / "collect").glob("*.parquet")} == shards
    run_train(context)
    for arm in arms:
        lines = read_metrics(run / "train" / arm / "metrics.jsonl")
        scores = [line["eval/score"] for line in lines if "eval/score" in line]
        assert len(scores) == 2 and all(1 < score < 4 for score in scores)
        assert not any("eval/coverage" in line for line in lines)
    still = [line["eval/still_drawn"] for line in lines if "eval/still_drawn" in line]
    assert still[0] == 1  # by a drafter that hardly moved, from the same numbers


def test_held_out_score_of_sampled_trees_is_what_the_verifier_gets(finished: StageContext) -> None:
    """The mean of verdicts on the same trees comes close to the score, which coverage does not."""
    target, drafter, sampling = finished.target(), finished.drafter(warm_drafter(finished)), Sampling(1.5)
    data, shape = training_sequences(finished, target), TreeShape(budget=6, depth=2, branching="2-ary")
    held_out = HeldOut(target, data, 6, 4, 0, shape, sampling, "sampled_wor")
    places, total, rule = held_out._contexts, 0.0, get_verifier("traversal")
    draws, generator = 200, torch.Generator().manual_seed(0)
    names = [(places.ids[row], int(places.anchors[row])) for row in range(len(places))]
    generators = tree_generators("sampled_wor", names, 0, "held-out tree")
    every = torch.arange(len(places))
    draft, logits = grow_scored(target, drafter, places, every, "sampled_wor", shape, sampling, generators)
    for _ in range(draws):
        verdict = rule.verify_batch(draft.trees, logits, sampling, [generator] * len(places), draft.draft_rows)
        total += float((1 + draft.trees.depths.gather(1, verdict.nodes[:, None])).double().mean())
    score = held_out.measure(drafter)["score"]
    assert score == pytest.approx(total / draws, abs=0.04)
    law = coverage_of(
        target, drafter, places.sequences, places.tree_sequence, places.anchors, shape, sampling, "sampled_wor",
        generators=tree_generators("sampled_wor", names, 0, "held-out tree"),
    )  # fmt: skip
    assert abs(1 + float(law.coverage.mean()) - score) > 0.08


def test_data_of_another_target_is_refused(copied: StageContext) -> None:
    """cases.md 19."""
    file = copied.run.path / "data/manifest.json"
    write_json(file, {**json.loads(file.read_text()), "target": {"name": "other", "fingerprint": "0"}})
    with pytest.raises(InputError, match="made for target 'other'"):
        training_sequences(copied, copied.target())


def test_arms_wait_for_the_one_they_match(corpus: Path, tmp_path: Path) -> None:
    arms = {"c": {"match_time": "b"}, "a": {}, "b": {"match_time": "a"}}
    assert arm_order(make_context(tmp_path, corpus, arms=arms)) == ["a", "b", "c"]
    with pytest.raises(InputError, match="circle"):
        arm_order(make_context(tmp_path, corpus, arms={"a": {"match_time": "b"}, "b": {"match_time": "a"}}))


def test_coverage_depends_on_no_neighbour(finished: StageContext) -> None:
    target, drafter = finished.target(), finished.drafter(warm_drafter(finished))
    data = training_sequences(finished, target)
    owner, anchors = torch.tensor([3, 0, 0, 5]), torch.tensor([7, 2, 11, 4])
    measured = coverage_of(target, drafter, data.tokens, owner, anchors, finished.shape, Sampling())
    assert measured.depth_reach.sum(1).allclose(measured.coverage)
    for i in range(4):
        alone = coverage_of(
            target, drafter, [data.tokens[owner[i]]], torch.zeros(1, dtype=torch.int64), anchors[i : i + 1],
            finished.shape, Sampling(),
        )  # fmt: skip
        assert alone.coverage[0] == pytest.approx(float(measured.coverage[i]), abs=1e-5)


def test_coverage_at_temperature_0_is_that_of_whole_trees(finished: StageContext) -> None:
    """Its own text, where the target's path is long: measured along it alone, and on every node."""
    target, shape, sampling = finished.target(), finished.shape, Sampling(0.0)
    drafter = finished.drafter(warm_drafter(finished))
    tokens = training_sequences(finished, target).tokens[0][:4]
    for _ in range(16):
        tokens = torch.cat([tokens, target.head(target.hidden(tokens[None]))[0, -1:].argmax(-1)])
    anchors = torch.arange(3, 15)
    inputs = (target, drafter, [tokens], torch.zeros_like(anchors), anchors)
    measured = coverage_of(*inputs, shape, sampling)
    whole = draw_and_score(*inputs, torch.arange(len(anchors)), shape, sampling)
    assert measured.coverage.tolist() == whole.law.coverage.tolist() and measured.coverage.max() >= 2
    assert measured.num_nodes.tolist() == (whole.trees.valid.sum(1) - 1).tolist()
    assert torch.equal(measured.depth_reach, reach_by_depth(whole.trees, whole.law.reach, shape.depth))


def test_first_drafters(finished: StageContext) -> None:
    target, section = finished.target(), finished.recipe.drafter
    data = training_sequences(finished, target)
    layers = first_drafter(section.model_copy(update={"kind": "layers", "layers": [1], "shape": None}), target, data, 0)
    assert layers.kind == "layers" and layers.model.config.num_hidden_layers == 1
    fresh = [first_drafter(section, target, data, seed).fingerprint() for seed in (3, 3, 4)]
    assert fresh[0] == fresh[1] != fresh[2]
    init = section.model_copy(update={"init": str(warm_drafter(finished)), "shape": None})
    saved = first_drafter(init, target, data, 0)
    assert saved.fingerprint() == finished.drafter(warm_drafter(finished)).fingerprint()
