"""The report: one file that opens anywhere, whole, escaped, the same bytes for the same run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.records.files import read_json, write_json, write_text
from exittrain.records.run_folder import RunFolder
from exittrain.records.shards import shard_name, write_manifest, write_shard
from exittrain.stages.context import key_parts
from exittrain.stages.evaluation import summary
from exittrain.stages.evaluation.intervals import Bootstrap
from exittrain.stages.evaluation.measures import Trace
from exittrain.stages.evaluation.results import Comparison, ContextResult, DecodeResult, VerifierResult
from exittrain.stages.evaluation.schema import DrafterInfo, Metrics, Settings
from exittrain.stages.evaluation.tables import Table
from exittrain.stages.report import report
from exittrain.stages.reporting.figures import PALETTE, figure, svg
from exittrain.stages.reporting.load import example_trees
from exittrain.stages.reporting.page import headline
from exittrain.stages.studies.base import StudyReport, write_report
from exittrain.stages.studies.settings import load_suite

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


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("run")
    return report([make_run(folder)], folder / "report" / "index.html").read_text(encoding="utf-8")


def test_it_is_whole_html(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == [] and {"table", "svg", "details", "figure"} <= checker.tags
    assert len(checker.ids) == len(set(checker.ids))
    assert all(link.startswith("#") and link[1:] in set(checker.ids) for link in checker.links)
    gains = ("gain over token (equal steps)", "gain over token_time (equal time)")
    for text in ("1 + coverage", *gains, "tree efficiency"):
        assert text in checker.cells
    assert "reach_kl (arm, 40 steps)" in checker.cells


def test_nothing_comes_from_outside(page):
    assert not re.search(r"https?:|//cdn|@import|<script|<link|url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    assert "#010203" not in page and "#010204" not in page and "currentColor" in page


def test_names_are_escaped(page):
    assert "demo &lt;run&gt;" in page and "demo <run>" not in page


def test_every_part_is_there(page):
    for part in ("gains", "decoding", "depths", "training", "time", "trees", "provenance"):
        assert f'id="run0-{part}"' in page
    assert page.count("<svg") >= 7  # two forests, depths, curves, stages, three trees
    for text in ("c0ffee", "recipe.yaml", "1 skipped: prompt too long", "test CPU", "P(accepted"):
        assert text in page


def test_the_same_bytes_again(tmp_path):
    first = report([make_run(tmp_path / "a")], tmp_path / "1.html").read_bytes()
    assert report([make_run(tmp_path / "b")], tmp_path / "2.html").read_bytes() == first


def test_the_headline_says_what_was_measured(tmp_path):
    metrics = Metrics.model_validate_json((make_run(tmp_path) / "eval" / "metrics.json").read_text())
    lines = headline(metrics)
    assert len(lines) == 4  # two temperatures, two controls
    assert all(line.lead.startswith("reach_kl +") for line in lines)
    assert "over token (equal steps)" in lines[0].text and "interval above zero" in lines[0].text
    alone = metrics.model_copy(update={"contexts": [t.model_copy(update={"gains": []}) for t in metrics.contexts]})
    assert "No control" in headline(alone)[0].text


def test_several_runs_and_runs_that_have_little(tmp_path):
    full, bare = make_run(tmp_path / "a", "full"), make_run(tmp_path / "b", "bare")
    for name in ("train", "collect", "provenance.json", "recipe.yaml"):
        path = bare / name
        for file in sorted(path.rglob("*"), reverse=True) if path.is_dir() else [path]:
            file.rmdir() if file.is_dir() else file.unlink()
    assert example_trees(bare) == ()
    text = report([full, bare], tmp_path / "both.html").read_text()
    assert "2 runs" in text and 'id="run1-gains"' in text and 'id="run1-trees"' not in text
    Checker().feed(text)


def add_study(run: Path, name: str) -> Path:
    """A finished study with one table, one sentence and one plot, written as studies are."""
    with figure(3.0, 2.0) as (made, axes):
        axes[0].plot([1, 2, 3], [1.0, 1.5, 1.7], "-o", color=PALETTE[0], label="a")
        axes[0].legend()
        drawn = svg(made, "block-length", f"Block lengths of {name}")
    folder = run / "studies" / name
    target = SimpleNamespace(fingerprint=lambda: "ab" * 32, device=torch.device("cpu"))
    bench = SimpleNamespace(
        settings=load_suite(name), folder=folder, target=target, seed=0, sampling=Sampling(), tasks=[]
    )
    rows = (("near", f"2.{len(name)} above zero"), ("<b>far</b>", "1.5"))
    table = Table(f"Lengths of {name}", "Exact.", ("drafter", "1 + C"), rows)
    write_report(bench, StudyReport([table], {"block-length": drawn}, {"lines": [1.5]}, [f"{name} says <this>."]))
    return folder


def test_studies_are_set_in_the_page_and_it_stays_whole(tmp_path):
    run = make_run(tmp_path / "a")
    bare = report([run], tmp_path / "bare.html").read_text()
    for name in ("oracle", "verifiers"):
        add_study(run, name)
    (run / "studies" / "tev-paper" / "cells").mkdir(parents=True)  # not finished
    text = report([run, make_run(tmp_path / "b")], tmp_path / "x.html").read_text()
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == [] and len(checker.ids) == len(set(checker.ids))
    assert all(link.startswith("#") and link[1:] in set(checker.ids) for link in checker.links)
    test_nothing_comes_from_outside(text)
    for name in ("oracle", "verifiers"):
        assert f'<h2 id="run0-study-{name}">Study: {name}</h2>' in text and f'id="run1-study-{name}"' not in text
        assert f"<li>{name} says &lt;this&gt;.</li>" in text
        assert f"<figcaption>Block lengths of {name}</figcaption>" in text
        assert load_suite(name).description.partition("'")[0] in text
        assert f'<td class="good">2.{len(name)} above zero</td>' in text
    assert "&lt;b&gt;far&lt;/b&gt;" in text and "tev-paper" not in text
    assert "Study" not in bare and "<ul>" not in bare
    alone = report([run], tmp_path / "alone.html").read_bytes()
    assert report([run], tmp_path / "again.html").read_bytes() == alone


def test_a_plot_on_disk_is_a_file_that_viewers_show(tmp_path):
    text = (add_study(tmp_path, "oracle") / "block-length.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    ids = {element.get("id") for element in root.iter()}
    used = [
        element.get("{http://www.w3.org/1999/xlink}href") for element in root.iter("{http://www.w3.org/2000/svg}use")
    ]
    assert used and all(name[1:] in ids for name in used)
    assert "var(--faint)" not in text and "var(--faint, #" in text


def test_a_new_study_makes_a_new_report(tmp_path):
    serving = dict.fromkeys(("sampling", "tree"), SimpleNamespace(model_dump=dict))
    context = SimpleNamespace(recipe=SimpleNamespace(name="x", **serving), run=RunFolder(tmp_path), stage_key=str)
    assert key_parts(context, "report") == {"eval": "eval", "name": "x"}
    folder = add_study(tmp_path, "oracle")
    first = key_parts(context, "report")
    assert list(first["studies"]) == ["oracle"] and key_parts(context, "report") == first
    write_json(folder / "study.json", {**read_json(folder / "study.json"), "seed": 1})
    assert key_parts(context, "report") != first


def test_a_study_that_cannot_be_shown_is_named(tmp_path):
    run = make_run(tmp_path / "a")
    folder = add_study(run, "oracle")
    whole = read_json(folder / "study.json")
    older = {key: part for key, part in whole.items() if key not in ("tables", "plots")}
    write_json(folder / "study.json", older)
    assert "oracle says" in report([run], tmp_path / "older.html").read_text()
    for data in ({**whole, "suite": 3}, {**whole, "plots": ["none"]}, {**whole, "tables": [{"title": "x"}]}, [1]):
        write_json(folder / "study.json", data)
        with pytest.raises(InputError, match=r"studies/oracle cannot be shown .*--suite oracle` makes") as caught:
            report([run], tmp_path / "x.html")
        assert "\n" not in str(caught.value)
    (folder / "study.json").write_text("{")
    with pytest.raises(InputError, match=r"study\.json is damaged"):
        report([run], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_user_mistakes_name_the_remedy(tmp_path):
    with pytest.raises(InputError, match="exittrain eval"):
        report([tmp_path], tmp_path / "x.html")
    with pytest.raises(InputError, match="at least one"):
        report([], tmp_path / "x.html")
    with pytest.raises(InputError, match="is a folder"):
        report([tmp_path], tmp_path)
    run = make_run(tmp_path / "a")
    write_json(run / "eval" / "metrics.json", {"schema_version": 99})
    with pytest.raises(InputError, match="another schema"):
        report([run], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
