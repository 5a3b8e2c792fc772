"""One cluster for all tests here; without SLURM's programs they are skipped."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_chain import Chain
from slurm_cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"no SLURM here ({', '.join(missing)} not found): `make test-slurm` installs it")
    running = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def cluster(started: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, seen by this process and by what it starts."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, started.environment[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return started


@pytest.fixture
def chain(cluster: Cluster, tmp_path: Path, corpus: Path) -> Chain:
    return Chain(cluster, tmp_path / "a run", corpus)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen files of the standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    for file in sorted((Path(sysconfig.get_paths()["stdlib"]) / "json").glob("*.py")):
        shutil.copy(file, folder)
    shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py", folder)
    return folder
