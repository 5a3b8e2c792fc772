"""What packed scoring saves: 16 trees of 32 nodes on a 200-token sequence, against each tree alone behind its context.

Run: python tests/bench/bench_packed.py [MODEL] [--threads N] [--repeats N]. Without MODEL: a random Llama of the size
of SmolLM2-135M. All sides end in the same log-probabilities (the largest difference is printed) and run in turn in one
process; ratios are of medians. "alone" scores each tree by itself behind the whole sequence, "cut" behind the sequence
up to its anchor.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from exittrain.drafters.scratch import make_causal_lm
from exittrain.models.target import TargetModel
from exittrain.tree.draft_tree import DraftTree

LENGTH, TREES, NODES = 200, 16, 32


def random_tree(root: int, vocab_size: int, generator: torch.Generator) -> DraftTree:
    """NODES nodes, each under a random earlier one; token ids all different."""
    tokens = torch.randperm(vocab_size, generator=generator)[:NODES].tolist()
    parents = [int(torch.randint(node, (1,), generator=generator)) for node in range(1, NODES + 1)]
    return DraftTree([root, *tokens], [-1, *parents])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model:
        model = TargetModel.from_pretrained(args.model)
    else:
        made = make_causal_lm(49152, 576, 30, 9, 1536)
        model = TargetModel(made.module.requires_grad_(False))
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(model.vocab_size, (LENGTH,), generator=generator)
    anchors = sorted(torch.randperm(LENGTH, generator=generator)[:TREES].tolist())
    trees = [random_tree(int(sequence[anchor]), model.vocab_size, generator) for anchor in anchors]
    sides = {
        "packed": lambda: model.score_trees(sequence, anchors, trees),
        "alone": lambda: [model.score_trees(sequence, [a], [t])[0] for a, t in zip(anchors, trees, strict=True)],
        "cut": lambda: [model.score_trees(sequence[: a + 1], [a], [t])[0] for a, t in zip(anchors, trees, strict=True)],
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    scores = {}
    for _ in range(args.repeats):
        for side, score in sides.items():
            start = time.perf_counter()
            scores[side] = score()
            seconds[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    print(f"{TREES} trees of {NODES} nodes, {LENGTH} tokens, {args.threads} threads, {args.repeats} repeats")
    for side, median in medians.items():
        pairs = zip(scores["packed"], scores[side], strict=True)
        error = max(float((ours.exp() - theirs.exp()).abs().max()) for ours, theirs in pairs)
        ratio = medians["packed"] / median
        print(f"{side:7} {median:6.2f} s   packed / {side} {ratio:.3f}   largest difference in probability {error:.1e}")


if __name__ == "__main__":
    main()
