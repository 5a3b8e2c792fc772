"""What a user asks of the decode loop, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exittrain.errors import InputError
from exittrain.models.target import TargetModel
from exittrain.tree.draft_tree import as_ids

# Settings of a generation config that make the next token's distribution depend on more than the model and the
# context, with their neutral values: a tree scored in one pass cannot honour them (cases.md 59).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "sequence_bias": (None,),
    "bad_words_ids": (None,),
}


def refuse_history(target: TargetModel) -> None:
    """Raise InputError when the target's generation config asks for a history-dependent distribution."""
    settings = getattr(target.module, "generation_config", None)
    for name, neutral in _NEUTRAL.items():
        value = getattr(settings, name, None)
        if value not in neutral:
            raise InputError(
                f"{target.name} asks for {name}={value} in its generation config, which changes with the history and "
                f"cannot be served from a draft tree; set target.module.generation_config.{name} = {neutral[-1]}"
            )


def as_prompts(prompt_ids: Any) -> tuple[list[list[int]], bool]:
    """One prompt (a 1-D array-like) or several (a list, or a 2-D array) as lists of ids, and whether it was one."""
    if hasattr(prompt_ids, "keys"):
        raise InputError("prompt_ids is a mapping of a tokenizer's outputs; give its input_ids")
    if len(prompt_ids) == 0:
        raise InputError("no prompt; give at least one token, such as the beginning-of-text token")
    if isinstance(prompt_ids[0], str):
        raise InputError("prompt_ids is text; give token ids: target.tokenizer(text)['input_ids']")
    single = torch.as_tensor(prompt_ids[0]).dim() == 0
    prompts = [prompt_ids] if single else list(prompt_ids)
    rows = []
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InputError(f"prompt {number} is empty; give at least one token, such as the beginning-of-text token")
        rows.append([int(token) for token in as_ids(prompt, f"prompt {number}").tolist()])
    return rows, single


def check_prompts(prompts: list[list[int]], vocab_size: int, max_positions: int, name: str) -> None:
    """Raise InputError on an id outside the vocabulary or a prompt that leaves no position for a new token."""
    for number, prompt in enumerate(prompts):
        outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise InputError(f"prompt {number} holds token {outside}; {name} knows ids 0 to {vocab_size - 1}")
        if len(prompt) >= max_positions:
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens; {name} has {max_positions} positions and needs one for "
                "the new token: shorten the prompt"
            )


def as_generators(generator: torch.Generator | Sequence[torch.Generator] | None, count: int) -> list[torch.Generator]:
    """One CPU generator a prompt: the given ones; or, for several prompts, seeded in turn from the one given.

    None takes the seeds from torch's global generator, so that `torch.manual_seed` governs them.
    """
    if isinstance(generator, int):
        raise InputError(f"generator is the number {generator}; give torch.Generator().manual_seed({generator})")
    if isinstance(generator, torch.Generator) and count == 1:
        return [generator]
    if generator is None or isinstance(generator, torch.Generator):
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**62, (count,), generator=generator, device=device).tolist()
        return [torch.Generator().manual_seed(int(seed)) for seed in seeds]
    if len(generator) != count:
        raise InputError(f"{len(generator)} generators for {count} prompts; give one, or one a prompt")
    if len({id(one) for one in generator}) < count:
        raise InputError("one generator is given for two prompts; give each prompt its own, or a single one for all")
    return list(generator)
