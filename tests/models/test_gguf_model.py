"""A model that comes as GGUF: SmolLM2-135M-Instruct from its package, dequantised once and kept as a folder."""

from __future__ import annotations

import pytest
import torch

from exittrain.models.fetch import cached_folder
from exittrain.models.target import TargetModel

pytestmark = pytest.mark.slow
TEXTS = [
    "Why is the sky blue?", "def add(a, b):\n    return a + b\n", "  two  spaces ", "naïve café", "日本語のテキスト",
    "1,234.5 %", "<|im_start|>", "\t\n", "emoji 🙂🚀", "https://example.org/a?b=c#d", "ALL CAPS", "don't",
    "x² + y² = z²", "{'key': [1, 2]}", "línea", "--flag=value", "Ω≈ç√", "a" * 40, "0x1F4A9", "«quoted»",
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> TargetModel:
    folder = cached_folder("smollm2-135m")
    if folder is None:
        pytest.skip("smollm2-135m is not here: exittrain models fetch smollm2-135m")
    return TargetModel.from_pretrained(folder)


def test_texts_and_special_ids_come_back(model: TargetModel) -> None:
    tokenizer = model.tokenizer
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [0, 1, 2] and 2 in model.eos_token_ids
    assert model.vocab_size == 49152 and len(TEXTS) == 20
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@torch.no_grad()
def test_the_weights_are_tied_float32_and_know_things(model: TargetModel) -> None:
    assert model.output.weight is model.embeddings.weight and model.dtype == torch.float32
    size = sum(p.numel() * p.element_size() for p in model.module.parameters())
    assert size < 600 << 20  # 135 M numbers, tied embeddings once
    ids = torch.tensor(model.tokenizer("The capital of France is")["input_ids"])
    logits = model.head(model.hidden(ids[None]))[0, -1]
    assert model.tokenizer.decode([int(logits.argmax())]) == " Paris"
    assert logits.isfinite().all() and float(logits.softmax(-1).max()) > 0.2
