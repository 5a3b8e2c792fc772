"""What a recipe names but does not hold: looked up before any stage gives up what an earlier run made."""

from __future__ import annotations

from collections.abc import Sequence

from exittrain.build.registry import check_shape
from exittrain.config.drafter_checks import depth_problem
from exittrain.config.schema import HEADS, Recipe, SourceSection
from exittrain.errors import InputError
from exittrain.models.loading import check_source
from exittrain.runtime.tracker import check_tensorboard
from exittrain.stages.context import StageContext
from exittrain.stages.conversations.text import text_files
from exittrain.stages.evaluate import eval_trees
from exittrain.stages.evaluation.tasks import HELDOUT
from exittrain.stages.model_configs import find_config
from exittrain.stages.prompts import check_set, expand_tasks
from exittrain.stages.sizes import recipe_head
from exittrain.stages.warmup import engine_config


def check_sources(context: StageContext, names: Sequence[str]) -> None:
    """Models, data, tasks, the tree's shape and the engine's settings of the named stages. Reads no weights or rows.

    Raises:
        InputError: the first that cannot be had; hub ids are taken at their word.
    """
    recipe = context.recipe
    for model in (recipe.target.model, recipe.drafter.model, recipe.drafter.init):
        if model is not None and not model.startswith("layers:"):
            check_source(model)
    check_head(recipe)
    if "target" in names and recipe.target.scratch is not None:
        text_files(recipe.target.scratch.corpus)
    if "data" in names:
        for source in (recipe.data.train, recipe.data.heldout):
            _check_data(source)
    check_shape(recipe.tree.builder, context.shape)
    check_tensorboard(recipe.tracking.tensorboard)
    engine_config(recipe)
    if "eval" in names and recipe.eval is not None:
        eval_trees(recipe.eval, recipe.tree.builder, context.shape)
        for task in expand_tasks(recipe.eval.tasks):
            if task != HELDOUT:
                check_set(task)


def check_head(recipe: Recipe) -> None:
    """As far as configs are known here, without any weight.

    Raises:
        InputError: a head that does not fit its target, a saved drafter of another kind than the recipe says, or trees
            deeper than its block.
    """
    drafter, head = recipe.drafter, recipe_head(recipe)
    if head is None:
        if drafter.init is not None and drafter.kind in HEADS and find_config(drafter.init) is not None:
            raise InputError(f"'drafter.init' {drafter.init} is a language model: set 'drafter.kind' to causal_lm")
        return
    if drafter.kind != head.kind:
        raise InputError(f"'drafter.init' {drafter.init} is of kind {head.kind!r}: set 'drafter.kind' to {head.kind}")
    line = None if head.block_size is None else depth_problem(recipe, head.block_size)
    if line is not None:
        raise InputError(line)


def _check_data(source: SourceSection | None) -> None:
    if source is None or source.path is None:
        return
    if source.kind == "text":
        text_files(source.path)
    else:
        check_set(source.path)
