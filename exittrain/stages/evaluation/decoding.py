"""Prompts decoded for real: rounds of every prompt, and speed beside plain decoding of the same target."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exittrain.build.base import TreeShape
from exittrain.decoding.loop import decode, generate
from exittrain.decoding.result import Decoded
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.runtime.progress import progress_bar
from exittrain.runtime.signals import StopFlag
from exittrain.stages.evaluation.measures import Trace
from exittrain.stages.evaluation.results import AnswerResult, DecodeResult
from exittrain.stages.evaluation.tasks import EvalPrompt, Task

if TYPE_CHECKING:
    from exittrain.drafters.base import Drafter

ANSWERS = 16  # of the target's own, written side by side


@dataclass(frozen=True)
class DecodeSettings:
    """What every prompt of a cell is decoded with."""

    builder: str
    shape: TreeShape
    sampling: Sampling
    verifier: str
    max_new_tokens: int
    batch_size: int
    seed: int

    def arguments(self) -> dict[str, Any]:
        return {
            "builder": self.builder, "budget": self.shape.budget, "depth": self.shape.depth, "width": self.shape.width,
            "verifier": self.verifier, "temperature": self.sampling.temperature, "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p, "max_new_tokens": self.max_new_tokens, "branching": self.shape.branching,
        }  # fmt: skip

    def generator(self, task: str, prompt: EvalPrompt) -> torch.Generator:
        """The prompt's own stream: the same for every drafter and verifier, whatever was decoded before it."""
        return generator_for(self.seed, "eval", task, prompt.id, self.sampling.temperature)


def why_skipped(prompt: EvalPrompt, max_positions: int, max_new_tokens: int) -> str | None:
    """The reason a prompt cannot be decoded to its full length, or None."""
    if not prompt.token_ids:
        return "empty prompt"
    if len(prompt.token_ids) + max_new_tokens > max_positions:
        return "prompt too long for the models' positions"
    return None


def usable_prompts(
    prompts: Sequence[EvalPrompt], max_positions: int, max_new_tokens: int
) -> tuple[list[EvalPrompt], dict[str, str]]:
    """(prompts that can be decoded to their full length, the others' reasons by id)."""
    reasons = {prompt.id: why_skipped(prompt, max_positions, max_new_tokens) for prompt in prompts}
    skipped = {prompt: reason for prompt, reason in reasons.items() if reason is not None}
    return [prompt for prompt in prompts if prompt.id not in skipped], skipped


def decode_cell(
    target: TargetModel, drafter: Drafter, task: Task, settings: DecodeSettings, stop: StopFlag, description: str
) -> DecodeResult:
    """Decode every prompt of the task. Prompts that cannot be decoded are skipped and counted by reason.

    Raises:
        Interrupted: a signal came; finished cells are on disk.
    """
    positions = min(target.max_positions, drafter.max_positions)
    usable, skipped = usable_prompts(task.prompts, positions, settings.max_new_tokens)
    traces: list[Trace] = []
    seconds: Counter[str] = Counter()
    with progress_bar(settings.max_new_tokens * len(usable), description, "tokens") as bar:
        for batch in batches(usable, settings.batch_size):
            stop.raise_if_set()
            for prompt, decoded in zip(batch, _decode(target, drafter, task, batch, settings), strict=True):
                if isinstance(decoded, str):
                    skipped[prompt.id] = decoded
                    continue
                traces.append(_trace(prompt, decoded))
                for one in decoded.rounds:
                    seconds.update(one.seconds)
            done = [t for t in traces[-len(batch) :] if t.block_lengths]
            blocks = [length for trace in done for length in trace.block_lengths]
            note = f"block length {sum(blocks) / len(blocks):.2f}" if blocks else ""
            bar.advance(settings.max_new_tokens * len(batch), note)
    return DecodeResult(tuple(traces), skipped, dict(seconds))


