"""What decoding returns: new tokens, and what every round did and cost."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("draft", "build", "score", "verify", "commit")


@dataclass(frozen=True)
class Round:
    """One draft-build-score-verify-commit round of one prompt.

    block_length: accepted tokens and the bonus, as the verifier decided; num_emitted: how many of them were used (fewer
    only in a last round, cut by an end token, a stop string or the token limit); num_nodes: drafted nodes of the tree,
    root not counted; seconds: wall clock of each stage; a round of a batch is shared out evenly over its rows.
    coverage: sum of the reach of the drafted nodes under the serving distribution; 1 + coverage is what a fixed
    verifier expects on this very tree. expected_block_length: what the verifier in use expects on it, bonus counted:
    1 + coverage of a fixed one; a sampled one may exceed that, being exact over trees and verdicts together, not given
    the tree. Both None unless asked for.
    """

    block_length: int
    num_emitted: int
    num_nodes: int
    coverage: float | None
    expected_block_length: float | None
    seconds: dict[str, float]

    @property
    def num_accepted(self) -> int:
        """Drafted tokens on the accepted path: its depth."""
        return self.block_length - 1


@dataclass(frozen=True)
class Decoded:
    """The continuation of one prompt.

    token_ids: new tokens, an end token included; finish_reason: "eos", "stop" (a stop string) or "length";
    text: the new tokens as text, special tokens left out, cut before the stop string (None without a tokenizer);
    prefill_seconds, total_seconds: this row's even share of the batch it ran in, total including prefill.
    """

    token_ids: list[int]
    rounds: list[Round]
    finish_reason: str
    num_prompt_tokens: int
    text: str | None
    prefill_seconds: float
    total_seconds: float

    @property
    def mean_block_length(self) -> float:
        """Pooled over this prompt's rounds, bonus included."""
        return sum(r.block_length for r in self.rounds) / len(self.rounds)
