"""Room on the disk: what each stage may write, and whether file system and quota give it, before anything is written.

Bytes are upper bounds: every sequence is as long as data.max_length, every tree has its whole budget, every decoding
round yields one token. Where a model's config is not known here its stages count as nothing; a disk that fills up all
the same stops a run cleanly (cli/main.py), with what is whole on it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryFile

from exittrain.config.schema import EvalSection, OptimSection, Recipe
from exittrain.errors import InputError
from exittrain.records.share import ROOTS
from exittrain.runtime import ranks
from exittrain.stages.context import StageContext
from exittrain.stages.prompts import expand_tasks
from exittrain.stages.sizes import ModelSize, drafter_size, target_size
from exittrain.stages.training.checkpoints import KEPT

DEFAULT_SEQUENCES = 1000  # assumed where the recipe takes "all there is"
DEFAULT_PROMPTS = 80  # of a task
FILE = 4096  # a small file: a mark, a config, a manifest
SAVED = 4  # bytes of a parameter of a saved model
CHECKPOINT = 12  # of one in a checkpoint: weight and two Adam moments in float32, whatever the engine's settings
WANDB = 300_000  # of a run of wandb, beside its log
WORD = 150  # of a token in a tokenizer's files
TOKEN = 5  # of a stored token: int32 id and int8 mask
TEXT = 8  # of a token's text
LISTED = 18  # of a token, or another small number, on a line of indented JSON
NUMBER = 36  # of a float there
NODE = 56  # of a tree's node in a shard: 3 int32, 1 float32, 4 float64, and what Parquet adds
TOP = 11  # of one of a node's likeliest tokens: int32, float32
TREE = 256  # of a tree beside its nodes, without the hashes, which are written once
SHARD = 10240  # of a shard without rows, and its record
ROUND = 200  # of a decoding round in rounds.jsonl
LOGGED = 600  # of a line of metrics.jsonl
CELL = 6144  # of a measurement, without its numbers: in metrics.json, timing.json, table.md
PAGE, PAGE_DRAFTER, PAGE_TABLE = 150_000, 60_000, 30_000  # of a report; for each drafter; for each task and temperature
FALLOC_FL_KEEP_SIZE = 1
LOOKS, APART_SECONDS = 4, (0.1, 0.4)


def stage_bytes(recipe: Recipe) -> dict[str, float | None]:
    """Upper bounds by stage (`train/<arm>` for each arm) of all that lies in its folder at once while it is made.

    None where a model's size is not known here.
    """
    target, drafter = target_size(recipe), drafter_size(recipe)
    sequences = num_sequences(recipe)
    sizes: dict[str, float | None] = {}
    if recipe.target.scratch is not None:
        scratch = recipe.target.scratch
        sizes["target"] = training_bytes(recipe, scratch, target, 1)
    sizes["data"] = data_bytes(recipe, sequences)
    if recipe.warmup is not None:
        sizes["warmup"] = training_bytes(recipe, recipe.warmup, drafter, 1)
    elif any((recipe.collect, recipe.train, recipe.eval)):
        sizes["warmup"] = None if drafter is None else folder_bytes(drafter)
    if recipe.collect is not None:
        collect = recipe.collect
        used = min(collect.sequences or sequences, sequences)
        sizes["collect"] = collect_bytes(recipe, used * collect.anchors_per_sequence, min(collect.shards, used))
    if recipe.train is not None:
        train = recipe.train
        trained = drafter_size(recipe, train.lora)
        for name, arm in train.arms.items():
            optim = train.model_copy(update={"steps": arm.steps or train.steps})
            every = (train.save_every, min(train.log_every, train.eval_every))
            sizes[f"train/{name}"] = training_bytes(recipe, optim, trained, 2, *every)
    if recipe.eval is not None:
        drafters = 1 + (len(recipe.train.arms) if recipe.train else 0)
        sizes["eval"] = eval_bytes(recipe, recipe.eval, drafters)
        tables = len(expand_tasks(recipe.eval.tasks)) * len(recipe.eval.temperatures)
        sizes["report"] = float(PAGE + PAGE_DRAFTER * drafters + PAGE_TABLE * tables)
    return sizes


def num_sequences(recipe: Recipe) -> int:
    """Of the training data with what is held out of it, as far as it can be known here."""
    return recipe.data.train.count or _num_rows(recipe.data.train.path) or DEFAULT_SEQUENCES


def training_bytes(
    recipe: Recipe, optim: OptimSection, size: ModelSize | None, saved: int, save_every: int = 100, log_every: int = 10
) -> float | None:
    """Checkpoints, those that are kept and the one being written; `saved` models beside them and the one that takes the
    place of another; a log."""
    if size is None:
        return None
    checkpoint = CHECKPOINT * size.trained_parameters + (FILE + 10 * optim.steps) * (1 + ranks.world_size())
    # One more than there are moments to save at: a signal is one too.
    checkpoints = min(KEPT + 1, 1 + math.ceil(optim.steps / save_every))
    log = LOGGED * (2 * math.ceil(optim.steps / log_every) + 8)
    log = log if recipe.tracking.wandb == "disabled" else 2 * log + WANDB
    return checkpoints * checkpoint + (saved + (saved > 1)) * folder_bytes(size) + log + 2 * FILE


def folder_bytes(size: ModelSize) -> float:
    """A saved model: weights in float32, a tokenizer, configs."""
    words = size.vocab_size if size.head is None else size.head.vocab_size
    return float(SAVED * size.num_parameters + WORD * words + 2 * FILE)


def data_bytes(recipe: Recipe, sequences: int) -> float:
    """Token sequences; of conversations their text too, and what the target writes in parts that wait for the end."""
    data, source, generation = recipe.data, recipe.data.train, recipe.data.generation
    held = 0
    if data.heldout is not None:
        held = data.heldout.count or _num_rows(data.heldout.path) or DEFAULT_SEQUENCES
    rows = sequences + held
    written = source.kind in ("prompts", "magpie") or source.regenerate
    tokens = rows * data.max_length
    if source.kind == "text":
        return float(TOKEN * tokens + 64 * rows + 4 * FILE)
    parts = 0.0
    if written:
        new = generation.max_new_tokens + (generation.max_prompt_tokens if source.kind == "magpie" else 0)
        parts = LISTED * rows * new
    return float((TOKEN + TEXT) * tokens + parts + 256 * rows + 4 * FILE)


def collect_bytes(recipe: Recipe, num_trees: int, num_shards: int) -> float:
    """Shards of so many trees."""
    top_k = recipe.collect.top_k_logprobs if recipe.collect else 0
    node = NODE + (TOKEN + TOP * top_k if top_k else 0)
    return float(num_trees * ((recipe.tree.budget + 1) * node + TREE) + num_shards * SHARD + 2 * FILE)


def eval_bytes(recipe: Recipe, section: EvalSection, drafters: int) -> float:
    """Measurements, and the tables made of them."""
    tasks, budget = max(len(expand_tasks(section.tasks)), 1), recipe.tree.budget
    prompts = tasks * (section.prompts_per_task or DEFAULT_PROMPTS)
    cells, answers = drafters * len(section.temperatures) * tasks, prompts * section.max_new_tokens
    total = 8.0 * FILE
    if section.decode:
        rounds = drafters * len(section.temperatures) * len(section.verifiers) * answers
        total += cells * len(section.verifiers) * CELL + rounds * (ROUND + LISTED + 2 * NUMBER)
    if section.contexts:
        contexts, depth = cells * section.contexts, min(recipe.tree.depth, budget)
        total += cells * CELL + contexts * ((NUMBER + TOKEN + TEXT) * depth + 64) + answers * LISTED
        total += section.oracle * contexts / drafters * (NUMBER * budget + 64)  # it may grow a chain
    return total


def check_disk(context: StageContext, names: Sequence[str]) -> None:
    """Is there room for what the named stages have still to write? For the main rank alone.

    Raises:
        InputError: not as much as they may need; nothing was written.
    """
    run, needed, asked = context.run, 0.0, []
    for stage, size in stage_bytes(context.recipe).items():
        name = stage.partition("/")[0]
        if name not in names or size is None or run.stored_key(stage) == context.stage_key(stage):
            continue
        parts = used_bytes(run.path / ".data-parts") if stage == "data" else 0.0
        needed += max(0.0, size - used_bytes(run.path / stage) - parts)  # what another recipe left there will go
        asked += [name] if name not in asked else []
    check_room(run.path, needed, ", ".join(asked), "set run_dir to another disk")


def check_room(folder: Path, needed: float, what: str, remedy: str) -> None:
    """Raises:
    InputError: the file system of `folder`, or a quota there, has less room than `needed` bytes. what: who needs it;
        remedy: what helps beside making room.
    """
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    beginning = f"{what} may need {size_text(needed)} more in {folder}"
    if needed > free:
        raise InputError(f"{beginning}, where {size_text(free)} are free: make room, or {remedy}")
    if needed and not _can_reserve_soon(place, needed):
        left = size_text(_reservable(place, needed))
        raise InputError(
            f"{beginning}, where {size_text(free)} are free but a quota leaves about {left}: make room, or {remedy}"
        )


def _can_reserve_soon(folder: Path, size: float) -> bool:
    """Looks more than once: jobs that start together ask at the same moment, and each takes the room for that long."""
    for look in range(LOOKS):
        if look:
            time.sleep(SystemRandom().uniform(*APART_SECONDS))
        if can_reserve(folder, size):
            return True
    return False


def used_bytes(folder: Path) -> float:
    """Of all files below `folder`; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # another job's temporary file
                continue
    return float(total)


