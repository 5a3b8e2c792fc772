"""Tokens a second of plain and speculative decoding, side by side in one process.

    python tests/bench/bench_decode.py [target] [drafter] [--dtype bfloat16] [--tokens 64] [--batch 1] [--threads 2]

target: anything TargetModel.from_pretrained takes; drafter: anything load_drafter takes. The two kinds take turns, so
both see the same machine. An untrained drafter shows what a round costs, not what training gains.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch

from exittrain import TargetModel, decode, load_drafter
from exittrain.decoding.result import STAGES

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain gravity to a child.",
    "List three fruits and say why people like them.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("drafter", nargs="?", default="layers:6")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = TargetModel.from_pretrained(options.target, dtype=getattr(torch, options.dtype))
    drafter = load_drafter(options.drafter, target)
    prompts = [chat(target, question) for question in QUESTIONS]

    tokens: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    stages: dict[str, Counter[str]] = {"plain": Counter(), "speculative": Counter()}
    blocks = []
    for start in range(len(prompts)):
        batch = [prompts[(start + i) % len(prompts)] for i in range(options.batch)]
        for kind, chosen in (("plain", None), ("speculative", drafter)):
            outs = decode(
                target, chosen, batch, temperature=options.temperature, budget=options.budget,
                max_new_tokens=options.tokens, eos_token_ids=(), generator=torch.Generator().manual_seed(start),
                synchronize=True,
            )  # fmt: skip
            for out in outs:
                tokens[kind] += len(out.token_ids)
                seconds[kind] += out.total_seconds
                for one in out.rounds:
                    stages[kind].update(one.seconds)
                    if chosen is not None:
                        blocks.append(one.block_length)
    print(
        f"{target.name}, drafter {options.drafter}, {options.dtype}, batch {options.batch}, {options.threads} threads"
    )
    print("| kind | tokens/s | " + " | ".join(f"{stage} s" for stage in STAGES) + " |")
    print("| --- " * (2 + len(STAGES)) + "|")
    for kind in stages:
        spent = " | ".join(f"{stages[kind][stage]:.2f}" for stage in STAGES)
        print(f"| {kind} | {tokens[kind] / seconds[kind]:.1f} | {spent} |")
    print(f"mean block length (pooled, bonus included): {sum(blocks) / len(blocks):.3f}")


def chat(target: TargetModel, question: str) -> list[int]:
    turn = [{"role": "user", "content": question}]
    return list(target.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


if __name__ == "__main__":
    main()
