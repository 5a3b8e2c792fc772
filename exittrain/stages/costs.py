"""What training costs, by arithmetic: positions put through target and drafter, floating-point operations, memory.

Rounded up in doubt: every sequence is as long as data.max_length, every tree has its whole budget.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exittrain.config.schema import ArmSection, OptimSection, Recipe
from exittrain.errors import InputError
from exittrain.law.objectives import get_objective
from exittrain.law.sampling import Sampling, training_samplings
from exittrain.models.features import CACHE_BYTES
from exittrain.records.share import share_path
from exittrain.runtime import ranks
from exittrain.stages.sizes import ModelSize

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_BYTES = 2 << 30  # of float32 logits held at once on a GPU: a chunk of rows, its logarithms and their gradients
LAYER_NUMBERS = 34  # hidden-sized numbers that a trained layer keeps of a position for its backward pass
FORWARD_NUMBERS = 20  # of one layer at work, where nothing is kept
CONTEXT_TOKENS = 8192  # the target runs at most so many columns at once (training.labelled_trees.TARGET_TOKENS)


@dataclass(frozen=True)
class Loop:
    """One training loop of a recipe. anchors: trees grown in each sequence; shards: they are stored, and scored where
    the objective needs no more than their edges; unroll_from: part of the steps before an EAGLE head unrolls; greedy:
    part of the steps at temperature 0, where no more of a tree is run than the target's path through it."""

    recipe: Recipe
    optim: OptimSection
    num_sequences: int
    token_loss: str = "kl"
    anchors: int = 0
    shards: bool = False
    on_rows: bool = False
    trained: ModelSize | None = None
    target: ModelSize | None = None
    unroll_from: float = 0.0
    greedy: float = 0.0

    @classmethod
    def of_arm(
        cls, recipe: Recipe, arm: ArmSection, num_sequences: int, drafter: ModelSize | None, target: ModelSize | None
    ) -> Loop:
        train = recipe.train
        assert train is not None  # it has the arm
        optim, on = train.model_copy(update={"steps": arm.steps or train.steps}), get_objective(arm.objective).on
        anchors = 0 if on == "nothing" else arm.anchors_per_sequence or train.anchors_per_sequence
        samplings = training_samplings(Sampling(recipe.sampling.temperature), arm.temperature)
        greedy = sum(sampling.greedy for sampling in samplings) / len(samplings)
        return cls(
            recipe, optim, num_sequences, train.token_loss, anchors, arm.source == "shards", on == "rows", drafter,
            target, greedy=greedy,
        )  # fmt: skip

    @property
    def length(self) -> int:
        return self.recipe.data.max_length

    @property
    def nodes(self) -> int:
        """Tree nodes in one sequence, roots left out: they are part of it."""
        return self.anchors * self.recipe.tree.budget

    @property
    def scores_trees(self) -> bool:
        """Whether the target is run on them."""
        return bool(self.anchors) and not (self.shards and not self.on_rows)

    @property
    def mean_nodes(self) -> float:
        """Tree nodes in one sequence that are run, averaged over the loop's steps."""
        tree = self.recipe.tree
        spared = self.greedy * max(0, tree.budget - tree.depth) if self.scores_trees else 0.0
        return self.nodes - self.anchors * spared

    @property
    def trained_positions(self) -> int:
        """Positions of the drafter's training forward on one sequence."""
        head, dials = None if self.trained is None else self.trained.head, self.recipe.drafter
        if head is None:
            return self.length + self.anchors * (self.recipe.tree.budget + 1)
        if head.kind == "block":
            return (dials.block_anchors + self.anchors) * int(head.block_size or 0)
        return self.length * dials.unroll_steps + self.anchors * (self.recipe.tree.budget + 1)

    @property
    def mean_positions(self) -> float:
        """The same, averaged over the loop's steps."""
        blocks = self.trained is not None and self.trained.head is not None and self.trained.head.kind == "block"
        spared = 0.0 if blocks else self.nodes - self.mean_nodes
        return self.trained_positions - spared - self.unroll_from * self.length * (self.recipe.drafter.unroll_steps - 1)

    @property
    def passes(self) -> int:
        """Sequences the loop sees, the same one once an epoch."""
        return self.optim.steps * self.optim.batch_size

    @cached_property
    def target_tokens(self) -> int:
        """Positions put through the target: the sequence and the nodes of its trees that are run, each time.

        A head's features and the states beside them are computed once and kept, as far as they fit.
        """
        scored = self.scores_trees
        trees = round(self.passes * (self.length + self.mean_nodes)) if scored else 0
        if self.trained is not None and self.trained.head is not None:
            return trees + self._computed_features() * self.length
        along = self.token_loss == "kl" and not scored  # else it comes from the same forward
        return trees + (self.passes * self.length if along else 0)

    def _computed_features(self) -> int:
        """Sequences whose features are computed: each rank keeps those it has seen, and sees others in every epoch."""
        assert self.trained is not None and self.trained.head is not None
        ranked, count = ranks.world_size(), min(self.num_sequences, self.passes)
        epochs = self.passes / count
        unseen = (1 - 1 / ranked) ** math.floor(epochs) * (1 - (epochs % 1) / ranked)
        seen = count * (1 - unseen)  # by one rank
        width = self.trained.head.feature_size + self.trained.head.target_hidden_size
        room = CACHE_BYTES // (self.length * width * BYTES[self.recipe.target.dtype])
        kept = min(1.0, room / seen)
        return math.ceil(ranked * kept * seen + (1 - kept) * self.passes)

    @property
    def step_operations(self) -> float | None:
        """Floating-point operations of an average step: two a weight and position of a forward, six where trained."""
        if self.trained is None or self.target is None:
            return None
        target = 2.0 * self.target.active_parameters * self.target_tokens / self.optim.steps
        drawn = self.trained_positions if self.anchors else 0  # of whole trees, however little of them is run later
        passes = 6.0 * self.mean_positions + 2.0 * drawn
        return target + passes * self.optim.batch_size * self.trained.active_parameters

    @property
    def memory_bytes(self) -> float | None:
        """Of one process: both models, the optimiser's states, what one micro-batch keeps, and the target at work."""
        if self.trained is None or self.target is None:
            return None
        micro = self.optim.micro_batch_size or math.ceil(self.optim.batch_size / ranks.world_size())
        weights = weight_bytes(self.recipe, self.target) + drafter_bytes(self.recipe, self.trained)
        kept = micro * kept_bytes(self.trained, self.length, self.trained_positions)
        columns = max(self.length, min(CONTEXT_TOKENS, micro * self.length)) + self.nodes
        logits = logit_bytes(micro * self.trained_positions, self.target.vocab_size)
        return weights + kept + forward_bytes(self.target, columns, self.recipe) + logits


