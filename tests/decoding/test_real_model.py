"""The bars of decoding on SmolLM2-135M-Instruct, where it has been fetched (`exittrain models fetch smollm2-135m`)."""

import pytest
import torch

from exittrain import TargetModel, decode, load_drafter
from exittrain.models.fetch import cached_folder

FOLDER = cached_folder("smollm2-135m")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(FOLDER is None, reason="smollm2-135m has not been fetched")]
TOPICS = (
    "the sea", "bread", "gravity", "chess", "the moon", "rice", "trains", "music", "winter", "bees", "sleep", "maps",
    "clocks", "paper", "tea", "stars", "salt", "rivers", "glass", "birds",
)  # fmt: skip
NEW = 64


@pytest.fixture(scope="module")
def target():
    return TargetModel.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def prompts(target):
    forms = ("Tell me about {}.", "Write three sentences on {} for a child, please.", "Why do people like {}?")
    turns = [[{"role": "user", "content": forms[i % 3].format(topic)}] for i, topic in enumerate(TOPICS)]
    apply = target.tokenizer.apply_chat_template
    return [list(apply(turn, add_generation_prompt=True, return_dict=False)) for turn in turns]


@pytest.fixture(scope="module")
def expected(target, prompts):
    """Hugging Face's own greedy decoding, one prompt at a time."""
    with torch.no_grad():
        return [
            target.module.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, attention_mask=torch.ones(1, len(prompt))
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]


WITHOUT_A_MIDDLE_LAYER = "layers:" + ",".join(str(layer) for layer in range(30) if layer != 15)


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (None, {}),
        ("layers:4", {"budget": 16}),
        ("layers:0,10,29", {"builder": "static", "branching": "eagle", "budget": 25}),
        (WITHOUT_A_MIDDLE_LAYER, {"builder": "best_first", "budget": 12, "depth": 10, "width": 4}),
        (WITHOUT_A_MIDDLE_LAYER, {"builder": "beam", "budget": 16, "depth": 8, "width": 2, "verifier": "residual"}),
    ],
)
def test_greedy_decoding_equals_generate(target, prompts, expected, spec, settings):
    drafter = None if spec is None else load_drafter(spec, target)
    outs = decode(target, drafter, prompts, temperature=0, max_new_tokens=NEW, **settings)
    assert [out.token_ids for out in outs] == expected


def test_block_length_lies_within_one_plus_coverage(target, prompts):
    drafter = load_drafter(WITHOUT_A_MIDDLE_LAYER, target)
    outs = decode(
        target, drafter, prompts, max_new_tokens=NEW, record_coverage=True,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    rounds = [one for out in outs for one in out.rounds]
    gaps = torch.tensor([one.block_length - 1 - one.coverage for one in rounds], dtype=torch.float64)
    assert sum(one.coverage for one in rounds) / len(rounds) > 1
    assert abs(float(gaps.mean())) < 1.96 * float(gaps.std()) / len(gaps) ** 0.5
