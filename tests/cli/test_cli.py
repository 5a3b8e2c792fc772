"""The command line: exit codes, one-line errors, plans that write nothing, quick help."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_target import make_target

from exittrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "tests/fixtures/tiny.yaml")
VERBS = ["data", "warmup", "collect", "train", "eval", "report", "run"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = caught.value.code
    return (0 if code is None else int(code)), out, err


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", [*VERBS, "plan", "generate", "models"])
def test_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0 and "Usage: exittrain" in out


@pytest.mark.parametrize("verb", VERBS)
def test_plan_writes_nothing(capsys: pytest.CaptureFixture[str], elsewhere: Path, verb: str) -> None:
    code, out, _ = call(capsys, verb, TINY, "--plan")
    assert code == 0 and "nothing was started" in out
    assert list(elsewhere.iterdir()) == []


def test_plan_shows_overridden_steps(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "plan", TINY, "train.arms.token.steps=77")
    assert re.search(r"train/token +77 ", out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", TINY, "train.stpes=5"], "unknown key 'train.stpes', did you mean 'steps'?"),
        (["run", "nowhere.yaml"], "no recipe 'nowhere.yaml'"),
        (["eval", "nowhere.yaml"], "no recipe 'nowhere.yaml'"),
        (["eval", TINY, "--temperature", "hot"], "give numbers with commas between"),
        (["eval", TINY, "--verifiers", "tve"], "did you mean 'tev'?"),
        (["eval", TINY, "--verifiers", "tev,predraw,tev"], "'eval.verifiers' names tev twice"),
        (["eval", TINY, "--suite", "oracle", "suite.budgets=[1"], "suite.budgets"),
        (["eval", TINY, "--suite", "oracle", "suite.study=verifiers"], "cannot be set"),
        (["eval", "nowhere.yaml", "--suite", "oracle", "--plan"], "no recipe 'nowhere.yaml'"),
        (["eval", "here", "--suite", "oracle", "--plan", "--target", "x"], "no drafter folder 'here'"),
        (["eval", "a", "b", "--suite", "verifiers", "--target", "x"], "calibrates one drafter, 2 are named"),
        (["collect", TINY], "has not been run"),
        (["models", "fetch", "smollm"], "no known model 'smollm'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("exittrain: ") and err.count("\n") == 1 and expected in err


def test_bad_input_writes_nothing(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    call(capsys, "run", TINY, "train.stpes=5")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "Missing argument 'RECIPE': see `exittrain train --help`"),
        (["nonsense"], "No such command 'nonsense'"),
        (["run", TINY, "--nonsense"], "No such option: --nonsense"),
        (["eval", TINY, "--prompts", "0"], "'--prompts'"),
        (["models", "fetch"], "see `exittrain models fetch --help`"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and expected in err


def test_without_arguments_it_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert code == 2 and "Commands" in out + err and "collect" in out + err


def test_interruption_exits_75_and_failure_raises(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from exittrain.errors import Interrupted
    from exittrain.stages import run

    def interrupted(*_: Any) -> None:
        raise Interrupted("stopped by SIGTERM: run the same command again to go on")

    def broken(*_: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(run, "run_stages", interrupted)
    code, _, err = call(capsys, "run", TINY)
    assert code == 75 and err == "exittrain: stopped by SIGTERM: run the same command again to go on\n"
    monkeypatch.setattr(run, "run_stages", broken)
    with pytest.raises(RuntimeError, match="bug"):
        main(["run", TINY])


def test_a_full_disk_is_one_line_whoever_met_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save raises its own error over the system's; safetensors knows the number only."""
    from exittrain.stages import run

    def over_another(*_: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904  # as torch does

    def by_number(*_: Any) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    for failure in (over_another, by_number):
        monkeypatch.setattr(run, "run_stages", failure)
        code, _, err = call(capsys, "run", TINY)
        assert code == 1 and err.count("\n") == 1 and "make room and run the same command again" in err


def test_failure_shows_a_traceback_and_exits_1() -> None:
    code = (
        "import exittrain.config.load as load, exittrain.cli.main as m\n"
        "def bug(*a): raise RuntimeError('bug')\n"
        "load.load_recipe = bug\n"
        "m.main(['plan', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "RuntimeError: bug" in done.stderr


def test_launchers_rank_argument_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--local_rank=0", "plan", TINY)[0] == 0


def test_models_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXITTRAIN_CACHE", str(tmp_path))
    assert call(capsys, "models", "list") == (0, "smollm2-135m\tnot fetched\n", "")


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("drafter", [None, "layers:1"])
def test_generate_prints_text_and_block_length(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, drafter: str | None
) -> None:
    options = ["--target", str(tiny_target), "--max-new-tokens", "12", "--seed", "3"]
    options += ["--drafter", drafter] if drafter else []
    code, out, err = call(capsys, "generate", "hello", *options)
    assert code == 0 and out.endswith("\n")
    assert re.search(r"block length \d\.\d\d \(bonus included", err)
    assert (code, out) == call(capsys, "generate", "hello", *options)[:2]


def test_generate_cuts_the_target_as_served(capsys: pytest.CaptureFixture[str], tiny_target: Path) -> None:
    """The likeliest token alone is the answer of temperature 0, whatever the seed."""
    common = ["generate", "hello", "--target", str(tiny_target), "--max-new-tokens", "12"]
    _, greedy, _ = call(capsys, *common, "--temperature", "0")
    for cut in (["--top-k", "1"], ["--top-p", "1e-6"]):
        assert call(capsys, *common, "--seed", "5", *cut)[:2] == (0, greedy)
    assert call(capsys, *common, "--seed", "5")[1] != greedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--builder", "sampled_iid", "--branching", "2-ary", "--verifier", "rrs"], "rrs on sampled_iid (2-ary)"),
        (["--builder", "sampled_wor", "--verifier", "block", "--depth", "4"], "block on sampled_wor (chain)"),
        (
            ["--builder", "sampled_wor", "--branching", "[[0], [1], [0, 0]]", "--verifier", "traversal"],
            "traversal on sampled_wor (3 rank paths), at most 16 nodes of depth 6",
        ),
        (["--builder", "static", "--branching", "eagle", "--budget", "25", "--verifier", "residual"], "static (eagle)"),
    ],
)
def test_generate_draws_trees(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, options: list[str], said: str
) -> None:
    call_options = ["--target", str(tiny_target), "--drafter", "layers:1", "--max-new-tokens", "8", *options]
    code, _, err = call(capsys, "generate", "hello", *call_options)
    assert code == 0 and said in err, err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--verifier", "traversal"], "traversal"),
        (["--builder", "static", "--branching", "eagle"], "EAGLE's tree has 25 nodes"),
        (["--builder", "static", "--branching", "[[0], 1]"], "--branching '[[0], 1]'"),
        (["--builder", "static", "--branching", "[[0"], "rank paths such as"),
        (["--verifier", "auto"], "has no calibration for verifier 'auto'"),
        (["--dtype", "bfloat"], "did you mean 'bfloat16'?"),
        (["--top-p", "0"], "top_p is 0.0"),
    ],
)
def test_generate_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, options: list[str], expected: str
) -> None:
    code, out, err = call(capsys, "generate", "hello", "--target", str(tiny_target), "--drafter", "layers:1", *options)
    assert (code, out) == (2, "") and err.count("\n") == 1 and expected in err


