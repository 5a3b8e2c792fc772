"""What no single field can see: settings that contradict each other, found before anything runs."""

from __future__ import annotations

from exittrain.config.schema import ArmSection, OptimSection, Recipe, SourceSection
from exittrain.errors import InputError, nearest

MIN_SCRATCH_VOCAB = 257  # every byte, and the end
SHAPE_KEYS = "hidden_size, num_layers, num_heads, intermediate_size"


def check(recipe: Recipe, origin: str = "recipe") -> None:
    """Raises:
    InputError: the first contradiction, one line.
    """
    for problem in (_names, _target, _drafter, _data, _sections, _arms, _evaluation):
        line = problem(recipe)
        if line is not None:
            raise InputError(f"{origin}: {line}")


def _names(recipe: Recipe) -> str | None:
    names = [recipe.name, *(recipe.train.arms if recipe.train else ())]
    for name in names:
        if not name or name.startswith(".") or any(not (c.isalnum() or c in "._-+") for c in name):
            return f"name {name!r} becomes a folder: use letters, digits, '-', '_', '.' only"
    return None


def _target(recipe: Recipe) -> str | None:
    target = recipe.target
    if (target.model is None) == (target.scratch is None):
        return "target needs exactly one of 'target.model' (what exists) and 'target.scratch' (made on the spot)"
    if target.scratch is not None:
        shape = target.scratch.shape
        if shape.hidden_size % shape.num_heads or (shape.hidden_size // shape.num_heads) % 2:
            return "'target.scratch.shape.hidden_size' must be num_heads times an even number"
        if target.scratch.vocab_size < MIN_SCRATCH_VOCAB:
            return (
                f"'target.scratch.vocab_size' is {target.scratch.vocab_size}: "
                f"at least {MIN_SCRATCH_VOCAB}, every byte and the end"
            )
        if recipe.data.train.kind != "text" or (recipe.eval and set(recipe.eval.tasks) - {"heldout"}):
            return "a target made from nothing has no chat template: data of kind 'text' and eval.tasks [heldout] only"
    return None


def _drafter(recipe: Recipe) -> str | None:
    drafter = recipe.drafter
    if drafter.init is not None:
        given = [name for name in ("model", "layers", "shape") if getattr(drafter, name) is not None]
        return f"'drafter.init' continues a saved drafter: remove 'drafter.{given[0]}'" if given else None
    if drafter.kind == "layers":
        if drafter.layers is None:
            return "'drafter.layers' is missing: how many of the target's first layers (4), or a list ([0, 5, 29])"
        if drafter.model is not None or drafter.shape is not None:
            return "a 'layers' drafter is copied from the target: remove 'drafter.model' and 'drafter.shape'"
        if isinstance(drafter.layers, list) and not drafter.layers:
            return "'drafter.layers' is an empty list: name at least one layer"
        return None
    if drafter.layers is not None:
        return "'drafter.layers' belongs to kind 'layers', not 'causal_lm'"
    if (drafter.model is None) == (drafter.shape is None):
        return f"a 'causal_lm' drafter needs exactly one of 'drafter.model' and 'drafter.shape' ({SHAPE_KEYS})"
    shape = drafter.shape
    if shape is not None and (shape.hidden_size % shape.num_heads or (shape.hidden_size // shape.num_heads) % 2):
        return "'drafter.shape.hidden_size' must be num_heads times an even number"
    return None


def _source(source: SourceSection, name: str) -> str | None:
    if source.kind == "magpie":
        if source.count is None:
            return f"'{name}.count' is missing: how many conversations the target shall write"
        return f"'{name}.path' means nothing for magpie: the target writes the user turns" if source.path else None
    return None if source.path else f"'{name}.path' is missing: a JSONL file, folder, data set or prompt set"


def _data(recipe: Recipe) -> str | None:
    data = recipe.data
    for name, source in (("data.train", data.train), ("data.heldout", data.heldout)):
        line = _source(source, name) if source is not None else None
        if line is not None:
            return line
    return None


def _optim(optim: OptimSection, name: str) -> str | None:
    micro = optim.micro_batch_size
    if micro is not None and (micro > optim.batch_size or optim.batch_size % micro):
        return f"'{name}.batch_size' {optim.batch_size} is no multiple of 'micro_batch_size' {micro}"
    return None


def _sections(recipe: Recipe) -> str | None:
    sections: list[tuple[str, OptimSection | None]] = [
        ("target.scratch", recipe.target.scratch),
        ("warmup", recipe.warmup),
        ("train", recipe.train),
    ]
    for name, optim in sections:
        line = _optim(optim, name) if optim is not None else None
        if line is not None:
            return line
    if recipe.tree.builder == "static" and recipe.tree.branching == []:
        return "'tree.branching' is empty: 'chain', 'eagle', 'k-ary:2,2' or a list"
    return None


def _arms(recipe: Recipe) -> str | None:
    train = recipe.train
    if train is None:
        return None
    arms = list(train.arms)
    if not arms:
        return "'train.arms' names no arm: give at least the control"
    if train.control not in arms:
        return f"'train.control' is {train.control!r}, no arm of that name{nearest(train.control, arms)}"
    if train.arms[train.control].objective != "token":
        return (
            f"the control {train.control!r} must have objective 'token': gains are quoted over training without trees"
        )
    for name, arm in train.arms.items():
        line = _arm(name, arm, train.arms, recipe)
        if line is not None:
            return f"'train.arms.{name}': {line}"
    return None


def _arm(name: str, arm: ArmSection, arms: dict[str, ArmSection], recipe: Recipe) -> str | None:
    if arm.source == "shards" and recipe.collect is None:
        return "source 'shards' needs a 'collect' section"
    if arm.source == "shards" and isinstance(arm.temperature, list) and len(arm.temperature) > 1:
        return "shards hold the law at one temperature: give one, or source 'on_policy'"
    if arm.objective != "token" and arm.weight == 0:
        return f"objective {arm.objective!r} with weight 0 is the control: give a weight or objective 'token'"
    if arm.objective == "token" and arm.token_weight == 0:
        return "objective 'token' with token_weight 0 trains nothing"
    if arm.match_time is not None:
        if arm.match_time not in arms:
            return f"match_time is {arm.match_time!r}, no arm of that name{nearest(arm.match_time, list(arms))}"
        if arm.steps is not None:
            return "give steps or match_time, not both"
        if arm.match_time == name or arms[arm.match_time].match_time is not None:
            return f"match_time must name an arm that has steps of its own, {arm.match_time!r} has not"
    return None


def _evaluation(recipe: Recipe) -> str | None:
    evaluation = recipe.eval
    if evaluation is None:
        return None
    known = ["greedy", "tev", "predraw", "residual"]
    for verifier in evaluation.verifiers:
        if verifier not in known:
            return f"'eval.verifiers' has {verifier!r}{nearest(verifier, known)} (known: {', '.join(known)})"
    if "greedy" in evaluation.verifiers and any(temperature > 0 for temperature in evaluation.temperatures):
        return "'eval.verifiers' has 'greedy', which is exact at temperature 0 only: set 'eval.temperatures' to [0]"
    if not evaluation.temperatures or not evaluation.verifiers:
        return "'eval.temperatures' and 'eval.verifiers' need at least one entry each"
    if not evaluation.decode and evaluation.contexts is None:
        return "'eval' measures nothing: decode is false and 'eval.contexts' is not given"
    if evaluation.decode and not evaluation.tasks:
        return "'eval.decode' is true and 'eval.tasks' is empty: name tasks ('heldout' is the run's held-out data)"
    return None
