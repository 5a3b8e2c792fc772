"""One thread a test process: the models are tiny, and threads waiting for each other cost more than they do."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything reads it: no test may depend on a hub, nor wait for the retries of one that cannot be reached.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tiny_run as tiny
import torch

torch.set_num_threads(1)


@pytest.fixture
def real_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb itself, whatever the environment says of it; its service ends with the test."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    import wandb

    wandb.teardown()


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tiny_run(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages of the tiny recipe, finished. Nobody changes it: copy it first."""
    from exittrain.records.run_folder import RunFolder
    from exittrain.stages.context import StageContext
    from exittrain.stages.run import run_all

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_all(StageContext(tiny.recipe_of(tiny_corpus), RunFolder(folder)))
    return folder
