"""What `from exittrain import ...` promises, and that importing the package costs nothing."""

import subprocess
import sys

import pytest

import exittrain

NAMES = ["DraftTree", "exit_law", "get_verifier", "get_builder", "TargetModel", "load_drafter", "decode", "Sampling"]


def test_every_public_name_is_there():
    for name in [*NAMES, "InputError"]:
        assert callable(getattr(exittrain, name))
        assert name in exittrain.__all__ and name in dir(exittrain)


def test_homes_and_all_agree():
    assert sorted(exittrain._HOMES) == exittrain.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'verify_tree'"):
        _ = exittrain.verify_tree


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_loads_no_torch():
    assert run("import sys, exittrain; print('torch' in sys.modules)") == "False"


def test_decode_is_the_function_whatever_was_imported_before():
    code = (
        "import exittrain.decoding.loop; from exittrain import decode; print(type(decode).__name__, decode.__module__)"
    )
    assert run(code) == "function exittrain.decoding.loop"


def test_the_documented_example(tmp_path):
    """The API of the README, on a tiny model saved to disk."""
    import torch

    from exittrain import DraftTree, TargetModel, decode, exit_law, get_builder, get_verifier, load_drafter
    from exittrain.drafters.scratch import make_causal_lm

    make_causal_lm(50, 32, 2, 2, 64).module.save_pretrained(tmp_path)
    tree = DraftTree([3, 5, 6, 7], [-1, 0, 0, 1], drawn=None)
    probs = torch.full((4, 50), 1 / 50)
    law, verifier = exit_law(tree, probs), get_verifier("tev")
    assert float(law.coverage) == pytest.approx(2 / 50 + 1 / 2500)
    generator = torch.Generator().manual_seed(0)
    verdict = verifier.verify(tree, probs, draft_probs=None, generator=generator)
    assert verdict.num_accepted == len(verdict.path) and 0 <= verdict.bonus_token < 50
    assert sum(verifier.block_law(tree, probs).values()) == pytest.approx(1)
    assert verifier.expected_block_length(tree, probs) == pytest.approx(1 + float(law.coverage))
    assert callable(get_builder("best_first"))

    target = TargetModel.from_pretrained(tmp_path, dtype=torch.float32)
    scores = target.score_trees([1, 2, 3, 4], [2], [tree])
    assert scores[0].shape == (4, 50)
    drafter = load_drafter("layers:1", target)
    out = decode(target, drafter, [1, 2, 3], builder="best_first", budget=16, verifier="tev", temperature=1.0,
                 max_new_tokens=12, generator=generator)  # fmt: skip
    assert len(out.token_ids) == 12 and sum(r.num_emitted for r in out.rounds) == 12
    assert all(r.block_length >= 1 and r.seconds["score"] > 0 for r in out.rounds)
