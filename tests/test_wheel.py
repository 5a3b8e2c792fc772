"""A wheel carries the recipes, prompts, benchmarks and batch scripts, and finds them once it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = (
    "recipes/", "data/prompts/", "data/conversations/", "eval/benchmarks/", "eval/suites/", "eval/published/", "slurm/"
)  # fmt: skip


@pytest.mark.slow
def test_wheel_has_and_finds_shared_files(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("exittrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for name in tracked.splitlines():
        if name.startswith(SHARED):
            assert f"exittrain/_share/{name}" in names
    assert not any(name.startswith(("tests/", "data/", "eval/", "recipes/", "slurm/")) for name in names)
    code = (
        "import exittrain; from exittrain.config.load import load_recipe\n"
        "from exittrain.stages.prompts import known_sets\n"
        "print(exittrain.__file__); assert load_recipe('quickstart').name == 'quickstart'; assert known_sets()\n"
        "from exittrain.stages.studies.published import TevFigures, read_figures\n"
        "read_figures('tev-paper', TevFigures)\n"
        "from exittrain.stages.submit.profile import load_profile; from exittrain.stages.submit.script import render\n"
        "from pathlib import Path; assert render(load_profile('gpu'), 'train', 'x', Path('/r'), Path('/h'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout
