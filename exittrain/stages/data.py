"""Stage `data`: prompts or conversations in, token sequences with a loss mask out, each row that is lost counted."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from exittrain.config.schema import SourceSection
from exittrain.errors import InputError
from exittrain.law.seeding import seed_for
from exittrain.records.files import write_json
from exittrain.records.schema import CODE_VERSION, SCHEMA_VERSION
from exittrain.runtime import ranks
from exittrain.stages.context import StageContext, say
from exittrain.stages.conversations.answers import Writer, with_help
from exittrain.stages.conversations.chat import RENDER_DATE, ChatRenderer
from exittrain.stages.conversations.prepare import Prepared, prepare_chat, prepare_text
from exittrain.stages.conversations.store import (
    TokenSequence,
    read_sequences,
    write_conversations,
    write_sequences,
)
from exittrain.stages.conversations.text import text_files

STAGE = "data"


def run_data(context: StageContext) -> None:
    """Write data/train.parquet, heldout.parquet, conversations.jsonl and manifest.json of the run.

    Restartable: what the target has already written is kept beside the stage until the stage is done. All ranks write
    for the target; the files are the same on any number of them.

    Raises:
        InputError: a source that cannot be read, or no usable row in it; nothing is written then.
        Interrupted: stopped by a signal, with the finished batches kept.
    """
    if not ranks.from_main(lambda: context.run.is_done(STAGE, context.stage_key(STAGE))):
        with_help(lambda: _make(context), lambda: _writer(context, chat_renderer(context)))


def _make(context: StageContext) -> None:
    """The main rank's: sources are read and the stage's files written once, what the target writes is everybody's."""
    data, positions = context.recipe.data, context.target().max_positions
    if data.max_length > positions:
        raise InputError(f"data.max_length is {data.max_length}, the target has {positions} positions: lower it")
    text = data.train.kind == "text"
    if data.heldout is not None and (data.heldout.kind == "text") != text:
        raise InputError("data.train and data.heldout must both be of kind 'text', or neither")
    train, heldout, about = _from_text(context) if text else _from_chat(context)
    _save(context, context.stage_key(STAGE), train, heldout, about)


def _writer(context: StageContext, renderer: ChatRenderer) -> Writer:
    target, folder = context.target(), context.run.path / ".data-parts"
    attention = context.recipe.target.attention
    identity = f"{target.fingerprint()} {renderer.template_sha256} {attention} {CODE_VERSION}"
    return Writer(target, context.recipe.data.generation, folder, context.recipe.seed, context.stop, identity)


def chat_renderer(context: StageContext) -> ChatRenderer:
    """The one renderer of a recipe: training data and evaluation prompts go through it alike."""
    target, data = context.target(), context.recipe.data
    return ChatRenderer(
        target.tokenizer, target.eos_token_ids, data.system, data.system_turns, data.supervise, data.template
    )


def show_samples(context: StageContext, n: int = 3) -> None:
    """Print n training sequences: trained tokens green, context dim. Runs the stage first when it has not been run."""
    from rich.console import Console
    from rich.text import Text

    run_data(context)
    if not ranks.is_main():
        return
    tokenizer, console = context.target().tokenizer, Console(highlight=False)
    sequences = read_sequences(context.run.path / STAGE / "train.parquet")
    for one in sequences[:n]:
        trained = sum(one.loss_mask)
        console.rule(f"{one.sequence_id} · {one.source} · {len(one.token_ids)} tokens, {trained} trained")
        line = Text()
        for start, stop, mask in runs(one.loss_mask):
            words = tokenizer.decode(one.token_ids[start:stop], clean_up_tokenization_spaces=False)
            line.append(words, style="bold green" if mask else "dim")
        console.print(line)
    console.print(Text.assemble(("trained", "bold green"), "  ", ("context", "dim")))