def test_auto_is_measured_once_and_served(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path
) -> None:
    """A calibration beside the weights, then `generate` and `eval` by it; other weights are refused."""
    from exittrain import TargetModel, load_drafter
    from exittrain.drafters.calibration import Calibration, Choice

    target = TargetModel.from_pretrained(tiny_target)
    folder = tmp_path / "drafter"
    load_drafter("layers:1", target).save(folder)
    choices = tuple(Choice(t, 6, "sampled_wor", 3, 2, "2-ary", "traversal", 1.5, None, None, None) for t in (0.0, 1.0))
    fingerprint = load_drafter(folder, target).fingerprint()
    Calibration(target.fingerprint(), fingerprint, 0, 1.0, "here", choices).save(folder)

    options = ["--target", str(tiny_target), "--drafter", str(folder), "--max-new-tokens", "6"]
    code, out, err = call(capsys, "generate", "hello", *options, "--verifier", "auto", "--budget", "8")
    assert code == 0 and "traversal on sampled_wor (2-ary), at most 6 nodes of depth 3, as its calibration says" in err
    tree = ["--builder", "sampled_wor", "--branching", "2-ary", "--budget", "6", "--depth", "3"]
    assert call(capsys, "generate", "hello", *options, *tree, "--verifier", "traversal")[:2] == (0, out)
    code, _, err = call(capsys, "generate", "hello", *options, "--verifier", "auto", "--budget", "5")
    assert code == 2 and "the smallest budget is 6" in err
    code, _, err = call(capsys, "generate", "hello", *options, "--verifier", "auto", "--dtype", "bfloat16")
    assert code == 2 and "of another target (or of another dtype)" in err and err.count("\n") == 1

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello there"}\n{"prompt": "What is this?"}\n')
    asked = ["--tasks", str(tmp_path / "prompts.jsonl"), "--temperature", "1", "--max-new-tokens", "6"]
    more = ["eval.speed=false", "eval.bootstrap=50", "tree.budget=8", "--output", "out", "--target", str(tiny_target)]
    code, out, err = call(capsys, "eval", str(folder), *asked, *more, "--verifiers", "tev,auto")
    assert code == 0, err
    assert "verifier auto" in out and "chosen by its" in out
    sampled = [*more, "eval.builder=sampled_wor", "eval.branching=2-ary", "eval.contexts=4", "--verifiers", "traversal"]
    code, out, err = call(capsys, "eval", str(folder), *asked, *sampled)
    assert code == 0 and "expected (traversal)" in out, err
    code, _, err = call(capsys, "eval", str(folder), *asked, *more, "--verifiers", "traversal")
    assert code == 2 and "biased on trees of 'best_first'" in err and "eval.builder" in err

    load_drafter("layers:2", target).save(tmp_path / "other")
    shutil.copy(folder / "calibration.json", tmp_path / "other")
    options[3] = str(tmp_path / "other")
    code, _, err = call(capsys, "generate", "hello", *options, "--verifier", "auto")
    assert code == 2 and "is of other weights" in err and "--suite verifiers" in err and err.count("\n") == 1


