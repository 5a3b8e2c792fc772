"""What every stage gets: the recipe, the run folder, the stop flag, and what can be derived from them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exittrain.build.base import TreeShape
from exittrain.config.schema import ArmSection, Recipe
from exittrain.drafters.calibration import CALIBRATION_FILE
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.records.files import sha256
from exittrain.records.run_folder import RunFolder
from exittrain.records.schema import CODE_VERSION, SCHEMA_VERSION
from exittrain.records.share import ROOTS, share_path
from exittrain.runtime.parts import WHOLE, Part
from exittrain.runtime.provenance import public_facts
from exittrain.runtime.ranks import is_main, local_rank, local_size
from exittrain.runtime.signals import StopFlag
from exittrain.runtime.tracker import Tracker
from exittrain.runtime.wandb_run import WandbRun, identity_of

if TYPE_CHECKING:
    import torch

    from exittrain.drafters.base import Drafter
    from exittrain.models.placement import Spread
    from exittrain.models.target import TargetModel

WHOLE_HASH_BYTES = 1 << 30  # larger files are hashed in 64 pieces of 1 MiB spread over them, plus their size
STAGES = ("target", "data", "warmup", "collect", "train", "eval", "report")


def say(line: str) -> None:
    """A line for the user on standard error, from the main rank only: standard output is for results."""
    if is_main():
        print(line, file=sys.stderr, flush=True)


@dataclass
class StageContext:
    """Target and drafters are loaded on first use and shared by the stages of one process."""

    recipe: Recipe
    run: RunFolder
    stop: StopFlag = field(default_factory=StopFlag)
    part: Part = WHOLE  # of a stage that several jobs do together
    _target: TargetModel | None = field(default=None, repr=False)
    _keys: dict[str, str] = field(default_factory=dict, repr=False)
    _wandb: WandbRun | None = field(default=None, repr=False)

    @property
    def sampling(self) -> Sampling:
        """The serving settings."""
        return Sampling(**self.recipe.sampling.model_dump())

    @property
    def shape(self) -> TreeShape:
        """The serving tree's shape; the builder's name is `recipe.tree.builder`."""
        tree = self.recipe.tree
        branching = tree.branching if isinstance(tree.branching, str) else tuple(tuple(row) for row in tree.branching)
        return TreeShape(budget=tree.budget, depth=tree.depth, width=tree.width, branching=branching)

    @property
    def device(self) -> torch.device:
        """This process's CUDA device when there is one, else the CPU. EXITTRAIN_DEVICE overrules.

        A launcher may show each process all of a node's devices, or its own alone, one or several.
        """
        import torch

        index = local_rank() % max(1, torch.cuda.device_count())
        default = f"cuda:{index}" if torch.cuda.is_available() else "cpu"
        return torch.device(os.environ.get("EXITTRAIN_DEVICE", default))

    def target(self) -> TargetModel:
        """The recipe's target, loaded once.

        Raises:
            InputError: it is made from nothing and the `target` stage has not been run, or it cannot be loaded.
        """
        if self._target is None:
            import torch

            from exittrain.models.target import TargetModel

            section = self.recipe.target
            if section.scratch is not None:
                self.run.done("target")
                source = str(self.run.path / "target" / "model")
            else:
                source = str(section.model)
            dtype = getattr(torch, section.dtype)
            if self.device.type == "cpu" and section.dtype != "float32" and not _cpu_has(section.dtype):
                say(f"this CPU computes {section.dtype} many times slower than float32: target.dtype=float32 is faster")
            self._target = TargetModel.from_pretrained(
                source, dtype=dtype, attention=section.attention, device=self.device, spread=self._spread()
            )
        return self._target

    def _spread(self) -> Spread | None:
        """The devices that the target's layers may lie on; None: all on this process's own."""
        from exittrain.models.placement import process_spread

        section = self.recipe.target
        return None if section.device_map is None else process_spread(self.device, local_size(), section.max_memory)

    def drafter(self, source: str | Path) -> Drafter:
        """A drafter from a folder or a spec, for this target."""
        from exittrain.drafters.load import load_drafter

        return load_drafter(str(source), self.target())

    def arm(self, name: str) -> ArmSection:
        """A training arm with everything it left out filled in from the train section."""
        train = self.recipe.train
        if train is None or name not in train.arms:
            raise InputError(
                f"the recipe has no arm {name!r}: its arms are {', '.join(train.arms) if train else 'none'}"
            )
        arm = train.arms[name]
        filled = {
            "steps": arm.steps or train.steps,
            "lr": arm.lr or train.lr,
            "anchors_per_sequence": arm.anchors_per_sequence or train.anchors_per_sequence,
            "temperature": self.recipe.sampling.temperature if arm.temperature is None else arm.temperature,
        }
        return arm.model_copy(update=filled)

    def tracker(self, stage: str, resume_step: int | None = None) -> Tracker:
        """Metrics of a stage or an arm ("warmup", "train/reach_kl"), in its folder."""
        tensorboard = self.recipe.tracking.tensorboard
        return Tracker(self.run.stage(stage), stage, resume_step, self.wandb(), tensorboard)

    def wandb(self) -> WandbRun | None:
        """The run's wandb, opened on first use and open until `close`; None where there is none.

        One process writes to it, so the other ranks and the parts of a stage have none.
        """
        tracking, folder = self.recipe.tracking, self.run.path
        if tracking.wandb == "disabled" or self.part != WHOLE or not is_main():
            return None
        if self._wandb is None:
            identity = identity_of(folder, tracking.project, tracking.entity, self.recipe.name)
            config = {"recipe": self.recipe.model_dump(mode="json"), **public_facts()}
            self._wandb = WandbRun(folder, identity, tracking.wandb, config)
        return self._wandb

    def close(self) -> None:
        """End what goes beyond a stage: the wandb run of this process. Safe to call twice."""
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def stage_key(self, name: str) -> str:
        """A hash of all that decides a stage's result: recipe parts, files named there, upstream keys, versions.

        `name` is a stage, or `train/<arm>`: adding an arm leaves the others' keys as they are.
        """
        if name not in self._keys:
            parts = {"stage": name, "schema": SCHEMA_VERSION, "code": CODE_VERSION, **key_parts(self, name)}
            text = json.dumps(parts, sort_keys=True)
            self._keys[name] = hashlib.sha256(text.encode()).hexdigest()
        return self._keys[name]


def _cpu_has(dtype: str) -> bool:
    """Whether this CPU multiplies in half precision by itself: without that float32 is several times faster."""
    import torch

    names = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}[dtype]
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.8; before, nothing is claimed
    return not capabilities or platform.machine() not in ("x86_64", "AMD64") or any(map(capabilities.get, names))


def key_parts(context: StageContext, name: str) -> dict[str, Any]:
    """The ingredients of `stage_key(name)`, JSON-able. What is only about speed or logging is left out."""
    recipe, key = context.recipe, context.stage_key
    serving = {"sampling": recipe.sampling.model_dump(), "tree": recipe.tree.model_dump()}
    if name == "target":
        target = recipe.target
        source = data_hash(target.scratch.corpus) if target.scratch else file_hash(target.model)
        return {
            "section": target.model_dump(exclude={"device_map", "max_memory"}),
            "seed": recipe.seed,
            "files": source,
        }
    if name == "data":
        sources = [source.path for source in (recipe.data.train, recipe.data.heldout) if source is not None]
        files = [data_hash(path) for path in sources]
        return {"section": recipe.data.model_dump(), "seed": recipe.seed, "files": files, "target": key("target")}
    if name == "warmup":
        section = recipe.warmup.model_dump() if recipe.warmup else None
        if section is not None and not section["unroll_from"]:
            del section["unroll_from"]  # runs from before there was one keep their keys
        drafter = recipe.drafter
        files = [file_hash(drafter.model), file_hash(drafter.init)]
        drafter_part = {"drafter": drafter.own_fields(), "files": files}
        return {**drafter_part, "section": section, "sampling": serving["sampling"], "data": key("data")}
    if name == "collect":
        section = recipe.collect.model_dump() if recipe.collect else None
        return {"section": section, **serving, "warmup": key("warmup")}
    if name.startswith("train/"):
        return _arm_parts(context, name.partition("/")[2], serving)
    if name == "train":
        arms = recipe.train.arms if recipe.train else {}
        control = recipe.train.control if recipe.train else None
        return {"arms": {arm: key(f"train/{arm}") for arm in arms}, "control": control, "warmup": key("warmup")}
    if name == "eval":
        section = recipe.eval.model_dump() if recipe.eval else None
        auto = section is not None and "auto" in section["verifiers"]
        chosen = {"calibrations": calibrations(context.run.path)} if auto else {}
        return {"section": section, **serving, "train": key("train"), **chosen}
    if name == "report":
        found = sorted((context.run.path / "studies").glob("*/study.json"))
        studies = {"studies": {place.parent.name: file_hash(str(place)) for place in found}} if found else {}
        return {"eval": key("eval"), "name": recipe.name, **studies}
    raise InputError(f"no stage {name!r}: the stages are {', '.join(STAGES)}")


def _arm_parts(context: StageContext, arm_name: str, serving: dict[str, Any]) -> dict[str, Any]:
    arm, train, key = context.arm(arm_name), context.recipe.train, context.stage_key
    assert train is not None  # context.arm has looked
    shared = train.model_dump(exclude={"arms", "control", "log_every"})
    if train.lora is None:
        del shared["lora"]  # runs from before there were adapters keep their keys
    upstream = {"warmup": key("warmup")}
    if arm.source == "shards":
        upstream["collect"] = key("collect")
    if arm.match_time is not None and arm.match_time != arm_name:
        upstream["match_time"] = key(f"train/{arm.match_time}")
    return {"section": shared, "arm": arm.model_dump(), "seed": context.recipe.seed, **serving, **upstream}


def calibrations(run: Path) -> dict[str, str | None]:
    """Hashes of what was calibrated of a run's drafters, by place: `auto` decodes as these say."""
    places = [*run.glob(f"warmup/drafter/{CALIBRATION_FILE}"), *run.glob(f"train/*/last/{CALIBRATION_FILE}")]
    return {place.relative_to(run).as_posix(): file_hash(str(place)) for place in sorted(places)}