def runs(mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, stop, value) of the stretches of equal values."""
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(a, b, mask[a]) for a, b in pairwise(edges) if a < b]


def split_prompts(
    sequences: Sequence[TokenSequence], fraction: float, seed: int
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """(train, held-out): `fraction` of the prompts by a seeded hash of their text, all answers of a prompt together.

    At least one prompt is held out when there are two.
    """
    keys = sorted({one.prompt_key for one in sequences}, key=lambda key: seed_for(seed, "heldout", key))
    count = min(max(1, round(fraction * len(keys))), len(keys) - 1) if keys else 0
    held = set(keys[:count])
    return (
        [one for one in sequences if one.prompt_key not in held],
        [one for one in sequences if one.prompt_key in held],
    )


def _from_text(context: StageContext) -> tuple[Prepared, Prepared, dict[str, Any]]:
    data, seed = context.recipe.data, context.recipe.seed
    tokenizer = context.target().tokenizer
    if tokenizer is None:
        raise InputError("the target has no tokenizer: text cannot be cut into tokens")

    def windows(source: SourceSection, held: bool, count: int | None) -> Prepared:
        files = text_files(source.path or "stdlib")[held]
        return prepare_text(tokenizer, files, source, data.max_length, count, seed)

    total = data.train.count
    num_held = max(1, round(total * data.heldout_fraction)) if total is not None else None
    if data.heldout is not None:
        return windows(data.train, False, total), windows(data.heldout, True, data.heldout.count), {}
    rest = total - num_held if total is not None and num_held is not None else None
    return windows(data.train, False, rest), windows(data.train, True, num_held), {}


def _from_chat(context: StageContext) -> tuple[Prepared, Prepared, dict[str, Any]]:
    data, seed, renderer = context.recipe.data, context.recipe.seed, chat_renderer(context)
    writer = _writer(context, renderer)
    train = prepare_chat(renderer, writer, data.train, data, seed, "train")
    if data.heldout is None:
        kept, held = split_prompts(train.sequences, data.heldout_fraction, seed)
        heldout = Prepared(held, responses=train.responses)
    else:
        heldout = prepare_chat(renderer, writer, data.heldout, data, seed, "heldout")
        keys = {one.prompt_key for one in heldout.sequences}
        kept = [one for one in train.sequences if one.prompt_key not in keys]
        lost = len(train.sequences) - len(kept)
        train.refused.update({"prompt is in the held-out set": lost} if lost else {})
    train = replace(train, sequences=kept)
    about = {
        "template_sha256": renderer.template_sha256,
        "prefix_sha256": renderer.prefix_sha256,
        "render_date": RENDER_DATE.isoformat(),
        "system": data.system,
        "system_turns": data.system_turns,
        "supervise": data.supervise,
    }
    return train, heldout, about


def _save(context: StageContext, key: str, train: Prepared, heldout: Prepared, about: dict[str, Any]) -> None:
    data, target = context.recipe.data, context.target()
    if not train.sequences:
        raise InputError(f"no usable conversation in data.train ({data.train.path or 'magpie'}): {_reasons(train)}")
    context.run.reset(STAGE)
    folder = context.run.stage(STAGE)
    names = {one.sequence_id for one in train.sequences}
    heldout.sequences = [
        replace(one, sequence_id=f"heldout/{one.sequence_id}") if one.sequence_id in names else one
        for one in heldout.sequences
    ]
    write_sequences(folder / "train.parquet", train.sequences)
    write_sequences(folder / "heldout.parquet", heldout.sequences)
    both = [*train.sequences, *heldout.sequences]
    conversations = [one.conversation for one in both if one.conversation is not None]
    if conversations:
        write_conversations(folder / "conversations.jsonl", conversations)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "target": {"name": target.name, "fingerprint": target.fingerprint()},
        "seed": context.recipe.seed,
        "max_length": data.max_length,
        **about,
        "train": _account(train),
        "heldout": _account(heldout),
    }
    write_json(folder / "manifest.json", manifest)
    context.run.finish(STAGE, key)
    shutil.rmtree(context.run.path / ".data-parts", ignore_errors=True)
    for name, part in (("train", manifest["train"]), ("held-out", manifest["heldout"])):
        say(f"data: {name} {part['num_sequences']} sequences, {part['num_trained_tokens']} trained tokens")
    for prepared in (train, heldout):
        if prepared.refused:
            say(f"data: refused {_reasons(prepared)}")
        if prepared.masked_turns:
            say(f"data: masked turns: {', '.join(f'{n} {why}' for why, n in prepared.masked_turns.items())}")
    if not heldout.sequences:
        say("data: nothing is held out, there is only one prompt")


def _account(prepared: Prepared) -> dict[str, Any]:
    return {
        "num_rows": prepared.num_rows,
        "num_sequences": len(prepared.sequences),
        "num_tokens": sum(len(one.token_ids) for one in prepared.sequences),
        "num_trained_tokens": sum(sum(one.loss_mask) for one in prepared.sequences),
        "sources": dict(Counter(one.source for one in prepared.sequences)),
        "refused": dict(prepared.refused),
        "masked_turns": dict(prepared.masked_turns),
        "num_cut": prepared.num_cut,
        "responses": prepared.responses,
    }


def _reasons(prepared: Prepared) -> str:
    return ", ".join(f"{count} {why}" for why, count in prepared.refused.most_common()) or "it is empty"
