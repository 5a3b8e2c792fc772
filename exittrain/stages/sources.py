"""What a recipe names but does not hold: looked up before any stage gives up what an earlier run made."""

from __future__ import annotations

from collections.abc import Sequence

from exittrain.build.registry import check_shape
from exittrain.config.schema import SourceSection
from exittrain.models.loading import check_source
from exittrain.stages.context import StageContext
from exittrain.stages.conversations.text import text_files
from exittrain.stages.evaluate import eval_trees
from exittrain.stages.evaluation.tasks import HELDOUT
from exittrain.stages.prompts import check_set, expand_tasks
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
    if "target" in names and recipe.target.scratch is not None:
        text_files(recipe.target.scratch.corpus)
    if "data" in names:
        for source in (recipe.data.train, recipe.data.heldout):
            _check_data(source)
    check_shape(recipe.tree.builder, context.shape)
    engine_config(recipe)
    if "eval" in names and recipe.eval is not None:
        eval_trees(recipe.eval, recipe.tree.builder, context.shape)
        for task in expand_tasks(recipe.eval.tasks):
            if task != HELDOUT:
                check_set(task)


def _check_data(source: SourceSection | None) -> None:
    if source is None or source.path is None:
        return
    if source.kind == "text":
        text_files(source.path)
    else:
        check_set(source.path)