def test_generate_needs_a_chat_template_or_raw(
    capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(tiny_target, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    code, _, err = call(capsys, "generate", "hello", "--target", str(bare))
    assert code == 2 and "chat template" in err
    assert call(capsys, "generate", "hello", "--target", str(bare), "--raw", "--max-new-tokens", "4")[0] == 0


def test_eval_compares_drafter_folders(capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path) -> None:
    from exittrain import TargetModel, load_drafter

    target = TargetModel.from_pretrained(tiny_target)
    for layers in (1, 2):
        load_drafter(f"layers:{layers}", target).save(tmp_path / f"arm{layers}" / "last")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello there"}\n{"prompt": "What is this?"}\n')
    folders = [str(tmp_path / "arm1/last"), str(tmp_path / "arm2/last")]
    options = ["--tasks", str(tmp_path / "prompts.jsonl"), "--temperature", "1", "--max-new-tokens", "6"]
    more = ["eval.speed=false", "eval.bootstrap=50", "tree.budget=4", "--output", "out", "--target", str(tiny_target)]
    assert call(capsys, "eval", *folders, *options, *more, "--plan")[0] == 0
    code, out, err = call(capsys, "eval", *folders, *options, *more)
    assert code == 0, err
    assert "arm1/last" in out and "arm2/last" in out
    assert (tmp_path / "out" / "metrics.json").is_file()
    code, _, err = call(capsys, "eval", *folders)
    assert code == 2 and "--target" in err
    code, _, err = call(capsys, "eval", folders[0], TINY)
    assert code == 2 and "drafter folders" in err


def test_data_show_prints_samples(capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path) -> None:
    row = '{"messages": [{"role": "user", "content": "Hi %d"}, {"role": "assistant", "content": "It is so."}]}\n'
    (tmp_path / "chat.jsonl").write_text("".join(row % i for i in range(4)))
    recipe = tmp_path / "chat.yaml"
    recipe.write_text(
        f"name: chat\ntarget: {{model: {tiny_target}}}\ndrafter: {{layers: 1}}\n"
        f"data: {{train: {{kind: conversations, path: {tmp_path / 'chat.jsonl'}}}}}\n"
    )
    code, out, err = call(capsys, "data", str(recipe), "--show", "2")
    assert code == 0, err
    assert out.count("It is so.") == 2


@pytest.mark.parametrize("arguments", [["export", "somewhere"], ["sync", "somewhere"], ["submit", TINY]])
def test_what_is_for_one_process_is_refused_to_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: Path, arguments: list[str]
) -> None:
    """A launcher's ranks would export into one folder, or submit a run twice."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # an earlier test may have trained
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "") and list(elsewhere.iterdir()) == []
    line = f"`exittrain {arguments[0]}` is for one process, and 2 were started: leave the launcher out"
    assert err == f"exittrain: {line}\n"
