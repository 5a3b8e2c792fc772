"""Is a written head what was trained? Its tensors bit for bit, its config, and its laws by a reader that knows nothing
of how it was trained (reader.py), on the target's features of real text.

Shapes: B prompts, L tokens, F features of one token, K drafted places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from exittrain.drafters.base import Drafter
from exittrain.drafters.formats import read_head
from exittrain.drafters.head_config import HeadConfig
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel
from exittrain.stages.export.check import TOLERANCE
from exittrain.stages.export.folder import same_bits
from exittrain.stages.export.reader import ServedHead, read_served

PROMPTS, PLACES = 8, 4  # contexts compared of each window, and how far an EAGLE head is followed from each
LONGEST = 40_960  # tokens of a context that is made up to lie past the original length of scaled rotary positions
_UNREADABLE = (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, SafetensorError)


@dataclass(frozen=True)
class HeadChecked:
    """What was found equal. logit_error: the largest difference of float32 log-probabilities of num_laws distributions;
    longest: tokens of the longest context."""

    num_tensors: int
    num_laws: int
    longest: int
    logit_error: float

    def __str__(self) -> str:
        return (
            f"read back by a reader of its own, float32 log-probabilities within {self.logit_error:.1g} in "
            f"{self.num_laws} places, contexts up to {self.longest} tokens"
        )


@dataclass(frozen=True, eq=False)
class Case:
    """Contexts to compare at: prompts of B contexts, features [B, L, F] along each but its last token (right-padded),
    following [B, K - 1] the text's tokens after it."""

    prompts: tuple[Tensor, ...]
    features: Tensor
    following: Tensor


def make_cases(drafter: Drafter, config: HeadConfig, target: TargetModel, windows: Sequence[Tensor]) -> list[Case]:
    """Contexts of real text with the target's own features; where rotary positions are scaled, one more that passes
    their original length: the same text and features over and over.

    Raises InputError where the text is too short to draft from.
    """
    places = PLACES if config.block_size is None else config.block_size - 1
    states = target.states(config.feature_layers)
    cases, read = [], []
    for window in windows:
        last = len(window) - places  # of the prompt's tokens, so that the text goes on for places - 1
        if last < 2:
            continue
        features = states.of(window)[1].float().cpu()
        read.append((window, features))
        ends = sorted({max(2, round(last * (i + 1) / PROMPTS)) for i in range(PROMPTS)})
        cases.append(_case(window, features, ends, places))
    if not cases:
        raise InputError(f"there is no text of {places + 2} tokens to compare the export on")
    original = int(config.rope_parameters.get("original_max_position_embeddings") or 0)
    end = original + 2
    if original > 0 and end + places < min(drafter.max_positions, LONGEST):
        tokens, features = (torch.cat(parts) for parts in zip(*read, strict=True))
        times = -(-(end + places) // len(tokens))
        cases.append(_case(tokens.repeat(times), features.repeat(times, 1), [end], places))
    return cases


def check_head(
    folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor], draft_ids: Tensor | None, names: Mapping[str, str],
    drafter: Drafter, target: TargetModel, cases: Sequence[Case],
) -> HeadChecked:  # fmt: skip
    """Compare a written folder with its source. tensors: what must be stored, by our names, as they must be stored;
    names: how the folder calls them; drafter: the source in float32, rounded as the folder is; target: its embeddings
    and output head in float32.

    Raises:
        InputError: the first difference, in one line.
    """
    try:
        _check_tensors(folder, config, tensors, draft_ids, names)
        if (read := read_head(folder).config) != config:
            ours, theirs = read.as_dict(), config.as_dict()
            name = next(name for name in ours if ours[name] != theirs[name])
            raise InputError(f"config.json reads {name} {ours[name]!r}, the source's is {theirs[name]!r}")
        served = read_served(folder, target.embeddings.weight.detach().cpu(), target.output.weight.detach().cpu())
        if served.feature_layers != config.feature_layers:
            raise InputError(f"a server reads layers {served.feature_layers}, the source {config.feature_layers}")
        found = [_compare(served, drafter, case) for case in cases]
    except InputError as error:
        raise InputError(f"the export is not what was trained, nothing is kept: {error}") from error
    except _UNREADABLE as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the export cannot be read back, nothing is kept: {line}") from error
    longest = max(len(prompt) for case in cases for prompt in case.prompts)
    return HeadChecked(len(tensors), sum(count for count, _ in found), longest, max(error for _, error in found))


def _case(tokens: Tensor, features: Tensor, ends: Sequence[int], places: int) -> Case:
    padded = torch.nn.utils.rnn.pad_sequence([features[: end - 1] for end in ends], batch_first=True)
    following = torch.stack([tokens[end : end + places - 1] for end in ends])
    return Case(tuple(tokens[:end] for end in ends), padded, following)


def _check_tensors(
    folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor], draft_ids: Tensor | None, names: Mapping[str, str]
) -> None:
    stored = load_file(folder / "model.safetensors")
    maps = {} if draft_ids is None else {name: stored.pop(name, torch.empty(0)) for name in ("d2t", "t2d")}
    if different := sorted(stored.keys() ^ set(names.values())):
        said = "lacks" if different[0] in names.values() else "holds, beyond the source,"
        raise InputError(f"it {said} {different[0]} ({len(different)} names differ)")
    for name, tensor in tensors.items():
        mine = stored[names[name]]
        if not same_bits(mine, tensor):
            raise InputError(f"tensor {names[name]} ({tuple(mine.shape)}) is not the source's ({tuple(tensor.shape)})")
    if draft_ids is None:
        return
    marks = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, True)
    wanted = {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": marks}
    for name, tensor in wanted.items():
        if not same_bits(maps[name], tensor):
            raise InputError(f"{name} does not name the ids that the source drafts")


def _compare(served: ServedHead, drafter: Drafter, case: Case) -> tuple[int, float]:
    """(number of distributions, largest difference) between a reader and the drafter at work."""
    ours = _drafted(drafter, case)
    largest = 0.0
    for row, prompt in enumerate(case.prompts):
        theirs = served.laws(prompt, case.features[row, : len(prompt) - 1], case.following[row])
        finite = ours[row].isfinite()
        error = (theirs - ours[row])[finite].abs()
        allowed = TOLERANCE * ours[row][finite].abs().clamp(min=1)
        if not torch.equal(theirs.isfinite(), finite) or not bool((error <= allowed).all()):
            raise InputError(
                f"after {len(prompt)} tokens its log-probabilities differ from the trained drafter's by "
                f"{float(error.max()):.3g}"
            )
        largest = max(largest, float(error.max()))
    return case.following.shape[0] * (case.following.shape[1] + 1), largest


@torch.no_grad()
def _drafted(drafter: Drafter, case: Case) -> Tensor:
    """[B, K, V] log-probabilities as the drafter decodes: a session at each prompt's end, then token by token."""
    session = drafter.start(list(case.prompts), case.features.to(drafter.device)).session(Sampling())
    following = case.following.to(drafter.device)
    laws = [session.root()]
    for slot in range(following.shape[1]):
        parents = torch.full_like(following[:, :1], slot)
        tokens = following[:, slot : slot + 1]
        laws.append(session.expand(parents, tokens, torch.ones_like(parents, dtype=torch.bool))[:, 0])
    return torch.stack(laws, dim=1).float().cpu()
