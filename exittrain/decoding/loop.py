"""The one decode loop: for collecting data, for evaluation, for generating (math.md sections 1, 3 and 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from exittrain.build.base import TreeShape
from exittrain.build.registry import deepest_level, drawn_by, get_builder
from exittrain.build.static import rank_paths
from exittrain.decoding.auto import AUTO, choose_auto
from exittrain.decoding.batch import Batch, Plan
from exittrain.decoding.request import as_generators, as_prompts, check_prompts, refuse_history
from exittrain.decoding.result import Decoded
from exittrain.decoding.row import Row
from exittrain.decoding.stopping import StopStrings
from exittrain.drafters.base import Drafter
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.verify.registry import get_verifier


def decode(
    target: TargetModel,
    drafter: Drafter | None,
    prompt_ids: Any,
    builder: str = "best_first",
    budget: int = 16,
    verifier: str = "tev",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 64,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    depth: int = 6,
    width: int = 8,
    branching: str | tuple[tuple[int, ...], ...] = "chain",
    eos_token_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    record_coverage: bool = False,
    synchronize: bool = False,
) -> Any:
    """Continue a prompt, or several at once, losing nothing of the target's distribution.

    prompt_ids: one prompt, a 1-D array-like of ids, gives one `Decoded`; several of any lengths, as a list or a 2-D
    array, give a list of them in order. A row's tokens depend on its own prompt and generator alone, never on its
    neighbours. drafter None is plain decoding: no tree is built, and every verifier is one draw of the next token.
    temperature 0 takes the first argmax, whatever the verifier.
    builder: "best_first", "beam", "static", with a verifier that is exact on any tree: "tev", "predraw", "residual", or
    "greedy" (temperature 0 alone); "sampled_iid", "sampled_wor", with those or with one that needs the drafter's own
    draws: "rrs" (i.i.d.), "rrs_wor" (without replacement), "traversal" (either), "block" (either, a chain).
    verifier "auto": builder, shape and verifier are those of the drafter's calibration for this temperature, among
    trees of at most `budget` nodes; builder, depth, width and branching given here are then ignored (`choose_auto`).
    budget, depth, width, branching: the tree's shape (`TreeShape`). generator: one a prompt, or one for all (see
    `as_generators`); trees and verdicts are drawn from it. eos_token_ids: None takes the target's own. stop_strings
    end a row where one is completed in its text. record_coverage: also compute what every round was to bring
    (`Round.coverage`, `Round.expected_block_length`).
    synchronize: on CUDA, wait for the device at the end of every stage so that stage seconds are true.

    Raises InputError for an empty or over-long prompt, ids outside the vocabulary, a verifier or builder that cannot
    serve, "auto" without a calibration that holds, stop strings without a tokenizer, and a generation config that
    changes with the history.
    """
    prompts, single = as_prompts(prompt_ids)
    sampling = Sampling(temperature, top_k, top_p)
    shape = TreeShape(budget, depth, width, branching)
    if verifier == AUTO:
        choice = choose_auto(target, drafter, sampling, budget)
        builder, shape, verifier = choice.builder, choice.shape, choice.verifier
    plan = make_plan(target, drafter, builder, shape, verifier, sampling, record_coverage, synchronize)
    generators = as_generators(generator, len(prompts))
    rows = _make_rows(plan, prompts, generators, max_new_tokens, eos_token_ids, stop_strings)
    run(plan, rows)
    results = [row.result() for row in rows]
    return results[0] if single else results


def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_new_tokens: int,
    generators: Sequence[torch.Generator],
    progress: Callable[[int], None] | None = None,
    batch_size: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> list[Decoded]:
    """Plain continuations of many prompts, in batches of like lengths; results in the order of the prompts.

    progress is called after every step with the number of new tokens. Raises as `decode`.
    """
    rows_of, _ = as_prompts(list(prompts)) if prompts else ([], False)
    plan = make_plan(target, None, "best_first", TreeShape(), "tev", sampling)
    rows = _make_rows(
        plan, rows_of, as_generators(generators, len(rows_of)), max_new_tokens, eos_token_ids, stop_strings
    )
    by_length = sorted(rows, key=lambda row: len(row.prompt))
    for start in range(0, len(rows), batch_size):
        run(plan, by_length[start : start + batch_size], progress)
    return [row.result() for row in rows]


@torch.no_grad()
def run(plan: Plan, rows: list[Row], progress: Callable[[int], None] | None = None) -> None:
    """Decode rows side by side until each has ended; their tokens, rounds and reasons are left in them."""
    batch = Batch(plan, rows)
    while batch.rows:
        num_new = batch.round()
        if progress is not None:
            progress(num_new)


def make_plan(
    target: TargetModel,
    drafter: Drafter | None,
    builder: str,
    shape: TreeShape,
    verifier: str,
    sampling: Sampling,
    record_coverage: bool = False,
    synchronize: bool = False,
) -> Plan:
    """Look the names up and refuse what cannot be served exactly. Raises InputError."""
    refuse_history(target)
    if builder == "oracle":
        raise InputError("the oracle builder drafts with the target itself and serves nobody; choose another builder")
    rule, drawn = get_verifier(verifier), drawn_by(builder)
    if rule.name == "greedy" and not sampling.greedy:
        raise InputError(f"the greedy verifier needs temperature 0, not {sampling.temperature}; use tev")
    if drafter is None:
        rule = get_verifier("tev")  # a root alone: every rule is one draw from its row, and this one reads nothing else
    else:
        rule.check(drawn)
        drafter.check_depth(deepest_level(builder, shape))
        if rule.name == "block" and any(map(any, rank_paths(shape))):  # a rank other than 0: a second child
            raise InputError("the block verifier is made for chains; set branching='chain', or use traversal")
    limits = [target.max_positions] + ([] if drafter is None else [drafter.max_positions])
    return Plan(
        target, drafter, get_builder(builder), shape, rule, sampling, min(limits), record_coverage, synchronize
    )  # fmt: skip


def _make_rows(
    plan: Plan,
    prompts: list[list[int]],
    generators: list[torch.Generator],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] | None,
    stop_strings: Sequence[str],
) -> list[Row]:
    target, drafter = plan.target, plan.drafter
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if stop_strings and target.tokenizer is None:
        raise InputError(f"stop strings need a tokenizer and {target.name} has none; use eos_token_ids")
    if isinstance(stop_strings, str) or not all(stop_strings):
        raise InputError("stop_strings must be a list of strings, none of them empty")
    name = target.name if drafter is None or plan.max_positions == target.max_positions else drafter.name
    check_prompts(prompts, target.vocab_size, plan.max_positions, name)
    ends = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
    stop = None if target.tokenizer is None else StopStrings(target.tokenizer, stop_strings)
    return [
        Row(prompt, one, min(max_new_tokens, plan.max_positions - len(prompt)), ends, stop)
        for prompt, one in zip(prompts, generators, strict=True)
    ]
