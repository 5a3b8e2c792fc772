"""Stage `collect`: the warm drafter's trees at anchors of the training data, scored by the target, in shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exittrain.config.schema import CollectSection
from exittrain.errors import InputError
from exittrain.law.ranking import top_tokens
from exittrain.law.sampling import process_logits
from exittrain.law.seeding import generator_for
from exittrain.models.target import TargetModel
from exittrain.records.files import TEMPORARY
from exittrain.records.shards import has_record, shard_count, shard_is_whole, shard_name, write_manifest, write_shard
from exittrain.runtime import ranks
from exittrain.runtime.parts import share
from exittrain.runtime.progress import progress_bar
from exittrain.stages.context import StageContext, say
from exittrain.stages.coverage import ScoredTrees, draw_and_score
from exittrain.stages.training.scoring import row_chunks
from exittrain.stages.training.sequences import SequenceSet, choose_anchors
from exittrain.stages.training.trees import anchor_groups, max_trees, move_trees, tree_generators
from exittrain.stages.warmup import training_sequences, warm_drafter

STAGE = "collect"
CPU = torch.device("cpu")


def work_collect(context: StageContext) -> None:
    """Every rank: write the shards of this part that are this rank's, unless they are whole already.

    A shard has one owner whatever is there already, and its bytes depend on its number alone. A damaged one is named
    and made again. Where a rank has nothing to do it waits for the others.

    Raises:
        InputError: no `collect` section, no room on the disk, data of another target, or another rank's trouble.
        Interrupted: stopped by a signal; finished shards stay.
    """
    num_made = ranks.all_reduce_sums({"made": float(ranks.on_all(lambda: _make_shards(context)))})["made"]
    say(f"{STAGE}: {num_made:.0f} shard(s) made now")


def finish_collect(context: StageContext) -> bool:
    """Main rank: write manifest.json and the stage's mark. False while some shard is not whole; the first is named."""
    folder, parts = context.run.path / STAGE, context.part.count
    count, key = shard_count(folder), context.stage_key(STAGE)
    files = [folder / shard_name(i, count) for i in range(count)]
    missing = [i for i in range(count) if not has_record(files[i])]  # cheap: most parts end before the last one
    missing = missing or [i for i in range(count) if not shard_is_whole(files[i], key)]
    if missing or not count:
        rest = f", {files[missing[0]].name} by part {missing[0] % parts}/{parts}" if missing else ""
        say(f"{STAGE}: {len(missing) or 'all'} shards are still to be made{rest}")
        return False
    drafter, target = context.drafter(warm_drafter(context)), context.target()
    hashes = {"target_hash": target.fingerprint(), "drafter_hash": drafter.fingerprint()}
    manifest = write_manifest(folder, count, {**hashes, "temperature": context.sampling.temperature})
    context.run.finish(STAGE, key)
    say(f"{STAGE}: {manifest['rows']} trees in {count} shards")
    return True


def _section(context: StageContext) -> CollectSection:
    if context.recipe.collect is None:
        raise InputError("the recipe has no 'collect' section")
    return context.recipe.collect


def _make_shards(context: StageContext) -> int:
    """This rank's missing shards; returns how many there were."""
    section, seed, folder, target = _section(context), context.recipe.seed, context.run.path / STAGE, context.target()
    key = context.stage_key(STAGE)
    shards = _shards(training_sequences(context, target), section, seed)
    files = [folder / shard_name(i, len(shards)) for i in range(len(shards))]
    own = share(range(len(shards)), context.part)
    _clear(folder, {files[i].stem for i in own})
    missing = [i for i in own if not _is_whole(files[i], key)]
    if not missing:
        return 0
    collector = Collector(context, section, target)
    with progress_bar(sum(len(shards[i]) for i in missing), STAGE, "sequences") as bar:
        for i in missing:
            write_shard(files[i], collector.rows(shards[i], seed), key)
            bar.advance(len(shards[i]))
            context.stop.raise_if_set()
    return len(missing)


def _clear(folder: Path, own: set[str]) -> None:
    """Remove what killed writers of these shards left: nobody else writes them."""
    for left in folder.glob(f"{TEMPORARY}*"):
        if left.name.removeprefix(TEMPORARY).partition(".")[0] in own:
            left.unlink(missing_ok=True)


def _is_whole(path: Path, key: str) -> bool:
    whole = shard_is_whole(path, key)
    if path.exists() and not whole:  # said by the rank that owns it, whichever that is
        why = "of another recipe" if shard_is_whole(path) else "damaged (its sha256 differs)"
        print(f"{STAGE}: {path} is {why}: making it again", file=sys.stderr, flush=True)
    return whole


def _shards(sequences: SequenceSet, section: CollectSection, seed: int) -> list[SequenceSet]:
    """The sequences to collect from, chosen by the seed, in as many parts as there are shards."""
    count = min(section.sequences or len(sequences), len(sequences))
    chosen = torch.randperm(len(sequences), generator=generator_for(seed, STAGE, "sequences"))[:count].sort().values
    return [sequences.select(part.tolist()) for part in chosen.tensor_split(min(section.shards, count))]


