"""What every verifier promises about its inputs: array-likes, no writing, no aliasing, one clear line on bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from exittrain.errors import InputError
from exittrain.law.exit_law import exit_law
from exittrain.law.sampling import Sampling
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.tree.draft_tree import DraftTree
from exittrain.verify.registry import FIXED, SAMPLED, VERIFIERS, get_verifier

TREE = DraftTree([5, 1, 2, 0], [-1, 0, 0, 1], "top")
TREES = {
    **{rule.name: TREE for rule in FIXED},
    "rrs": DraftTree(TREE.token_ids, TREE.parents, "iid"),
    "rrs_wor": DraftTree(TREE.token_ids, TREE.parents, "without_replacement"),
    "traversal": DraftTree(TREE.token_ids, TREE.parents, "without_replacement"),
    "block": DraftTree(TREE.token_ids, [-1, 0, 1, 2], "iid"),
}
PROBS = [[0.2, 0.5, 0.3], [0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8]]
DRAFT = [[0.15, 0.6, 0.25], [0.5, 0.2, 0.3], [0.2, 0.4, 0.4], [0.0, 0.0, 0.0]]
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
    verifier, tree, given, drafted = get_verifier(name), TREES[name], FORMS[form](rows), FORMS[form](DRAFT)
    assert verifier.expected_block_length(tree, given, drafted) == pytest.approx(
        verifier.expected_block_length(tree, rows, DRAFT), abs=1e-6
    )
    assert set(verifier.block_law(tree, given, drafted)) == set(verifier.block_law(tree, rows, DRAFT))
    verdict = verifier.verify(tree, given, draft_probs=drafted, generator=torch.Generator().manual_seed(0))
    assert verdict.block_length == verdict.num_accepted + 1 == len(verdict.path) + 1


@pytest.mark.parametrize("name", VERIFIERS)
def test_twice_on_the_same_tensors(name: str) -> None:
    """cases.md 45: probabilities unchanged bit for bit, and the same verdict."""
    probs = torch.tensor(ONE_HOT if name == "greedy" else PROBS, dtype=torch.float64)
    drafted = torch.tensor(DRAFT, dtype=torch.float64)
    before, array, tree = probs.clone(), probs.numpy(), TREES[name]
    verdicts = []
    for _ in range(2):
        verdicts.append(get_verifier(name).verify(tree, probs, drafted, torch.Generator().manual_seed(7)))
        get_verifier(name).block_law(tree, array, drafted.numpy())
        law = exit_law(TREE, array)
        law.exit.mul_(0)
    assert verdicts[0] == verdicts[1]
    assert torch.equal(probs, before)
    assert torch.equal(drafted, torch.tensor(DRAFT, dtype=torch.float64))


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
            call(TREES[name], rows, DRAFT)
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
def test_check_allows_what_the_rule_is_exact_on(name: str) -> None:
    exact = {
        "rrs": ["iid"],
        "rrs_wor": ["without_replacement"],
        "traversal": ["iid", "without_replacement"],
        "block": ["iid", "without_replacement"],
    }
    for drawn in ("top", "iid", "without_replacement", None):
        if drawn in exact.get(name, [drawn]):
            get_verifier(name).check(drawn)
        else:
            with pytest.raises(InputError, match=f"^verifier '{name}' is exact only on trees drawn "):
                get_verifier(name).check(drawn)
    with pytest.raises(InputError, match="drawn is 'random'"):
        get_verifier(name).check("random")


@pytest.mark.parametrize(
    ("name", "drawn", "words"),
    [
        ("rrs", "top", "i.i.d. from the drafter, and this tree is drawn 'top': use tev, predraw or residual, or the "
         "builder sampled_iid"),
        ("rrs_wor", "iid", "without replacement from the drafter, and this tree is drawn 'iid': use tev, predraw or "
         "residual, or the builder sampled_wor"),
        ("traversal", None, "i.i.d. or without replacement from the drafter, and this tree does not say how it was "
         "drawn: make it with drawn='iid' if it was, or use tev, predraw or residual, or the builder sampled_iid or "
         "sampled_wor"),
    ],
)  # fmt: skip
def test_a_tree_drawn_otherwise_is_refused_everywhere(name: str, drawn: str | None, words: str) -> None:
    """cases.md 30: an error, not a warning, and before anything is looked at."""
    verifier, tree = get_verifier(name), DraftTree(TREE.token_ids, TREE.parents, drawn)
    for call in (verifier.verify, verifier.block_law, verifier.expected_block_length):
        with pytest.raises(InputError) as refused:
            call(tree, PROBS, DRAFT)
        assert str(refused.value) == f"verifier '{name}' is exact only on trees drawn {words}"
    trees, logits = TreeBatch.from_trees([tree]), torch.zeros(1, 4, 3)
    rows = DraftRows(torch.ones(1, 3), torch.zeros(1, 4, dtype=torch.int64))
    for batched in (verifier.exit_probabilities, lambda *a: verifier.verify_batch(*a[:3], [], a[3])):
        with pytest.raises(InputError, match=words.split(":")[0]):
            batched(trees, logits, Sampling(), rows)


@pytest.mark.parametrize("name", [rule.name for rule in SAMPLED])
@pytest.mark.parametrize(
    ("drafted", "words"),
    [
        (None, r"needs draft_probs: \[N\+1, V\]"),
        (DRAFT[:3], r"draft_probs has shape \(3, 3\); this tree needs \[4, V\]"),
        ([[float("nan"), 0.5, 0.5], *DRAFT[1:]], "draft_probs holds NaN or infinity at node 0"),
        ([[1.2, -0.2, 0.0], *DRAFT[1:]], "draft_probs is negative at node 0"),
        ([[0.6, 0.3, 0.0], *DRAFT[1:]], "draft_probs sums to 0.9 at node 0"),
        ([DRAFT[0], [0.0, 0.0, 0.0], *DRAFT[2:]], "draft_probs sums to 0 at node 1"),
        ([[*row, 0.0] for row in DRAFT], "draft_probs has a vocabulary of 4; target_probs has 3"),
        ("probabilities", "draft_probs is no table of numbers"),
    ],
)
def test_bad_draft_rows_are_named(name: str, drafted: Any, words: str) -> None:
    for call in (get_verifier(name).verify, get_verifier(name).block_law, get_verifier(name).expected_block_length):
        with pytest.raises(InputError, match=words):
            call(TREES[name], PROBS, drafted)


@pytest.mark.parametrize("name", [rule.name for rule in SAMPLED])
def test_draft_rows_of_leaves_are_not_read(name: str) -> None:
    verifier, tree = get_verifier(name), TREES[name]
    wild = [row if index in tree.parents.tolist() else [7.0, -1.0, 1e300] for index, row in enumerate(DRAFT)]
    assert verifier.block_law(tree, PROBS, wild) == verifier.block_law(tree, PROBS, DRAFT)


def test_block_is_for_chains() -> None:
    branched = DraftTree([0, 1, 1, 2], [-1, 0, 1, 1], "iid")
    words = "verifier 'block' is made for chains, and node 1 of tree {} has 2 children: use traversal"
    with pytest.raises(InputError, match=words.format(0)):
        get_verifier("block").verify(branched, PROBS, DRAFT)
    trees = TreeBatch.from_trees([TREES["block"], branched])
    rows = DraftRows(torch.ones(1, 3), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(InputError, match=words.format(1)):
        get_verifier("block").exit_probabilities(trees, torch.zeros(2, 4, 3), Sampling(), rows)


@pytest.mark.parametrize("name", [rule.name for rule in SAMPLED])
def test_batches_without_their_draft_rows_are_refused(name: str) -> None:
    verifier, trees, logits = get_verifier(name), TreeBatch.from_trees([TREES[name]]), torch.zeros(1, 4, 3)
    row_of = torch.tensor([[0, 1, 2, -1]])
    for rows, words in [
        (None, f"verifier '{name}' needs draft_rows"),
        (
            DraftRows(torch.ones(3, 3), row_of[:, :3]),
            r"row_of \(1, 3\) and a vocabulary of 3; these trees need \(1, 4\)",
        ),
        (DraftRows(torch.ones(3, 5), row_of), r"a vocabulary of 5; these trees need \(1, 4\) and 3"),
        (DraftRows(torch.ones(3, 3), torch.tensor([[0, -1, 2, -1]])), "node 1 of tree 0 has children and no draft row"),
        (DraftRows(torch.zeros(3, 3), row_of), "the draft row of node 0 of tree 0 sums to 0.0"),
        (DraftRows(torch.full((3, 3), torch.nan), row_of), "the draft row of node 0 of tree 0 sums to nan"),
    ]:
        with pytest.raises(InputError, match=words):
            verifier.exit_probabilities(trees, logits, Sampling(), rows)
        with pytest.raises(InputError, match=words):
            verifier.verify_batch(trees, logits, Sampling(), [torch.Generator()], rows)
    with pytest.raises(InputError, match="logits hold NaN"):
        verifier.exit_probabilities(trees, logits * torch.nan, Sampling(), DraftRows(torch.ones(3, 3), row_of))


def test_unknown_verifier_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no verifier 'residul', did you mean 'residual'\? \(known: tev, predraw"):
        get_verifier("residul")
