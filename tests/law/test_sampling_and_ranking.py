"""Logits to the served distribution, ranking with ties, seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exittrain.errors import InputError
from exittrain.law.ranking import top_tokens
from exittrain.law.sampling import Sampling, process_logits
from exittrain.law.seeding import generator_for, seed_for

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 0.0, 0.0]])


def test_temperature_and_truncation() -> None:
    torch.testing.assert_close(process_logits(LOGITS, Sampling(0.5)), (LOGITS * 2).log_softmax(-1))
    top_2 = process_logits(LOGITS[:1], Sampling(top_k=2)).exp()
    torch.testing.assert_close(top_2[0, [1, 2]], torch.tensor([3.0, 2.0]).softmax(0))
    assert top_2[0, [0, 3]].tolist() == [0, 0]
    nucleus = process_logits(LOGITS[:1], Sampling(top_p=0.9)).exp()  # .64 .24 .09 .01: the third crosses .9
    assert (nucleus > 0).tolist() == [[True, True, True, False]]
    assert process_logits(LOGITS[:1], Sampling(top_p=1e-9)).tolist() == [[-math.inf, 0, -math.inf, -math.inf]]
    assert (process_logits(LOGITS, Sampling(top_k=99)) > -math.inf).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_one_hot_of_the_first_argmax(temperature: float) -> None:
    """cases.md 42."""
    assert process_logits(LOGITS, Sampling(temperature)).exp().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_bad_temperatures(temperature: float) -> None:
    with pytest.raises(InputError, match="temperature is"):
        Sampling(temperature)


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_unusable_logits(bad: list[float]) -> None:
    for sampling in (Sampling(), Sampling(0), Sampling(top_p=0.5)):
        with pytest.raises(InputError, match="NaN or infinity"):
            process_logits(torch.tensor([[0.0, 0.0], bad]), sampling)


def test_extremes_stay_finite() -> None:
    """cases.md 44: large logits over small temperatures, bfloat16 in, float32 out."""
    out = process_logits(torch.tensor([3e4, -3e4, 3e4], dtype=torch.bfloat16), Sampling(1e-4))
    assert out.dtype == torch.float32
    assert out.exp().tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("spread", [0.3, 8.0])  # a nucleus wider than the first look, and one inside it
def test_nucleus_is_the_smallest_set_that_reaches_top_p(spread: float) -> None:
    logits = (torch.randn(3, 2000, generator=torch.Generator().manual_seed(0)) * spread).bfloat16().float()  # with ties
    kept = process_logits(logits, Sampling(top_p=0.7)) > -torch.inf
    for row in range(3):
        probs = logits[row].softmax(0).tolist()
        ranked, mass, wanted = sorted(range(2000), key=lambda x: (-probs[x], x)), 0.0, set()
        for token in ranked:
            if mass >= 0.7:
                break
            mass, wanted = mass + probs[token], wanted | {token}
        assert set(kept[row].nonzero().flatten().tolist()) == wanted


@given(
    values=st.lists(st.sampled_from([-math.inf, -3.0, -2.0, -1.0, 0.0]), min_size=1, max_size=12),
    k=st.integers(1, 14),
)
@settings(max_examples=200, deadline=None)
def test_top_tokens_is_a_sort(values: list[float], k: int) -> None:
    ranked = sorted(range(len(values)), key=lambda x: (-values[x], x))[:k]
    found, ids = top_tokens(torch.tensor([[values], [values]]), k)
    assert found.shape == ids.shape == (2, 1, min(k, len(values)))
    for row in range(2):
        assert found[row, 0].tolist() == [values[x] for x in ranked]
        assert ids[row, 0].tolist() == [x if values[x] > -math.inf else 0 for x in ranked]


def test_top_tokens_on_a_large_row_of_ties() -> None:
    logits = torch.randint(0, 5, (3, 20_000), generator=torch.Generator().manual_seed(0)).float()
    _, ids = top_tokens(logits, 10)
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :10])


def test_seeds_differ_by_what_they_are_for() -> None:
    parts = [(0, "data"), (0, "train"), (1, "data"), (0, "data", 0), ("0", "data"), (0.0, "data"), (0, None), (0, True)]
    seeds = {seed_for(*part) for part in parts}
    assert len(seeds) == len(parts) and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(0, "data") == 7429019527356134817
    with pytest.raises(TypeError, match="got Tensor"):
        seed_for(torch.tensor(0))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3, generator=generator_for(1)), torch.rand(3, generator=generator_for(1)))