def plain_answers(
    target: TargetModel, task: Task, sampling: Sampling, max_new_tokens: int, seed: int, stop: StopFlag,
    description: str | None = None,
) -> AnswerResult:  # fmt: skip
    """The target's own answers, one stream a prompt; a prompt without room gets none."""
    answers: dict[str, list[int]] = {}
    usable, _ = usable_prompts(task.prompts, target.max_positions, max_new_tokens)
    name = f"eval {task.name}, the target's answers" if description is None else description
    with progress_bar(len(usable) * max_new_tokens, name, "tokens") as bar:

        def advance(num_tokens: int) -> None:
            stop.raise_if_set()
            bar.advance(num_tokens)

        generators = [generator_for(seed, "eval", "answer", task.name, p.id) for p in usable]
        prompts = [p.token_ids for p in usable]
        found = generate(target, prompts, sampling, max_new_tokens, generators, advance, ANSWERS)
        for prompt, decoded in zip(usable, found, strict=True):
            answers[prompt.id] = decoded.token_ids
    return AnswerResult(answers)


def _decode(
    target: TargetModel, drafter: Drafter, task: Task, batch: Sequence[EvalPrompt], settings: DecodeSettings
) -> list[Decoded | str]:
    """Each prompt's decoding; where a batch is refused its prompts go one by one, a refused prompt gives its reason."""
    prompts = [list(prompt.token_ids) for prompt in batch]
    generators = [settings.generator(task.name, prompt) for prompt in batch]
    try:
        found = decode(target, drafter, prompts, generator=generators, record_coverage=True, **settings.arguments())
        return list(found)
    except InputError as error:
        if len(batch) > 1:
            return [one for prompt in batch for one in _decode(target, drafter, task, [prompt], settings)]
        return [str(error)]


def _trace(prompt: EvalPrompt, decoded: Decoded) -> Trace:
    return Trace(
        prompt.id,
        tuple(one.block_length for one in decoded.rounds),
        len(decoded.token_ids),
        _known([one.expected_block_length for one in decoded.rounds]),
        _known([one.coverage for one in decoded.rounds]),
    )


def _known(values: Sequence[float | None]) -> tuple[float, ...] | None:
    found = tuple(value for value in values if value is not None)
    return found if len(found) == len(values) else None


def answer_batches(prompts: Sequence[EvalPrompt], max_positions: int, max_new_tokens: int) -> list[list[EvalPrompt]]:
    """The prompts with room, in the batches of like lengths that `plain_answers` decodes together."""
    usable, _ = usable_prompts(prompts, max_positions, max_new_tokens)
    by_length = sorted(usable, key=lambda prompt: len(prompt.token_ids))
    return [list(batch) for batch in batches(by_length, ANSWERS)]


def batches(prompts: Sequence[EvalPrompt], size: int) -> Iterator[Sequence[EvalPrompt]]:
    """Prompts that are decoded together, in order."""
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def measure_speed(
    target: TargetModel, drafter: Drafter, task: Task, prompts: Sequence[EvalPrompt], settings: DecodeSettings,
    stop: StopFlag, description: str,
) -> dict[str, Any]:  # fmt: skip
    """Tokens a second with the drafter and without, prompt by prompt in turn, so that both see the same machine.

    The same loop, clock and counter on both sides: new token ids over wall seconds, prefill included. One short
    decoding of each kind is thrown away first.
    """
    totals = {True: [0, 0.0], False: [0, 0.0]}
    with progress_bar(len(prompts), description, "prompts") as bar:
        for index, prompt in enumerate([prompts[0], *prompts]):
            stop.raise_if_set()
            arguments = settings.arguments() | ({"max_new_tokens": 8} if index == 0 else {})
            for drafted in (True, False):
                began = time.perf_counter()
                decoded = decode(
                    target, drafter if drafted else None, list(prompt.token_ids),
                    generator=settings.generator(task.name, prompt), **arguments,
                )  # fmt: skip
                if index > 0:
                    totals[drafted][0] += len(decoded.token_ids)
                    totals[drafted][1] += time.perf_counter() - began
            if index > 0:
                bar.advance()
    (tokens, seconds), (plain_tokens, plain_seconds) = totals[True], totals[False]
    return {
        "task": task.name, "temperature": settings.sampling.temperature, "verifier": settings.verifier,
        "prompts": len(prompts), "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "plain_tokens": plain_tokens, "plain_seconds": plain_seconds,
        "plain_tokens_per_second": plain_tokens / plain_seconds,
        "speed_up": (tokens / seconds) / (plain_tokens / plain_seconds),
    }  # fmt: skip
