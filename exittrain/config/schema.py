"""A recipe: one strict YAML that describes one run of all stages. A field that can be derived is no field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16", "float16"]
Positive = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0)]
Temperatures = Temperature | Annotated[list[Temperature], Field(min_length=1)]  # several: the steps take turns
Builder = Literal["best_first", "beam", "static", "sampled_iid", "sampled_wor"]
Objective = Literal["token", "exit", "exit_depth", "reach", "exit_kl", "reach_kl", "accept_tv", "accept_lk"]


class Section(BaseModel):
    """Every section refuses keys it does not know and cannot be changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ShapeSection(Section):
    """A Llama-style model built from nothing."""

    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    intermediate_size: Positive
    tie_embeddings: bool = True


class OptimSection(Section):
    """One training loop's dial: the same for warm-up, arms and a target made from nothing."""

    steps: Positive = 100
    batch_size: Positive = 4  # sequences an optimiser step, over all ranks and accumulation
    micro_batch_size: Positive | None = None  # sequences a forward; default: batch_size / ranks
    lr: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.05
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    clip: Annotated[float, Field(gt=0)] = 1.0


class ScratchTargetSection(OptimSection):
    """A tiny target trained on the spot, for testbeds: a byte-level BPE and a Llama-style model on local text."""

    corpus: str = "stdlib"  # "stdlib" (Python's own library source) or a folder of text files
    vocab_size: Positive = 1024
    length: Positive = 128
    shape: ShapeSection


class TargetSection(Section):
    model: str | None = None  # folder, GGUF file, hub id, or a name `exittrain models list` knows
    scratch: ScratchTargetSection | None = None
    dtype: Dtype = "float32"
    attention: Literal["sdpa", "eager"] = "sdpa"
    # auto: decoder layers over this process's GPUs in order, then host memory, then disk; default: all on one device.
    # Processes of a node share its GPUs: of n, process i has GPUs i, i + n, i + 2n, ...
    device_map: Literal["auto"] | None = None
    max_memory: dict[int | Literal["cpu"], int | str] = {}  # {0: 40GiB, cpu: 200GiB}; default: a part of what is free


class DrafterSection(Section):
    """What drafts. Fields that are not of the kind keep their default; beside `init` only the dials are set.

    eagle3: a head after EAGLE-3 (arXiv 2503.01840); block: a block drafter after DFlash (arXiv 2602.06036). Both read
    the target's hidden states and share its embeddings.
    """

    kind: Literal["layers", "causal_lm", "eagle3", "block"] = "layers"
    model: str | None = None  # causal_lm: a folder, GGUF file or hub id of the target's tokenizer
    layers: Positive | list[int] | None = None  # layers: the first k of the target, or a list
    shape: ShapeSection | None = None  # causal_lm from nothing, vocabulary and tokenizer of the target
    init: str | None = None  # continue from this saved drafter instead (heads: from any format that can be exported to)
    # eagle3 and block, made from nothing; what is left out is the target's
    feature_layers: Annotated[list[Positive], Field(min_length=1)] | None = None  # indices of `hidden_states`
    draft_vocab: Positive | None = None  # tokens it can draft, the most frequent of the training responses; None: all
    num_layers: Positive | None = None  # default: eagle3 1, block 5
    intermediate_size: Positive | None = None
    # eagle3: the norms go by the names that speculators gives them
    layer_style: Literal["llama", "qwen3"] | None = None  # qwen3 normalises queries and keys, as every block does
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    # block
    block_size: Annotated[int, Field(ge=2)] | None = None  # the root and block_size - 1 masks; default 16
    mask_token_id: Annotated[int, Field(ge=0)] | None = None  # default: an id that the tokenizer never gives
    # dials of training (drafters.base.Dials), also beside `init`
    unroll_steps: Positive = 3  # eagle3: steps of training-time test
    unroll_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # eagle3: step k is weighted by its k-th power
    block_anchors: Positive = 16  # block: blocks of the token loss, a sequence
    block_decay: Annotated[float, Field(gt=0)] = 4.0  # block: place k is weighted by exp(-(k - 1) / block_decay)

    def own_fields(self) -> dict[str, Any]:
        """The fields that mean something for the kind, plain values: what a run's keys are made of."""
        plain = ("model", "layers", "shape")  # in the keys of either kind without a head since before there were heads
        made = SHAPE_FIELDS[self.kind] if self.kind in HEADS else plain
        return self.model_dump(include={"kind", "init", *made, *DIAL_FIELDS.get(self.kind, ())})


