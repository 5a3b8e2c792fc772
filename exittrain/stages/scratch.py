"""Stage `target`: a tiny target made from nothing on local text, for testbeds: a byte-level BPE and a small Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exittrain.config.schema import ScratchTargetSection
from exittrain.drafters.scratch import make_causal_lm
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.law.seeding import generator_for, seed_for
from exittrain.models.causal import CausalModel
from exittrain.models.folders import atomic_folder
from exittrain.models.loading import quiet_transformers
from exittrain.models.sums import check_folder
from exittrain.runtime.ranks import all_reduce_sums, barrier, is_main, rank, world_size
from exittrain.stages.context import StageContext, say
from exittrain.stages.conversations.text import read_text, text_files
from exittrain.stages.training.loop import Hooks, Sums, train
from exittrain.stages.training.losses import RowHead, label_loss_sum
from exittrain.stages.training.sequences import micro_batches
from exittrain.stages.training.settings import LoopSettings
from exittrain.stages.warmup import engine_config, start_stage

STAGE = "target"
END = "<|endoftext|>"
HELD_OUT_WINDOWS = 64


def run_target(context: StageContext) -> None:
    """Write target/model, a plain Hugging Face folder with its tokenizer.

    Held-out files of the corpus (`text_files`) are never trained on.

    Raises:
        InputError: no such corpus, or too little text.
        Interrupted: stopped by a signal, with a checkpoint.
    """
    section, key = context.recipe.target.scratch, context.stage_key(STAGE)
    if section is None:
        raise InputError("the recipe's target is not made from nothing: it has no 'target.scratch' section")
    if not start_stage(context, STAGE, key):
        return
    folder, seed = context.run.stage(STAGE), seed_for(context.recipe.seed, STAGE) % 2**31
    training, held = text_files(section.corpus)
    tokenizer = corpus_tokenizer(folder, training, section.vocab_size)
    model = make_causal_lm(
        len(tokenizer),
        **section.shape.model_dump(),
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        seed=seed,
        attention=context.recipe.target.attention,
        name="target",
    )
    model.module.to(context.device)
    settings = LoopSettings.from_section(section.model_dump(), eval_every=max(1, section.steps // 5), seed=seed)
    task = LanguageTask(model, token_stream(tokenizer, training), section, settings)
    held_stream = token_stream(tokenizer, held)
    hooks = Hooks(
        evaluate=lambda: task.held_out_loss(held_stream),
        tracker=lambda step: context.tracker(STAGE, step),
        stop=context.stop,
        description=STAGE,
    )
    train(task, settings, folder, engine_config(context.recipe), hooks)
    if is_main():
        with quiet_transformers(), atomic_folder(folder / "model") as temporary:
            model.module.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        context.run.finish(STAGE, key)
    barrier()


def corpus_tokenizer(folder: Path, files: Sequence[Path], vocab_size: int) -> Any:
    """A byte-level BPE learnt from `files`, made once and kept in `folder`/tokenizer; every text has a tokenisation.

    One that is damaged is named and made again, from the same files.
    """
    from transformers import PreTrainedTokenizerFast

    if is_main() and not _is_whole(folder / "tokenizer"):
        with atomic_folder(folder / "tokenizer") as temporary:
            tokenizer = _train_bpe(files, vocab_size)
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(temporary)  # type: ignore[no-untyped-call]
    barrier()
    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
    except InputError as error:
        say(f"{STAGE}: again, because {error}")
        return False
    return folder.exists()


def _train_bpe(files: Sequence[Path], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_text(file) for file in files), trainer)
    return tokenizer


def token_stream(tokenizer: Any, files: Sequence[Path]) -> Tensor:
    """All files' tokens in order, an end token after each: 1-D int64."""

    def parts() -> Iterator[list[int]]:
        for start in range(0, len(files), 64):
            texts = [read_text(file) for file in files[start : start + 64]]
            yield from tokenizer(texts, add_special_tokens=False)["input_ids"]

    end = np.array([tokenizer.eos_token_id], dtype=np.int64)
    arrays = [array for ids in parts() for array in (np.array(ids, dtype=np.int64), end)]
    return torch.from_numpy(np.concatenate(arrays))


@dataclass(frozen=True, eq=False)
class Windows:
    """One micro-batch: input_ids [S, L]; every token but a window's first is predicted."""

    sample_ids: list[str]
    counts: Sums
    input_ids: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids[:, 1:].numel()


class LanguageLoss(nn.Module):
    """Next-token cross-entropy."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self.network = model.module
        self._model = model

    def forward(self, batch: Windows, scales: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        ids = batch.input_ids
        rows = self._model.hidden(ids)[:, :-1].flatten(0, 1)
        if not len(ids):
            return self._model.head(rows).sum() * 0.0, {"token_loss": torch.zeros(())}
        total = label_loss_sum(
            RowHead(self._model.head, self._model.vocab_size), rows, ids[:, 1:].flatten(), Sampling()
        )
        return total * scales["token"], {"token_loss": total.detach()}


class LanguageTask:
    """A `loop.Task`: windows of `section.length` tokens at places drawn by (seed, step).

    Raises InputError when the text is shorter than a window.
    """

    def __init__(
        self, model: CausalModel, stream: Tensor, section: ScratchTargetSection, settings: LoopSettings
    ) -> None:
        if len(stream) <= section.length:
            raise InputError(f"corpus {section.corpus!r} has {len(stream)} tokens, less than one window")
        self.module = LanguageLoss(model)
        self._model, self._stream, self._length, self._settings = model, stream, section.length, settings

    def runs_module(self, step: int) -> bool:
        return False

    def prepare(self, step: int) -> list[Windows]:
        settings, world = self._settings, world_size()
        generator = generator_for(settings.seed, "windows", step)
        starts = torch.randint(len(self._stream) - self._length, (settings.batch_size,), generator=generator)
        shares = micro_batches(settings.batch_size, settings.num_micro_batches(world), rank(), world)
        return [self._windows(self._stream, starts[torch.tensor(share, dtype=torch.int64)]) for share in shares]

    def _windows(self, stream: Tensor, starts: Tensor) -> Windows:
        ids = stream[starts[:, None] + torch.arange(self._length)].to(self._model.device)
        names = [f"corpus:{start}" for start in starts.tolist()]
        return Windows(names, {"tokens": float(ids[:, 1:].numel())}, ids)

    def scales(self, step: int, totals: Sums) -> Sums:
        return {"token": 1 / totals["tokens"]}

    def metrics(self, step: int, sums: Sums, totals: Sums) -> dict[str, float]:
        return {"loss": sums["token_loss"] / totals["tokens"], "num_tokens": totals["tokens"]}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        pass

    @torch.no_grad()
    def held_out_loss(self, stream: Tensor) -> dict[str, float]:
        """Mean next-token loss (nats) on evenly spaced windows; score: its negative."""
        last = max(len(stream) - self._length, 1)
        starts = torch.arange(0, last, max(last // HELD_OUT_WINDOWS, 1))[rank() :: world_size()]
        sums = {"loss": 0.0, "tokens": 0.0}
        for part in torch.split(starts, 16):
            batch = self._windows(stream, part)
            sums["loss"] += float(self.module(batch, {"token": 1.0})[1]["token_loss"])
            sums["tokens"] += batch.counts["tokens"]
        sums = all_reduce_sums(sums)
        loss = sums["loss"] / max(sums["tokens"], 1.0)
        return {"score": -loss, "loss": loss}