def matched_steps(own: Loop, other: Loop) -> int:
    """Steps of `own` that take as long as `other` does, by operations (positions where the sizes are unknown)."""
    mine, theirs = own.step_operations, other.step_operations
    ratio = other.mean_positions / own.mean_positions if mine is None or theirs is None else theirs / mine
    return max(1, round(other.optim.steps * ratio))


def weight_bytes(recipe: Recipe, size: ModelSize) -> float:
    """Of a model in the target's dtype."""
    return float(size.num_parameters * BYTES[recipe.target.dtype])


def kept_bytes(size: ModelSize, length: int, positions: int) -> float:
    """What the backward pass needs of one sequence, in float32: layers' numbers, features, and the attention's mask."""
    features = 0 if size.head is None else length * (size.head.feature_size + 2 * size.num_layers * size.kv_width)
    columns = positions if size.head is None else length + positions
    return 4.0 * (positions * LAYER_NUMBERS * size.hidden_size * size.num_layers + features + positions * columns)


def logit_bytes(rows: int, vocab_size: int) -> float:
    """Rows of float32 logits with their logarithms and gradients, as many as are held at once."""
    return float(min(3 * 4 * rows * vocab_size, LOGIT_BYTES))


def forward_bytes(size: ModelSize, columns: int, recipe: Recipe) -> float:
    """Of the target running `columns` behind a cache: keys and values of all layers, one layer at work."""
    numbers = 2 * size.num_layers * size.kv_width + FORWARD_NUMBERS * size.hidden_size
    return float(columns * numbers * BYTES[recipe.target.dtype])


def drafter_bytes(recipe: Recipe, size: ModelSize) -> float:
    """Weights, gradients and optimiser states of a drafter in training, on one rank; what is offloaded to the host is
    left out. At ZeRO 3 the weights are whole while a forward and its backward run, beside the rank's own part."""
    config, ranked = deepspeed_file(recipe), ranks.world_size()
    zero, half = config.get("zero_optimization", {}), bool(config.get("bf16", {}).get("enabled"))
    stage = int(zero.get("stage", 0))
    each = 2.0 if half else 4.0
    states = 12.0 if half else 8.0  # two moments, and of half-precision weights a float32 copy
    kept = {name: zero.get(name, {}).get("device", "none") == "none" for name in ("offload_optimizer", "offload_param")}
    own = each / ranked if stage == 3 and kept["offload_param"] else 0.0
    gradients = each / (ranked if stage >= 2 else 1)
    states = states / (ranked if stage else 1) if kept["offload_optimizer"] else 0.0
    return (each + own) * size.num_parameters + size.trained_parameters * (gradients + states)


def deepspeed_file(recipe: Recipe) -> dict[str, Any]:
    """The recipe's DeepSpeed settings, empty where the file cannot be read (the engine says so)."""
    name = recipe.train.deepspeed if recipe.train else "zero0"
    try:
        path = Path(name) if Path(name).is_file() else share_path(f"recipes/deepspeed/{name}.json")
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (InputError, OSError, ValueError):
        return {}
    return config
