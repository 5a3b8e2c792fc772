"""A made-up run folder with all that a report shows, and a reader that holds a page to its rules."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from exittrain.records.files import write_json, write_text
from exittrain.records.shards import shard_name, write_manifest, write_shard
from exittrain.stages.evaluation import summary
from exittrain.stages.evaluation.intervals import Bootstrap
from exittrain.stages.evaluation.measures import Trace
from exittrain.stages.evaluation.results import Comparison, ContextResult, DecodeResult, VerifierResult
from exittrain.stages.evaluation.schema import DrafterInfo, Metrics, Settings

GAIN = {"warm start": 0.9, "token": 1.0, "reach_kl": 1.03, "token_time": 1.02}
PAIRS = (Comparison("reach_kl", "token", "equal steps"), Comparison("reach_kl", "token_time", "equal time"))
BOOT = Bootstrap(resamples=100, seed=0)


def contexts(temperature: float):
    rng = np.random.default_rng(0)
    ids = tuple(f"s{i // 4}" for i in range(160))
    base = np.sort(rng.uniform(0.05, 0.9, (160, 5)), axis=1)[:, ::-1]
    results = {
        name: ContextResult(ids, tuple(range(160)), np.clip(base * gain + rng.normal(0, 0.004, base.shape), 0, 1))
        for name, gain in GAIN.items()
    }
    oracle = ContextResult(ids, tuple(range(160)), np.clip(base * 1.2, 0, 1))
    return summary.summarise_contexts("heldout", temperature, results, oracle, PAIRS, BOOT)


def decoded(verifier: str):
    rng = np.random.default_rng(1)
    results = {}
    for name, gain in GAIN.items():
        traces = [
            Trace(f"p{i}", tuple((1 + rng.binomial(4, 0.45 * gain, 12)).tolist()), 33, (1 + 1.8 * gain,) * 12)
            for i in range(9)
        ]
        results[name] = DecodeResult(tuple(traces), {"p9": "prompt too long for the models' positions"})
    return summary.summarise_decoding("heldout", 1.0, verifier, results, PAIRS, BOOT)


def make_run(folder: Path, name: str = "demo <run>") -> Path:
    rules = {rule: np.full(20, 2.5) for rule in ("tev", "predraw")}
    sides = VerifierResult(tuple(map(str, range(20))), 8, rules, rules, dict.fromkeys(rules, 1e-5))
    roles = {"warm start": "warm start", "token": "control", "token_time": "equal-time control", "reach_kl": "arm"}
    metrics = Metrics(
        name=name, target_fingerprint="ab" * 32, tasks={"heldout": "held-out data of the run"},
        settings=Settings(
            builder="best_first", budget=16, depth=5, width=4, top_k=0, top_p=1.0, max_new_tokens=48, bootstrap=100,
            seed=0,
        ),
        drafters=[
            DrafterInfo(
                name=drafter, role=role, objective=None if role == "warm start" else drafter.partition("_time")[0],
                steps=None if role == "warm start" else 40, sequences=160, fingerprint=drafter[:2] * 32,
            )
            for drafter, role in roles.items()
        ],
        contexts=[contexts(0.5), contexts(1.0)], decode=[decoded("tev"), decoded("predraw")],
        verifiers=[summary.summarise_verifiers("heldout", 1.0, "token", sides, BOOT)],
    )  # fmt: skip
    write_json(folder / "eval" / "metrics.json", metrics.model_dump(mode="json"))
    milliseconds = {"draft": 6.0, "build": 1.0, "score": 20.0, "verify": 0.4, "commit": 0.8}
    stages = [
        {"drafter": name, "task": "heldout", "temperature": 1.0, "verifier": "tev", "milliseconds": milliseconds}
        for name in GAIN
    ]
    speed = [
        {
            "drafter": d, "task": "heldout", "temperature": 1.0, "verifier": "tev", "prompts": 4, "speed_up": 1.6,
            "tokens_per_second": 32.0, "plain_tokens_per_second": 20.0,
        }
        for d in GAIN
    ]  # fmt: skip
    timing = {"schema_version": 1, "hardware": "test CPU", "stages": stages, "speed": speed, "verifiers": [],
              "training_seconds": {"token": 40.0, "reach_kl": 70.0}}  # fmt: skip
    write_json(folder / "eval" / "timing.json", timing)
    for arm in ("token", "reach_kl", "token_time"):
        rows = [{"step": s, "token_loss": 2 + 1 / s, "node_gradient_share": 0.3, "lr": 1e-4} for s in range(1, 41, 5)]
        rows += [{"step": s, "eval/score": 1.5 + s / 200} for s in (20, 40)]
        write_text(folder / "train" / arm / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "provenance.json", {"argv": ["exittrain", "run"], "git": {"commit": "c0ffee", "diff": ""}})
    write_text(folder / "recipe.yaml", "name: demo\n")
    write_shard(folder / "collect" / shard_name(0, 1), [tree_row(f"q{i}", i) for i in range(5)])
    write_manifest(folder / "collect", 1)
    return folder


def tree_row(sequence: str, anchor: int) -> dict:
    parents, depths = [-1, 0, 0, 1, 1, 3, 5, 2], [0, 1, 1, 2, 2, 3, 4, 2]
    reach = [1.0, 0.5, 0.3, 0.3, 0.1, 0.2, 0.1 + 0.01 * anchor, 0.2]
    exits = [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
    return {
        "sequence_id": sequence, "anchor": anchor, "token_ids": list(range(8)), "parents": parents, "depths": depths,
        "draft_logprob": [-1.0] * 7, "target_logprob": [-1.0] * 7, "reach": reach, "miss": exits, "exit": exits,
        "top_ids": [], "top_logprobs": [], "tail_mass": [], "coverage": sum(reach[1:]), "temperature": 1.0,
        "drafter_hash": "d", "target_hash": "t",
    }  # fmt: skip


class Checker(HTMLParser):
    """Every tag is closed in order, ids are unique, links stay inside the page."""

    VOID = ("meta", "br", "path", "use", "rect", "circle")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[k] for k in ("href", "src", "xlink:href") if k in found]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)