def collected_generators(builder: str, places: Iterable[tuple[str, int]], seed: int) -> list[torch.Generator] | None:
    """What the trees at (sequence id, anchor) are drawn from: that arms may draw them again from the same numbers."""
    return tree_generators(builder, places, seed, STAGE, "tree")


class Collector:
    """Trees of one drafter, scored by one target, as rows."""

    def __init__(self, context: StageContext, section: CollectSection, target: TargetModel) -> None:
        self._target, self._section, self._context = target, section, context
        self._drafter = context.drafter(warm_drafter(context))
        self.drafter_hash = self._drafter.fingerprint()

    def rows(self, sequences: SequenceSet, seed: int) -> list[dict[str, Any]]:
        """One row an anchor, ordered by sequence and anchor; a sequence's anchors depend on (seed, its id) only, what
        its trees are drawn from on the anchor too."""
        shape, target = self._context.shape, self._target
        per_sequence, last = self._section.anchors_per_sequence, target.max_positions - shape.depth - 1
        owners, places = [], []
        for i, name in enumerate(sequences.ids):
            _, anchors = choose_anchors(
                [sequences.anchor_mask(i, last)], per_sequence, generator_for(seed, STAGE, name)
            )
            owners.append(torch.full_like(anchors, i))
            places.append(anchors)
        tree_sequence, anchors = torch.cat(owners), torch.cat(places)
        names = [sequences.ids[i] for i in tree_sequence.tolist()]
        builder = self._context.recipe.tree.builder
        generators = collected_generators(builder, zip(names, anchors.tolist(), strict=True), seed)
        rows: list[dict[str, Any] | None] = [None] * len(anchors)
        for group in anchor_groups(sequences.lengths, tree_sequence, max_trees(target.vocab_size, shape)):
            self._context.stop.raise_if_set()
            scored = draw_and_score(
                target, self._drafter, sequences.tokens, tree_sequence, anchors, group,
                shape, self._context.sampling, builder, self._section.top_k_logprobs > 0, generators,
            )  # fmt: skip
            own = [names[row] for row in group.tolist()]
            for row, record in zip(group.tolist(), self._records(scored, own, anchors[group].tolist()), strict=True):
                rows[row] = record
        return [row for row in rows if row is not None]

    def _records(self, scored: ScoredTrees, names: list[str], anchors: list[int]) -> list[dict[str, Any]]:
        trees, law = move_trees(scored.trees, CPU), scored.law
        assert trees.draft_logprobs is not None  # every builder sets them
        reach, miss, leaving = law.reach.cpu(), law.miss.cpu(), law.exit.cpu()
        coverage, edge_logprobs = law.coverage.tolist(), scored.edge_logprobs.cpu()
        top_ids, top_logprobs, tail = (part.cpu() for part in self._top_k(scored))
        records = []
        for i, size in enumerate(trees.valid.sum(1).tolist()):
            records.append(
                {
                    "sequence_id": names[i],
                    "anchor": anchors[i],
                    "token_ids": trees.token_ids[i, :size].tolist(),
                    "parents": trees.parents[i, :size].tolist(),
                    "depths": trees.depths[i, :size].tolist(),
                    "draft_logprob": trees.draft_logprobs[i, 1:size].tolist(),
                    "target_logprob": edge_logprobs[i, 1:size].tolist(),
                    "reach": reach[i, :size].tolist(),
                    "miss": miss[i, :size].tolist(),
                    "exit": leaving[i, :size].tolist(),
                    "top_ids": top_ids[i, :size].tolist() if top_ids.numel() else [],
                    "top_logprobs": top_logprobs[i, :size].tolist() if top_ids.numel() else [],
                    "tail_mass": tail[i, :size].tolist() if top_ids.numel() else [],
                    "coverage": coverage[i],
                    "temperature": self._context.sampling.temperature,
                    "drafter_hash": self.drafter_hash,
                    "target_hash": self._target.fingerprint(),
                }
            )
        return records

    @torch.no_grad()
    def _top_k(self, scored: ScoredTrees) -> tuple[Tensor, Tensor, Tensor]:
        """The target's k likeliest tokens at every node: ids, log-probabilities [R, M, k]; the others' mass [R, M]."""
        k, target = min(self._section.top_k_logprobs, self._target.vocab_size), self._target
        count, size = scored.edges.shape
        ids = torch.zeros((count * size, k), dtype=torch.int64, device=target.device)
        values, tail = torch.zeros(ids.shape, device=target.device), torch.zeros(count * size, device=target.device)
        if k:
            for start, stop in row_chunks(scored.hidden, target.vocab_size):
                logprobs = process_logits(target.head(scored.hidden[start:stop]), self._context.sampling)
                rows = scored.edges.rows[start:stop]
                values[rows], ids[rows] = top_tokens(logprobs, k)
                tail[rows] = (1 - values[rows].double().exp().sum(-1)).clamp(0, 1).float()
        return ids.view(count, size, k), values.view(count, size, k), tail.view(count, size)