def size_text(size: float) -> str:
    """`1.20 GiB`, `35.0 MiB`, `12 KiB`."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB"


def can_reserve(folder: Path, size: float) -> bool:
    """Whether `size` bytes can be had in `folder` now. They are given back at once and never written.

    Quotas stand in no count of free space, and every file system has a tool of its own for them; asking for the blocks
    is what all of them answer. True where the file system cannot be asked, where nothing may be written (who writes
    will say so), and in memory, where asking takes the memory.
    """
    if _in_memory(folder):
        return True
    try:
        with TemporaryFile(dir=folder) as file:  # without a name, or gone from the folder at once
            return _fallocate(file.fileno(), int(size)) not in (errno.ENOSPC, errno.EDQUOT)
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)


def _reservable(folder: Path, size: float) -> float:
    """The most that can be had, to a hundredth of `size`."""
    low, high = 0.0, size
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if can_reserve(folder, middle) else (low, middle)
    return low


def _fallocate(descriptor: int, size: int) -> int:
    """0 or an errno. Not posix_fallocate: where a file system cannot reserve, that one writes every block."""
    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if call is None:
        return errno.ENOSYS
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return 0 if call(descriptor, FALLOC_FL_KEEP_SIZE, 0, max(size, 1)) == 0 else ctypes.get_errno()


def _in_memory(folder: Path) -> bool:
    """A file system that lies in memory (tmpfs)."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    mounts = (line.split() for line in lines)
    return any(part[2] == number and part[part.index("-") + 1] in ("tmpfs", "ramfs") for part in mounts)


def _num_rows(path: str | None) -> int | None:
    """Lines of a local JSONL file."""
    found = next((root / path for root in (Path(), *ROOTS) if (root / path).is_file()), None) if path else None
    if found is None or found.suffix != ".jsonl":
        return None
    with open(found, "rb") as file:
        return sum(1 for line in file if line.strip())
