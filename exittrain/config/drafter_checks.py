"""What a recipe's drafter section may say: fields of its kind alone, and trees as deep as it can draft."""

from __future__ import annotations

from collections.abc import Sequence

from exittrain.config.schema import DIAL_FIELDS, HEADS, SHAPE_FIELDS, DrafterSection, Recipe

SHAPE_KEYS = "hidden_size, num_layers, num_heads, intermediate_size"
BLOCK_SIZE = 16  # DFlash's (arXiv 2602.06036)
EAGLE_DEPTH = 5  # of the shape "eagle" (build.static)
Branching = str | Sequence[Sequence[int]]


def drafter_problem(recipe: Recipe) -> str | None:
    """One line on the first contradiction, or None."""
    drafter = recipe.drafter
    line = _foreign(drafter) or (_plain(drafter) if drafter.kind not in HEADS else _head(drafter))
    if line is not None:
        return line
    if drafter.kind in HEADS and recipe.train is not None and recipe.train.lora is not None:
        return "'train.lora' is for drafters that are language models: a head is small, train it whole"
    if recipe.warmup is not None and recipe.warmup.unroll_from and drafter.kind != "eagle3":
        return f"'warmup.unroll_from' is of kind 'eagle3', which alone unrolls, not {drafter.kind!r}: remove it"
    if drafter.kind == "block" and drafter.init is None:
        return depth_problem(recipe, drafter.block_size or BLOCK_SIZE)
    return None


def _foreign(drafter: DrafterSection) -> str | None:
    """A field that belongs to another kind, or beside `init` to the saved drafter; one at its default is absent."""
    fields = DrafterSection.model_fields
    given = [name for name, field in fields.items() if name != "kind" and getattr(drafter, name) != field.default]
    made = [name for name in given if any(name in names for names in SHAPE_FIELDS.values())]
    if drafter.init is not None and made:
        return f"'drafter.init' is a saved drafter, whose shape is its own: remove 'drafter.{made[0]}'"
    for name in given:
        kinds = [kind for kind in SHAPE_FIELDS if name in SHAPE_FIELDS[kind] or name in DIAL_FIELDS.get(kind, ())]
        if kinds and drafter.kind not in kinds:
            wanted = " or ".join(map(repr, kinds))
            return f"'drafter.{name}' belongs to kind {wanted}, not {drafter.kind!r}: remove it, or set 'drafter.kind'"
    return None


def _plain(drafter: DrafterSection) -> str | None:
    """Of a drafter that is a language model."""
    if drafter.init is not None:
        return None
    if drafter.kind == "layers":
        if drafter.layers is None:
            return "'drafter.layers' is missing: how many of the target's first layers (4), or a list ([0, 5, 29])"
        return "'drafter.layers' is an empty list: name at least one layer" if drafter.layers == [] else None
    shape = drafter.shape
    if (drafter.model is None) == (shape is None):
        return f"a 'causal_lm' drafter needs exactly one of 'drafter.model' and 'drafter.shape' ({SHAPE_KEYS})"
    if shape is not None and (shape.hidden_size % shape.num_heads or (shape.hidden_size // shape.num_heads) % 2):
        return "'drafter.shape.hidden_size' must be num_heads times an even number"
    return None


def _head(drafter: DrafterSection) -> str | None:
    layers = drafter.feature_layers or []
    twice = [layer for layer in layers if layers.count(layer) > 1]
    if twice:
        return f"'drafter.feature_layers' names {twice[0]} twice"
    if drafter.norm_before_fc and drafter.fc_norm:
        return "'drafter.norm_before_fc' and 'drafter.fc_norm' exclude each other: set one of them to false"
    return None


def depth_problem(recipe: Recipe, block_size: int) -> str | None:
    """One line on the first of the recipe's trees that is deeper than a block of this size reaches."""
    tree, evaluation = recipe.tree, recipe.eval
    trees = [("tree", tree.builder, tree.branching)]
    if evaluation is not None:
        builder = evaluation.builder or tree.builder
        branching = tree.branching if evaluation.branching is None else evaluation.branching
        trees.append(("eval", builder, branching))
    for section, builder, branching in trees:
        depth = tree_depth(builder, branching, tree.budget, tree.depth)
        if depth >= block_size:
            own = section == "eval" and evaluation is not None and evaluation.branching is not None
            of = "'eval.branching'" if own else "'tree.branching'" if _is_shape(builder) else "'tree.depth'"
            most = f"'tree.depth' to at most {block_size - 1}"
            if _is_shape(builder) and not isinstance(branching, str):
                most = f"{of} to at most {block_size - 1} levels"
            return (
                f"{of} makes trees {depth} deep, and a block of {block_size} drafts {block_size - 1} tokens ahead: "
                f"set {most}, or use a drafter with a larger block"
            )
    return None


def tree_depth(builder: str, branching: Branching, budget: int, depth: int) -> int:
    """The deepest level that trees of these settings reach (`build.static.rank_paths`, without building one)."""
    if not _is_shape(builder):
        return depth
    if not isinstance(branching, str):
        return max(map(len, branching), default=0)
    if branching == "eagle":
        return EAGLE_DEPTH
    arity = "1" if branching == "chain" else branching.removesuffix("-ary")
    if not arity.isdigit():
        return depth  # no shape of that name: said elsewhere
    nodes, level = 0, 0
    while level < depth and nodes < budget:
        level += 1
        nodes += int(arity) ** level
    return level


def _is_shape(builder: str) -> bool:
    """Its trees have a fixed shape, else they are grown up to `tree.depth`."""
    return builder not in ("best_first", "beam")
