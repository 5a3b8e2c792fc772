"""What a drafter was measured to give: kept beside its weights, read strictly, chosen from by fixed rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exittrain.drafters.calibration import CALIBRATION_FILE, Calibration, Choice
from exittrain.drafters.layers import copy_layers
from exittrain.drafters.load import load_drafter
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.records.run_folder import RunFolder
from exittrain.stages.context import file_hash

TEV = Choice(1.0, 16, "best_first", 6, 8, "chain", "tev", 2.5, 2.4, 2.6, 0.5)


def calibration(*choices: Choice) -> Calibration:
    return Calibration("target", "drafter", 0, 1.0, "a machine", choices or (TEV,))


def test_round_trip(tmp_path: Path) -> None:
    drawn = replace(TEV, builder="sampled_iid", branching=((0,), (1,), (0, 0)), low=None, high=None, round_seconds=None)
    given = calibration(TEV, drawn, replace(TEV, temperature=0))
    assert given.save(tmp_path) == tmp_path / CALIBRATION_FILE
    assert Calibration.load(tmp_path) == given
    assert [path.name for path in tmp_path.iterdir()] == [CALIBRATION_FILE]
    assert Calibration.load(tmp_path / "none") is None


def change(data: dict, *places: str | int, value: object) -> None:
    for place in places[:-1]:
        data = data[place]
    data[places[-1]] = value


@pytest.mark.parametrize(
    ("places", "value", "expected"),
    [
        (["schema_version"], 2, "its schema is 2, this version reads 1"),
        (["surplus"], 1, "key 'surplus' is unknown"),
        (["top_k"], 1.5, "'top_k' cannot be 1.5"),
        (["top_p"], 0, "top_p is 0"),
        (["choices"], [], "at least one"),
        (["choices"], 3, "'choices' cannot be 3"),
        (["choices", 0], 3, "a choice is no mapping"),
        (["choices", 0, "budget"], True, "'budget' cannot be True"),
        (["choices", 0, "budget"], 0, "tree budget is 0"),
        (["choices", 0, "builder"], "best_frist", "did you mean 'best_first'"),
        (["choices", 0, "verifier"], "tve", "did you mean 'tev'"),
        (["choices", 0, "verifier"], "greedy", "calibrate tev"),
        (["choices", 0, "branching"], [[0], ["1"]], "'branching' cannot be"),
        (["choices", 0, "low"], "x", "'low' cannot be 'x'"),
        (["choices", 0, "low"], float("nan"), "not finite"),
        (["choices", 0, "expected_block_length"], 0.5, "no measurement gives that"),
    ],
)
def test_what_does_not_belong_is_one_line(tmp_path: Path, places: list, value: object, expected: str) -> None:
    path = calibration().save(tmp_path)
    data = json.loads(path.read_text())
    del data["own_sha256"]  # written by another hand
    change(data, *places, value=value)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as caught:
        Calibration.load(tmp_path)
    line = str(caught.value)
    assert expected in line and str(path) in line and "delete it" in line and "--suite verifiers" in line
    assert "\n" not in line


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    path = calibration().save(tmp_path)
    text = path.read_text()
    assert text.count('"expected_block_length": 2.') > 0
    path.write_text(text.replace('"expected_block_length": 2.', '"expected_block_length": 3.', 1))
    with pytest.raises(InputError, match=r"calibration\.json cannot be used \(its entries .*delete it"):
        Calibration.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{}", '{"schema_version": 1}'])
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(text)
    with pytest.raises(InputError, match=r"calibration\.json cannot be used .*delete it") as caught:
        Calibration.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_nearest_temperature_of_two_the_lower() -> None:
    known = calibration(*(replace(TEV, temperature=t) for t in (1.0, 0.0, 0.5)))
    for asked, expected in ((0.0, 0.0), (0.2, 0.0), (0.25, 0.0), (0.3, 0.5), (0.75, 0.5), (0.8, 1.0), (7.0, 1.0)):
        assert known.choose(asked, 16).temperature == expected
    assert calibration(TEV).choose(0.0, 16).temperature == 1.0


def test_the_longest_block_within_the_budget() -> None:
    small, large = (replace(TEV, budget=n, expected_block_length=b) for n, b in ((8, 2.0), (32, 3.0)))
    longer = replace(TEV, verifier="residual", expected_block_length=2.7)
    known = calibration(large, TEV, small, longer)
    assert [known.choose(1.0, n) for n in (8, 15, 16, 31, 32, 99)] == [small, small, longer, longer, large, large]
    with pytest.raises(InputError, match="at most 7 nodes: the smallest budget is 8"):
        known.choose(1.0, 7)


def test_equal_blocks_go_to_fixed_trees_then_to_tev_then_to_fewer_nodes_then_by_name() -> None:
    noise = 1 + 1e-12  # one sum in another order
    predraw, residual = (
        replace(TEV, verifier=name, expected_block_length=2.5 * noise) for name in ("predraw", "residual")
    )
    assert calibration(residual, predraw, TEV).choose(1.0, 16) == TEV
    assert calibration(residual, predraw).choose(1.0, 16) == predraw
    fewer = replace(residual, budget=8)
    assert calibration(predraw, residual, fewer).choose(1.0, 16) == fewer
    drawn = replace(TEV, builder="sampled_wor", budget=4)  # at temperature 0 a drawn tree is the fixed one
    traversal = replace(drawn, verifier="traversal", expected_block_length=2.5 * noise)
    assert calibration(traversal, drawn, predraw).choose(1.0, 16) == predraw
    assert calibration(traversal, drawn).fastest(1.0) == drawn
    better = replace(traversal, expected_block_length=2.5 + 1e-5)
    assert calibration(predraw, TEV, better).choose(1.0, 16) == better
    assert calibration(replace(TEV, builder="static"), replace(TEV, builder="beam")).choose(1.0, 16).builder == "beam"


def test_the_fastest_is_by_tokens_a_second() -> None:
    quick = replace(TEV, budget=8, expected_block_length=2.0, round_seconds=0.3)
    untimed = replace(TEV, budget=4, expected_block_length=9.0, round_seconds=None)
    assert calibration(TEV, quick, untimed).fastest(0.9) == quick
    with pytest.raises(InputError, match="no round seconds"):
        calibration(untimed).fastest(1.0)


def test_biased_pairs_cannot_be_written_down() -> None:
    with pytest.raises(InputError):
        replace(TEV, verifier="traversal")
    assert "traversal on sampled_wor (2-ary)" in str(
        replace(TEV, builder="sampled_wor", branching="2-ary", verifier="traversal")
    )


def test_it_comes_along_with_a_folder_and_goes_with_its_weights(tmp_path: Path) -> None:
    target = TargetModel(make_causal_lm(20, 8, 2, 2, 16, max_positions=32).module, name="tiny", verify=False)
    drafter = copy_layers(target, 1)
    drafter.save(tmp_path / "d")
    assert load_drafter(tmp_path / "d", target).calibration is None and drafter.calibration is None
    calibration().save(tmp_path / "d")
    assert load_drafter(tmp_path / "d", target).calibration == calibration()
    (tmp_path / "d" / CALIBRATION_FILE).write_text("{")
    with pytest.raises(InputError, match="cannot be used"):
        load_drafter(tmp_path / "d", target)
    drafter.save(tmp_path / "d")  # training again replaces the folder
    assert not (tmp_path / "d" / CALIBRATION_FILE).exists()


def test_it_is_no_part_of_a_finished_stage_nor_of_the_drafters_identity(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    last = run.stage("train/arm") / "last"
    last.mkdir()
    (last / "model.bin").write_bytes(b"weights")
    before = file_hash(str(last))
    run.finish("train/arm", "key")
    calibration().save(last)
    assert run.is_done("train/arm", "key") and run.damage("train/arm") is None
    assert file_hash(str(last)) == before  # a run that starts from this drafter stays as it is
    calibration(replace(TEV, budget=9)).save(last)
    assert run.is_done("train/arm", "key")
    run.finish("train/arm", "key")  # whenever the list is written again
    calibration().save(last)
    assert run.is_done("train/arm", "key")
