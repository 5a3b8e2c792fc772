"""The report: one file that opens anywhere, whole, escaped, the same bytes for the same run."""

from __future__ import annotations

import re

import pytest
from made_run import Checker, make_run

from exittrain.errors import InputError
from exittrain.records.files import write_json
from exittrain.stages.evaluation.schema import Metrics
from exittrain.stages.report import report
from exittrain.stages.reporting.load import example_trees
from exittrain.stages.reporting.page import headline


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
