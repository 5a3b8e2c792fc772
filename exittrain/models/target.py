"""The target: the model whose distribution must be preserved, scoring trees in packed forwards.

Shapes: S sequences, R trees, N drafted nodes, M = N+1, L tokens of the longest sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, process_logits
from exittrain.models.cache import TreeCache
from exittrain.models.causal import HEAD_ROWS, CausalModel
from exittrain.models.features import TargetStates
from exittrain.models.greedy import Walk, walk_greedily
from exittrain.models.grid import Grid, block_diagonal
from exittrain.models.packed import pad_rows
from exittrain.models.session import CacheSession, open_session, prefixes
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_tree import DraftTree, as_ids

_ROW_NODES = 512  # of one cache row, run at once: beyond these, only memory and masked-out attention grow


class TargetModel(CausalModel):
    """A causal LM that scores draft trees behind their full context (math.md section 7)."""

    def __init__(self, module: Any, tokenizer: Any = None, name: str = "model", verify: bool = True) -> None:
        super().__init__(module, tokenizer, name, verify)
        self._states: dict[tuple[int, ...], TargetStates] = {}

    def states(self, layers: Sequence[int]) -> TargetStates:
        """Hidden states and features along sequences; what was computed is shared by all who read the same layers."""
        chosen = tuple(layers)
        if chosen not in self._states:
            self._states[chosen] = TargetStates(self, chosen)
        return self._states[chosen]

    def score_trees(
        self,
        input_ids: Any,
        anchors: Any,
        trees: Any,
        sampling: Sampling | None = None,
        attention_mask: Any = None,
        max_tokens: int = 4096,
    ) -> Any:
        """Log-probabilities [N+1, V] float32 a tree: row i is the token after node i (row 0: after the root).

        One sequence: input_ids [L], anchors a list of positions, trees a list of DraftTree as long; returns a list.
        A batch: input_ids [S, L] with attention_mask [S, L] (padding left or right, none by default); anchors and trees
        hold one entry a row, either a position and a tree or a list of each; the result has the form of `trees`.
        Anchors index input_ids as given, padding included. A tree's root token is the token at its anchor.
        Raises InputError naming the tree whose anchor, root or token ids do not fit, or that passes the position limit.
        """
        ids = torch.as_tensor(input_ids)
        if ids.dim() == 1:
            scored = self._score([ids], [list(_integers(anchors))], [list(trees)], sampling, max_tokens)
            return scored[0]
        if ids.dim() != 2:
            raise InputError(f"input_ids must be 1-D or 2-D, got shape {tuple(ids.shape)}")
        nested = not all(isinstance(tree, DraftTree) for tree in trees)
        row_trees = [list(row) for row in trees] if nested else [[tree] for tree in trees]
        row_anchors = [list(_integers(row)) for row in anchors] if nested else [[a] for a in _integers(anchors)]
        if not len(row_trees) == len(row_anchors) == len(ids):
            raise InputError(f"{len(ids)} rows need as many entries of anchors and trees, got "
                             f"{len(row_anchors)} and {len(row_trees)}")  # fmt: skip
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        if mask.shape != ids.shape:
            raise InputError(f"attention_mask has shape {tuple(mask.shape)}; input_ids has {tuple(ids.shape)}")
        sequences = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
        for row, keep in enumerate(mask.bool()):
            before = keep.cumsum(0) - 1
            for place, anchor in enumerate(row_anchors[row]):
                if not (0 <= anchor < len(keep) and bool(keep[anchor])):
                    raise InputError(f"anchor {anchor} of row {row} is not a token of that row")
                row_anchors[row][place] = int(before[anchor])
        scored = self._score(sequences, row_anchors, row_trees, sampling, max_tokens)
        return scored if nested else [row[0] for row in scored]

    def _score(
        self, sequences: list[Tensor], anchors: list[list[int]], trees: list[list[DraftTree]],
        sampling: Sampling | None, max_tokens: int,
    ) -> list[list[Tensor]]:  # fmt: skip
        for s, sequence in enumerate(sequences):
            sequences[s] = as_ids(sequence, "input_ids")
            if len(anchors[s]) != len(trees[s]):
                raise InputError(f"{len(anchors[s])} anchors for {len(trees[s])} trees; each tree needs one")
            for anchor, tree in zip(anchors[s], trees[s], strict=True):
                self._check_tree(sequences[s], anchor, tree)
        flat = [(s, anchor, tree) for s in range(len(trees)) for anchor, tree in zip(anchors[s], trees[s], strict=True)]
        if not flat:
            return [[] for _ in trees]
        # How a tree was drawn does not matter for its scores, so mixed lists may share the batch.
        batch = TreeBatch.from_trees([_undrawn(tree) for _, _, tree in flat], self.device)
        rows, places = torch.tensor([s for s, _, _ in flat]), torch.tensor([anchor for _, anchor, _ in flat])
        _, hidden = self.hidden_with_trees(sequences, batch, rows, places, max_tokens)
        scores = iter(self._logprobs(hidden, [tree.num_nodes + 1 for _, _, tree in flat], sampling or Sampling()))
        return [[next(scores) for _ in row] for row in trees]

    @torch.no_grad()
    def _logprobs(self, hidden: Tensor, sizes: list[int], sampling: Sampling) -> Iterator[Tensor]:
        """The first sizes[r] rows of hidden [R, M, H] through the head, several trees at a time: [sizes[r], V] each."""
        step = max(1, HEAD_ROWS // hidden.shape[1])
        for first in range(0, len(sizes), step):
            part = sizes[first : first + step]
            rows = torch.cat([hidden[first + index, :size] for index, size in enumerate(part)])
            yield from (one.clone() for one in torch.split(process_logits(self.head(rows), sampling), part))

    def _check_tree(self, sequence: Tensor, anchor: int, tree: DraftTree) -> None:
        if not 0 <= anchor < len(sequence):
            raise InputError(f"anchor {anchor} lies outside the sequence of {len(sequence)} tokens")
        if int(tree.token_ids[0]) != int(sequence[anchor]):
            raise InputError(
                f"the tree at anchor {anchor} has root token {int(tree.token_ids[0])}; the sequence has "
                f"{int(sequence[anchor])} there"
            )
        ids = torch.cat([sequence, tree.token_ids.to(sequence.device)])
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise InputError(f"token ids must lie in 0..{self.vocab_size - 1} for {self.name}, found {int(outside[0])}")
        if anchor + int(tree.depths.max()) >= self.max_positions:
            raise InputError(f"the tree at anchor {anchor} passes the {self.max_positions} positions of {self.name}")

    def tree_hidden(
        self, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor,
        max_tokens: int = 4096,
    ) -> Tensor:  # fmt: skip
        """Hidden states [R, M, H] at the nodes of R trees; tree r grows from anchors[r] of sequences[tree_sequence[r]].

        No gradient. Each sequence is run once, up to its last anchor; the nodes follow behind its cache in chunks of at
        most max_tokens (one tree a row at least), so memory does not grow with the number of trees.
        """
        cut = prefixes(sequences, tree_sequence, anchors)
        return self._hidden(cut, trees, tree_sequence, anchors, max_tokens)[1]

    def hidden_with_trees(
        self, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor,
        max_tokens: int = 4096,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `tree_hidden`, with the whole sequences' states [S, L, H] (padding says nothing) from the same forward."""
        return self._hidden(sequences, trees, tree_sequence, anchors, max_tokens)

    def greedy_hidden(
        self, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor, wanted: Tensor,
        max_tokens: int = 4096,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`hidden_with_trees` for serving at temperature 0, where only the nodes on the target's argmax path count.

        wanted [R, M] bool: nodes whose state is of use, with their ancestors. Returns (states [S, L, H] along the
        sequences; states [R, M, H] at the roots and the wanted nodes of the paths, 0 elsewhere; path [R, M] bool: the
        root and every node that the target's own continuation passes, as far as the nodes above it are wanted).

        One forward a level, of one node of each tree whose path goes on, all kept behind the cache: far fewer nodes, a
        few more forwards. max_tokens bounds the sequences that are run together. Raises InputError on siblings that
        repeat the path's token.
        """
        path = trees.valid & (trees.depths == 0)
        run = partial(walk_greedily, wanted=wanted, path=path)
        return *self._hidden(sequences, trees, tree_sequence, anchors, max_tokens, run), path

    @torch.no_grad()
    def sequence_hidden(self, sequences: Sequence[Tensor], max_tokens: int = 4096) -> Tensor:
        """Hidden states [S, L, H] of sequences alone, right-padded (padding says nothing); no gradient."""
        longest = max(len(sequence) for sequence in sequences)
        out: Tensor = self.embeddings.weight.new_zeros((len(sequences), longest, self.hidden_size))
        for group in _groups([len(sequence) for sequence in sequences], max_tokens):
            tokens, _ = pad_rows([sequences[s].to(self.device) for s in group])
            out[group, : tokens.shape[1]] = self.hidden(tokens)
        return out

    @torch.no_grad()
    def _hidden(
        self, sequences: Sequence[Tensor], trees: TreeBatch, tree_sequence: Tensor, anchors: Tensor, max_tokens: int,
        run: Walk | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run = run or partial(self._run_nodes, max_tokens=max_tokens)
        rows, anchors = tree_sequence.to(self.device), anchors.to(self.device)
        longest = max(len(sequence) for sequence in sequences)
        like = self.embeddings.weight.detach()
        along = like.new_zeros((len(sequences), longest, self.hidden_size))
        nodes = like.new_zeros((*trees.token_ids.shape, self.hidden_size))
        for group in _groups([len(sequence) for sequence in sequences], max_tokens):
            cache = TreeCache(self, len(group))
            hidden = cache.extend([sequences[s] for s in group])
            along[group, : hidden.shape[1]] = hidden
            for local, s in enumerate(group):
                members = (rows == s).nonzero()[:, 0]
                nodes[members, 0] = hidden[local, anchors[members]]
            members = torch.isin(rows, torch.tensor(group, device=rows.device)).nonzero()[:, 0]
            local_rows = torch.searchsorted(torch.tensor(group, device=rows.device), rows[members])
            run(cache, trees, members, local_rows, anchors, nodes)
        return along, nodes

    def _run_nodes(
        self, cache: TreeCache, trees: TreeBatch, members: Tensor, rows: Tensor, anchors: Tensor, out: Tensor,
        max_tokens: int,
    ) -> None:  # fmt: skip
        """Run the drafted nodes of trees `members` behind the cache, some trees of each of their `rows` at a time."""
        num_nodes, context = trees.token_ids.shape[1] - 1, cache.num_columns
        if num_nodes == 0 or not len(members):
            return
        grid = Grid(rows, cache.num_rows)
        step = max(1, min(max_tokens // cache.num_rows, _ROW_NODES) // num_nodes)
        for first in range(0, grid.width, step):
            chosen = (grid.place >= first) & (grid.place < first + step)
            chunk, part = members[chosen], Grid(grid.rows[chosen], cache.num_rows)
            picked = TreeBatch(
                trees.token_ids[chunk], trees.parents[chunk], trees.depths[chunk], trees.valid[chunk]
            )  # fmt: skip
            own = block_diagonal(part.scatter(picked.visible()[:, 1:, 1:]))
            own |= torch.eye(own.shape[1], dtype=torch.bool, device=own.device)
            prefix = torch.arange(context, device=own.device) <= anchors[chunk][:, None, None]
            prefix = part.scatter(prefix.expand(-1, num_nodes, -1)).flatten(1, 2)
            positions = part.scatter(anchors[chunk][:, None] + picked.depths[:, 1:]).flatten(1)
            tokens = part.scatter(picked.token_ids[:, 1:]).flatten(1)
            hidden = cache.append(tokens, positions, torch.cat([prefix, own], dim=-1))
            out[chunk, 1:] = part.gather(hidden.reshape(cache.num_rows, part.width, num_nodes, -1))
            cache.rollback()

    def session(
        self, sequences: Sequence[Tensor], tree_sequence: Tensor, anchors: Tensor, sampling: Sampling
    ) -> CacheSession:
        """The target itself as a drafter at R contexts: what `oracle` builds with."""
        return open_session(self, sequences, tree_sequence, anchors, sampling)


def _groups(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Consecutive sequences whose padded size stays within max_tokens; a longer one stands alone."""
    groups: list[list[int]] = []
    for index, length in enumerate(lengths):
        if groups:
            widest = max(length, *(lengths[i] for i in groups[-1]))
            if widest * (len(groups[-1]) + 1) <= max_tokens:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


def _undrawn(tree: DraftTree) -> DraftTree:
    return DraftTree(tree.token_ids, tree.parents, "iid")


def _integers(values: Any) -> list[int]:
    return [int(value) for value in torch.as_tensor(values).reshape(-1)]
