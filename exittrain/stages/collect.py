"""Stage `collect`: the warm drafter's trees at anchors of the training data, scored by the target, in shards."""

from __future__ import annotations

import shutil
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
from exittrain.records.files import clean_temporary
from exittrain.records.shards import shard_is_whole, shard_name, write_manifest, write_shard
from exittrain.runtime.progress import progress_bar
from exittrain.stages.context import StageContext, say
from exittrain.stages.coverage import ScoredTrees, draw_and_score
from exittrain.stages.training.scoring import row_chunks
from exittrain.stages.training.sequences import SequenceSet, choose_anchors
from exittrain.stages.training.trees import anchor_groups, max_trees, move_trees, tree_generators
from exittrain.stages.warmup import start_stage, training_sequences, warm_drafter

STAGE = "collect"
CPU = torch.device("cpu")
GIB = float(1 << 30)


def run_collect(context: StageContext) -> None:
    """Write collect/shard-*.parquet and manifest.json: one row an anchor (records/schema.py names the columns).

    Whole shards of an earlier, interrupted run are kept; a damaged one is named and made again.

    Raises:
        InputError: no `collect` section, no room on the disk, data of another target.
        Interrupted: stopped by a signal; finished shards stay.
    """
    section, key = context.recipe.collect, context.stage_key(STAGE)
    if section is None:
        raise InputError("the recipe has no 'collect' section")
    if not start_stage(context, STAGE, key):
        return
    folder = context.run.stage(STAGE)
    clean_temporary(folder)
    target = context.target()
    shards = _shards(training_sequences(context, target), section, context.recipe.seed)
    missing = [i for i in range(len(shards)) if not _is_whole(folder / shard_name(i, len(shards)))]
    check_room(folder, sum(len(shards[i]) for i in missing) * section.anchors_per_sequence, context)
    collector = Collector(context, section, target)
    with progress_bar(sum(len(shards[i]) for i in missing), STAGE, "sequences") as bar:
        for i in missing:
            write_shard(folder / shard_name(i, len(shards)), collector.rows(shards[i], context.recipe.seed))
            bar.advance(len(shards[i]))
            context.stop.raise_if_set()
    hashes = {"target_hash": target.fingerprint(), "drafter_hash": collector.drafter_hash}
    manifest = write_manifest(folder, len(shards), {**hashes, "temperature": context.sampling.temperature})
    context.run.finish(STAGE, key)
    say(f"{STAGE}: {manifest['rows']} trees in {len(shards)} shards, {len(missing)} of them made now")


def check_room(folder: Path, num_trees: int, context: StageContext) -> None:
    """Raises:
    InputError: the disk has less room than the trees to come may take (an upper bound, uncompressed).
    """
    recipe = context.recipe
    top_k = recipe.collect.top_k_logprobs if recipe.collect else 0
    needed = num_trees * ((recipe.tree.budget + 1) * (3 * 4 + 4 + 4 * 8 + top_k * 8 + 4) + 256)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"collect may need {needed / GIB:.2f} GiB in {folder}, {free / GIB:.2f} GiB are free: make room, or lower "
            "'collect.sequences' or 'collect.anchors_per_sequence'"
        )


def _is_whole(path: Path) -> bool:
    whole = shard_is_whole(path)
    if path.exists() and not whole:
        say(f"{STAGE}: {path} is damaged (its sha256 differs): making it again")
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
