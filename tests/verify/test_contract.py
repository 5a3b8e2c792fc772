"""What every verifier promises about its inputs: array-likes, no writing, no aliasing, one clear line on bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from exittrain.errors import InputError
from exittrain.law.exit_law import exit_law
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.registry import VERIFIERS, get_verifier

TREE = DraftTree([5, 1, 2, 0], [-1, 0, 0, 1], "top")
PROBS = [[0.2, 0.5, 0.3], [0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8]]
ONE_HOT = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
FORMS: dict[str, Any] = {
    "lists": lambda rows: rows,
    "numpy32": lambda rows: np.array(rows, dtype=np.float32),
    "numpy": np.array,
    "read-only": lambda rows: (array := np.array(rows), array.setflags(write=False))[0],
    "torch": torch.tensor,
    "with gradient": lambda rows: torch.tensor(rows, requires_grad=True),
    "rows of tensors": lambda rows: [torch.tensor(row) for row in rows],
}


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("form", FORMS)
def test_array_likes_give_one_answer(name: str, form: str) -> None:
    rows = ONE_HOT if name == "greedy" else PROBS
    verifier, given = get_verifier(name), FORMS[form](rows)
    assert verifier.expected_block_length(TREE, given) == pytest.approx(
        verifier.expected_block_length(TREE, rows), abs=1e-6
    )
    assert set(verifier.block_law(TREE, given)) == set(verifier.block_law(TREE, rows))
    verdict = verifier.verify(TREE, given, draft_probs=given, generator=torch.Generator().manual_seed(0))
    assert verdict.block_length == verdict.num_accepted + 1 == len(verdict.path) + 1


@pytest.mark.parametrize("name", VERIFIERS)
def test_twice_on_the_same_tensors(name: str) -> None:
    """cases.md 45: probabilities unchanged bit for bit, and the same verdict."""
    probs = torch.tensor(ONE_HOT if name == "greedy" else PROBS, dtype=torch.float64)
    before, array = probs.clone(), probs.numpy()
    verdicts = []
    for _ in range(2):
        verdicts.append(get_verifier(name).verify(TREE, probs, generator=torch.Generator().manual_seed(7)))
        get_verifier(name).block_law(TREE, array)
        law = exit_law(TREE, array)
        law.exit.mul_(0)
    assert verdicts[0] == verdicts[1]
    assert torch.equal(probs, before)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (PROBS[:3], r"shape \(3, 3\); this tree needs \[4, V\]"),
        (PROBS[0], r"shape \(3,\)"),
        ([[1.0, 0.0]] * 4, "node 2 has token 2; target_probs has a vocabulary of 2"),
        ([*PROBS[:3], [float("nan"), 0.5, 0.5]], "NaN or infinity at node 3"),
        ([*PROBS[:3], [float("inf"), 0.5, 0.5]], "NaN or infinity at node 3"),
        ([PROBS[0], [1.2, -0.2, 0.0], *PROBS[2:]], "negative at node 1; give probabilities"),
        ([PROBS[0], [0.6, 0.3, 0.0], *PROBS[2:]], "sums to 0.9 at node 1"),
        ([[0.0, 0.0, 0.0], *PROBS[1:]], "sums to 0 at node 0"),
        (torch.tensor(PROBS).bfloat16(), "sums to 1.00098 at node 0; rows must sum to 1 [(]softmax in float32"),
        ([[0.5, 0.5], *PROBS[1:]], "no table of numbers"),
        ("probabilities", "no table of numbers"),
    ],
)
def test_bad_rows_are_named(name: str, rows: Any, words: str) -> None:
    for call in (get_verifier(name).verify, get_verifier(name).block_law, get_verifier(name).expected_block_length):
        with pytest.raises(InputError, match=words):
            call(TREE, rows)
    with pytest.raises(InputError, match=words):
        exit_law(TREE, rows)


def test_nearly_normalised_rows_are_renormalised() -> None:
    rows = (np.array(PROBS) * (1 + 5e-5)).tolist()
    assert sum(get_verifier("tev").block_law(TREE, rows).values()) == pytest.approx(1, abs=1e-12)
    assert get_verifier("tev").expected_block_length(TREE, rows) == pytest.approx(2.1, abs=1e-9)


def test_greedy_refuses_open_rows() -> None:
    with pytest.raises(InputError, match=r"greedy needs one-hot target_probs .* node 0 "):
        get_verifier("greedy").verify(TREE, PROBS)


def test_without_a_generator_torchs_own_seed_rules() -> None:
    verdicts = []
    for _ in range(2):
        torch.manual_seed(11)
        verdicts.append([get_verifier("tev").verify(TREE, PROBS) for _ in range(20)])
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("name", VERIFIERS)
def test_check_allows_every_way_of_drawing(name: str) -> None:
    for drawn in ("top", "iid", "without_replacement", None):
        get_verifier(name).check(drawn)
    with pytest.raises(InputError, match="drawn is 'random'"):
        get_verifier(name).check("random")


def test_unknown_verifier_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no verifier 'residul', did you mean 'residual'\? \(known: tev, predraw"):
        get_verifier("residul")
