"""The shape of metrics.json, as types. No clock value is in it: the same recipe gives the same bytes.

`python -m exittrain.stages.evaluation.schema` prints the JSON schema kept in eval/schema/metrics.schema.json.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from exittrain.stages.evaluation.intervals import Estimate

if TYPE_CHECKING:
    from exittrain.drafters.calibration import Choice

SCHEMA_VERSION: Literal[1] = 1
# Beyond a ten-millionth nothing is measured; rounding keeps the file readable and equal between equal runs.
Number = Annotated[float, AfterValidator(lambda value: round(value, 7))]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Part):
    """A value with its 95 % paired bootstrap interval (null: fewer than 8 units)."""

    value: Number
    low: Number | None = None
    high: Number | None = None

    @classmethod
    def of(cls, estimate: Estimate) -> Interval:
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)

    @property
    def verdict(self) -> str:
        return Estimate(self.value, self.low, self.high).verdict


class DrafterInfo(Part):
    """role: what the drafter is to the comparison. steps and sequences: what its training saw, where known."""

    name: str
    role: Literal["warm start", "control", "equal-time control", "arm", "drafter"]
    objective: str | None = None
    steps: int | None = None
    sequences: int | None = None
    fingerprint: str


class Gain(Part):
    """Relative gain in percent of a drafter's block length over a control's, units (prompts or sequences) paired."""

    drafter: str
    control: str
    basis: Literal["equal steps", "equal time", "as trained"]
    percent: Interval
    verdict: str


class DepthRow(Part):
    """marginal: P(accepted >= depth); conditional: P(accepted >= depth | accepted >= depth - 1)."""

    depth: int
    marginal: Number
    conditional: Number | None


class ContextRow(Part):
    """One drafter at the fixed contexts. expected_block_length = 1 + coverage, exact given the tree.

    Where the table names a verifier, coverage is its expected number of accepted tokens and there is no efficiency.
    """

    drafter: str
    expected_block_length: Interval
    coverage: Number
    tree_efficiency: Number | None
    depths: list[DepthRow]


class ContextTable(Part):
    """Exact law at fixed held-out contexts, the same for all drafters; no decoding.

    verifier: null for trees chosen by score, where every optimal verifier has 1 + coverage and nothing is drawn; for
    sampled trees the verifier whose expectation this is, given the one tree drawn at each context.
    """

    task: str
    temperature: Number
    verifier: str | None = None
    num_contexts: int
    num_sequences: int
    oracle_block_length: Interval | None
    oracle_depths: list[DepthRow]
    drafters: list[ContextRow]
    gains: list[Gain]


class Served(Part):
    """What `auto` took from a drafter's calibration: verifier, builder and shape (budget: drafted nodes at most)."""

    verifier: str
    builder: str
    budget: int
    depth: int
    width: int
    branching: str | list[list[int]]

    @classmethod
    def of(cls, choice: Choice) -> Served:
        form = choice.branching if isinstance(choice.branching, str) else [list(path) for path in choice.branching]
        return cls(
            verifier=choice.verifier, builder=choice.builder, budget=choice.budget, depth=choice.depth,
            width=choice.width, branching=form,
        )  # fmt: skip


class DecodeRow(Part):
    """One drafter's decoding. The averages are over the common prompts; counts are of all that was attempted.

    expected_block_length_pooled: the verifier's own expectation given the trees of the rounds that were decoded
    (1 + coverage for a fixed verifier); agrees: the measured pooled block length lies in its interval.
    """

    drafter: str
    attempted: int
    finished: int
    skipped: dict[str, int]
    num_rounds: int
    num_tokens: int
    block_length_prompt_mean: Interval
    block_length_pooled: Interval
    accepted_pooled: Number
    expected_block_length_pooled: Interval | None
    agrees: bool | None
    served: Served | None = None
    depths: list[DepthRow]


class DecodeTable(Part):
    """Measured by decoding, one verifier. common_prompts: prompts that every drafter finished.

    With `auto` each drafter has its own tree and verifier (`served`); those without a calibration are not in the table.
    """

    task: str
    temperature: Number
    verifier: str
    common_prompts: int
    drafters: list[DecodeRow]
    gains_prompt_mean: list[Gain]
    gains_pooled: list[Gain]


class VerifierRow(Part):
    """expected: exact given the trees; measured: mean block length of `draws` verdicts on each of the same trees."""

    verifier: str
    expected: Number
    measured: Interval


class VerifierTable(Part):
    """All verifiers on the same trees. longest: the verifier whose exact expectation is largest, or "equal"."""

    task: str
    temperature: Number
    drafter: str
    num_trees: int
    draws: int
    rows: list[VerifierRow]
    longest: str


class Settings(Part):
    """What was held fixed for every number here."""

    builder: str
    budget: int
    depth: int
    width: int
    branching: str | list[list[int]] = "chain"
    top_k: int
    top_p: Number
    max_new_tokens: int
    bootstrap: int
    seed: int


class Metrics(Part):
    schema_version: Literal[1] = 1
    name: str
    target_fingerprint: str
    settings: Settings
    tasks: dict[str, str]  # name to where its prompts come from
    drafters: list[DrafterInfo]
    contexts: list[ContextTable]
    decode: list[DecodeTable]
    verifiers: list[VerifierTable]

    def info(self, drafter: str) -> DrafterInfo:
        return next(info for info in self.drafters if info.name == drafter)


def json_schema() -> dict[str, Any]:
    return Metrics.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema"}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2, sort_keys=True))
