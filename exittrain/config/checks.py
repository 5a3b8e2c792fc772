"""What no single field can see: settings that contradict each other, found before anything runs."""

from __future__ import annotations

from exittrain.config.drafter_checks import Branching, drafter_problem
from exittrain.config.schema import ArmSection, EvalSection, OptimSection, Recipe, SourceSection
from exittrain.errors import InputError, nearest

MIN_SCRATCH_VOCAB = 257  # every byte, and the end
# The verifiers that are exact for each way of drawing a tree (math.md section 3): the registry's own, without torch.
FIXED_VERIFIERS = ("tev", "predraw", "residual", "greedy")
EXACT_VERIFIERS = {
    "best_first": FIXED_VERIFIERS,
    "beam": FIXED_VERIFIERS,
    "static": FIXED_VERIFIERS,
    "sampled_iid": (*FIXED_VERIFIERS, "rrs", "traversal", "block"),
    "sampled_wor": (*FIXED_VERIFIERS, "rrs_wor", "traversal", "block"),
}
AUTO = "auto"


def check(recipe: Recipe, origin: str = "recipe") -> None:
    """Raises:
    InputError: the first contradiction, one line.
    """
    for problem in (_names, _target, drafter_problem, _data, _sections, _arms, _evaluation):
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
    if target.max_memory and target.device_map is None:
        return "'target.max_memory' means nothing without 'target.device_map: auto'"
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
    for name, section in (("tree", recipe.tree), ("eval", recipe.eval)):
        if section is not None and section.branching == []:
            return f"'{name}.branching' is empty: 'chain', '2-ary', 'eagle' or a list of rank paths"
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
    branching = recipe.tree.branching if evaluation.branching is None else evaluation.branching
    line = verifier_problem(evaluation, evaluation.builder or recipe.tree.builder, branching)
    if line is not None:
        return line
    if not evaluation.temperatures or not evaluation.verifiers:
        return "'eval.temperatures' and 'eval.verifiers' need at least one entry each"
    for name in ("tasks", "verifiers", "temperatures"):
        values = getattr(evaluation, name)
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            return f"'eval.{name}' names {twice} twice: every entry is measured once"
    if not evaluation.decode and evaluation.contexts is None:
        return "'eval' measures nothing: decode is false and 'eval.contexts' is not given"
    if evaluation.decode and not evaluation.tasks:
        return "'eval.decode' is true and 'eval.tasks' is empty: name tasks ('heldout' is the run's held-out data)"
    return None


def verifier_problem(evaluation: EvalSection, builder: str, branching: Branching) -> str | None:
    """One line on the first of eval's verifiers that does not exist or is not exact for these trees."""
    if builder not in EXACT_VERIFIERS:
        return f"no builder {builder!r}{nearest(builder, list(EXACT_VERIFIERS))} (known: {', '.join(EXACT_VERIFIERS)})"
    exact = EXACT_VERIFIERS[builder]
    known = sorted({name for names in EXACT_VERIFIERS.values() for name in names})
    for verifier in evaluation.verifiers:
        if verifier in exact or verifier == AUTO:
            continue
        if verifier not in known:
            hint = nearest(verifier, [*known, AUTO])
            return f"'eval.verifiers' has {verifier!r}{hint} (known: {', '.join([*known, AUTO])})"
        others = [name for name, names in EXACT_VERIFIERS.items() if verifier in names]
        return (
            f"'eval.verifiers' has {verifier!r}, which is biased on trees of {builder!r}: set 'eval.builder' to "
            f"{' or '.join(others)}, or name others of {', '.join(exact)}"
        )
    if "block" in evaluation.verifiers and not _is_chain(branching):
        return "'eval.verifiers' has 'block', made for chains alone: set 'eval.branching' to chain, or name traversal"
    if "greedy" in evaluation.verifiers and any(temperature > 0 for temperature in evaluation.temperatures):
        return "'eval.verifiers' has 'greedy', which is exact at temperature 0 only: set 'eval.temperatures' to [0]"
    return None


def _is_chain(branching: Branching) -> bool:
    return branching in ("chain", "1-ary") if isinstance(branching, str) else not any(map(any, branching))
