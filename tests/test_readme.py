"""Every command of the README is run: as a plan, or on a tiny model in place of the real one; its Python too."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_target import make_target

from exittrain.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
PLANNED = {"run", "plan", "data", "warmup", "collect", "train", "eval", "report", "submit"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("exittrain")])
def test_exittrain_commands(command: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXITTRAIN_CACHE", str(tmp_path / "cache"))
    for folder in re.findall(r"runs/quickstart\S*", command):
        if "/" in folder.removeprefix("runs/"):
            from exittrain import TargetModel, load_drafter

            load_drafter("layers:1", TargetModel.from_pretrained(target)).save(Path(folder))
        else:
            Path(folder).mkdir(parents=True)
            shutil.copy(ROOT / "recipes/quickstart.yaml", Path(folder, "recipe.yaml"))
    arguments = shlex.split(command.replace("smollm2-135m", str(target)))[1:]
    if arguments[0] == "models":
        arguments = [*shlex.split(command)[1:], *(["--help"] if arguments[1] == "fetch" else [])]
    elif arguments[0] == "generate":
        arguments += ["--max-new-tokens", "4"]
    elif arguments[0] in PLANNED:
        arguments += [] if arguments[0] == "plan" else ["--plan"]
    assert run(arguments) == 0


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_commands(command: str) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    done = subprocess.run([make, "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_other_kind_of_command() -> None:
    assert [c for c in COMMANDS if c.split()[0] not in ("make", "exittrain", "deepspeed")] == []
    launched = [c for c in COMMANDS if c.startswith("deepspeed")]
    assert all("--module exittrain run" in command for command in launched)


def test_python_example(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = example.replace('"smollm2-135m"', repr(str(target))).replace('"layers:2"', '"layers:1"')
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 3


def test_every_recipe_and_folder_it_names_exists() -> None:
    section = README.split("## Recipes")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z0-9.-]+)`", section))
    shipped = {path.stem for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.startswith("conversations")}
    assert shipped == named
    for line in README.split("## What lies where")[1].split("```")[1].splitlines()[2:]:
        words = line.strip().split("   ")[0].split()
        for word in words if words and words[0].endswith("/") else []:
            assert (ROOT / word).is_dir() or (ROOT / "exittrain" / word).is_dir(), word


def test_recipe_example(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (tmp_path / "my.yaml").write_text(example, encoding="utf-8")
    assert run(["plan", str(tmp_path / "my.yaml")]) == 0