_MADE = ("feature_layers", "draft_vocab", "num_layers", "intermediate_size")  # of both kinds of head
_EAGLE = ("layer_style", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SHAPE_FIELDS: dict[str, tuple[str, ...]] = {  # what a drafter is made from; a saved one brings its own
    "layers": ("layers",),
    "causal_lm": ("model", "shape"),
    "eagle3": (*_MADE, *_EAGLE),
    "block": (*_MADE, "block_size", "mask_token_id"),
}
DIAL_FIELDS = {"eagle3": ("unroll_steps", "unroll_decay"), "block": ("block_anchors", "block_decay")}
HEADS = ("eagle3", "block")


class SamplingSection(Section):
    """The serving settings: the exit law, the drafter's ranking and the verifier all use them."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TreeSection(Section):
    builder: Builder = "best_first"
    budget: Annotated[int, Field(gt=0, le=4096)] = 16  # build.base.MAX_BUDGET, without importing torch for it
    depth: Positive = 6
    width: Positive = 8
    branching: str | list[list[int]] = "chain"  # static and sampled


class SourceSection(Section):
    """Where conversations come from.

    kind: `conversations` (responses kept unless regenerate), `prompts` (a prompt set or file; the target answers),
    `magpie` (no data at all), `text` (plain text cut into windows, testbeds).
    """

    kind: Literal["conversations", "prompts", "magpie", "text"]
    path: str | None = None  # JSONL file, folder or hub id of a dataset, or the name of a set in data/prompts
    split: str = "train"
    count: Positive | None = None
    regenerate: bool = False


class GenerationSection(Section):
    """How the target writes user turns (magpie) and responses."""

    temperature: Annotated[float, Field(ge=0)] = 0.9
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 192
    max_prompt_tokens: Positive = 96  # longest user turn written by magpie
    batch_size: Positive = 64


class DataSection(Section):
    train: SourceSection
    heldout: SourceSection | None = None  # default: `heldout_fraction` of train's prompts
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    max_length: Positive = 512  # tokens, prompt included
    too_long: Literal["drop", "cut"] = "drop"  # cut keeps the first max_length tokens when some answer is among them
    system: Literal["template", "none"] | str = "template"  # template's own default, no system turn, or this text
    system_turns: Literal["keep", "merge", "drop", "fail"] = "keep"
    supervise: Literal["all", "last"] = "all"  # which assistant turns are trained
    template: dict[str, bool | int | str] = {}  # variables of the chat template, such as enable_thinking: false
    generation: GenerationSection = GenerationSection()


class WarmupSection(OptimSection):
    token_loss: Literal["kl", "ce"] = "kl"
    temperature: Temperatures | None = None  # of the loss; default: sampling's
    unroll_from: Annotated[float, Field(ge=0, lt=1)] = 0.0  # eagle3: part of the steps before training-time test begins


class CollectSection(Section):
    anchors_per_sequence: Positive = 8
    sequences: Positive | None = None  # default: all of train
    shards: Positive = 4
    top_k_logprobs: Annotated[int, Field(ge=0)] = 0  # target's top-k kept at every node (ids, log-probs, tail mass)


class ArmSection(Section):
    """One trained variant, from the warm start. Anything left out is the train section's."""

    objective: Objective = "token"
    weight: Annotated[float, Field(ge=0)] = 1.0  # lambda
    weight_warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0  # lambda rises linearly over this part of the run
    token_weight: Annotated[float, Field(ge=0)] = 1.0
    normaliser: Literal["nodes", "weights", "anchors"] = "anchors"
    source: Literal["on_policy", "shards"] = "on_policy"
    refresh_every: Positive = 1  # on-policy: optimiser steps between redraws of the same sequences' trees
    anchors_per_sequence: Positive | None = None
    steps: Positive | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    match_time: str | None = None  # run as long as this arm took (steps from the measured step times)
    temperature: Temperatures | None = None  # of the law and the losses; default: sampling's


class LoraSection(Section):
    """Low-rank adapters on linear layers; all else is frozen. Drafters are saved merged."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"  # or [q_proj, ...]


class TrainSection(OptimSection):
    arms: dict[str, ArmSection]
    control: str = "token"  # what every arm is compared with
    token_loss: Literal["kl", "ce"] = "kl"
    anchors_per_sequence: Positive = 8
    lora: LoraSection | None = None  # default: arms train the whole drafter
    deepspeed: str = "zero0"  # a file of recipes/deepspeed, by name or path
    eval_every: Positive = 50
    eval_sequences: Positive = 16
    save_every: Positive = 50
    log_every: Positive = 5


class EvalSection(Section):
    tasks: list[str] = []  # names of eval/benchmarks, or JSONL files of prompts; `heldout` is the run's held-out data
    prompts_per_task: Positive | None = None
    verifiers: list[str] = ["tev"]  # known ones, or `auto`: tree and verifier by each drafter's calibration
    builder: Builder | None = None  # default: tree's
    branching: str | list[list[int]] | None = None  # static and sampled; default: tree's
    temperatures: list[Annotated[float, Field(ge=0)]] = [1.0]
    max_new_tokens: Positive = 64
    decode: bool = True  # False: coverage only
    contexts: Positive | None = None  # coverage at this many anchors of each task (held-out data is one), no decoding
    oracle: bool = True
    speed: bool = True  # time plain decoding of the same target beside it
    bootstrap: Positive = 2000
    batch_size: Positive = 1


class TrackingSection(Section):
    wandb: Literal["online", "offline", "disabled"] = "offline"
    project: str = "exittrain"
    entity: str | None = None
    tensorboard: bool = False  # event files in each stage's folder; needs the package tensorboard


class Recipe(Section):
    name: str
    seed: int = 0
    run_dir: str | None = None  # default: runs/<name>
    target: TargetSection
    drafter: DrafterSection
    sampling: SamplingSection = SamplingSection()
    tree: TreeSection = TreeSection()
    data: DataSection
    warmup: WarmupSection | None = None
    collect: CollectSection | None = None
    train: TrainSection | None = None
    eval: EvalSection | None = None
    tracking: TrackingSection = TrackingSection()