def data_hash(path: str | None) -> str | None:
    """`file_hash` of a data source: a file, a folder, or a prompt set by name (its YAML and the file it reads)."""
    from exittrain.stages.prompts import known_sets, read_set

    if path == "stdlib":
        return f"stdlib of Python {platform.python_version()}"
    if path is None or Path(path).exists():
        return file_hash(path)
    name = path.partition(":")[0]
    if name in known_sets():
        yaml_file = known_sets()[name]
        prompts = read_set(yaml_file)
        own = os.path.join(os.environ.get("EXITTRAIN_DATA", ""), f"{name}.jsonl")
        files = [str(yaml_file), own, *(str(share_path(file)) for file in (prompts.file, prompts.fixture) if file)]
        return hashlib.sha256(json.dumps([file_hash(file) for file in files]).encode()).hexdigest()
    return next((file_hash(str(root / path)) for root in ROOTS if (root / path).exists()), path)


def file_hash(path: str | None) -> str | None:
    """A hash of a file, or of all files of a folder whatever it is called; a name that is no path stands for itself.

    A drafter's calibration is left out: it is measured later and changes nothing that starts from the drafter.
    """
    if path is None or not Path(path).exists():
        return path
    root = Path(path)
    files = (
        [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file() and f.name != CALIBRATION_FILE)
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size} {_content_hash(file)}\n".encode())
    return digest.hexdigest()


def _content_hash(file: Path) -> str:
    size = file.stat().st_size
    if size <= WHOLE_HASH_BYTES:
        return sha256(file)
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        for piece in range(64):
            stream.seek(piece * (size - (1 << 20)) // 63)
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()
