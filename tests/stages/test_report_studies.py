"""Studies in a run's report: set beside the rest, escaped, their plots usable on their own too."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from made_run import Checker, make_run

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.records.files import read_json, write_json
from exittrain.records.run_folder import RunFolder
from exittrain.stages.context import key_parts
from exittrain.stages.evaluation.tables import Table
from exittrain.stages.report import report
from exittrain.stages.reporting.figures import PALETTE, figure, svg
from exittrain.stages.studies.base import StudyReport, write_report
from exittrain.stages.studies.settings import load_suite


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
    assert not re.search(r"https?:|<script|url\((?!#)", text)
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
