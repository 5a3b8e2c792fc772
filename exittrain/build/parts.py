"""Trees cut down to a nested part, so that one build and one scoring pass serve many budgets.

Shapes: B trees, M = N+1 nodes with the root, M' nodes kept.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from exittrain.build.base import Draft
from exittrain.build.fill import Path
from exittrain.errors import InputError


def sub_draft(draft: Draft, part: int | Collection[Path]) -> tuple[Draft, Tensor]:
    """The same trees without the nodes outside a part that is fixed in advance, and columns [B, M'] of the nodes kept
    (-1 where padded): what scores of the whole trees are gathered with.

    part: the first n drafted nodes in the builder's own order (of a best_first or oracle tree the tree of budget n, see
    `grow`); or a set of rank paths (`static` and sampled trees): the nodes whose places among their siblings, all the
    way down, are such a path. `rank_paths` of a smaller shape is such a set; the root's () may be left out.

    A sampled tree cut by rank paths is still exactly sampled: the smaller shape was fixed before the draws as well, and
    what stays of a node's children is the first few draws. Pruning by score afterwards is not: there the draws decide
    who stays. Nor is counting off n nodes of a sampled tree, where children missing for want of a likely token would
    make room for nodes elsewhere; that raises InputError, as do a number below 0 and a set that lacks the parent of
    one of its paths or, for a sampled tree, its elder sibling.
    """
    trees, sampled = draft.trees, draft.trees.drawn in ("iid", "without_replacement")
    if isinstance(part, int):
        if part < 0:
            raise InputError(f"the first {part} nodes of a tree: the number must not be negative")
        if sampled:
            raise InputError(
                f"the first {part} nodes of a sampled tree depend on its draws, which biases the verifiers; give rank "
                "paths, such as those of a smaller shape"
            )
        order = torch.arange(trees.parents.shape[1], device=trees.parents.device)
        return draft.keep((order <= part).expand_as(trees.parents))
    wanted = _closed(part, sampled)
    rows = zip(trees.parents.tolist(), trees.valid.tolist(), strict=True)
    return draft.keep(torch.tensor([_on_paths(*row, wanted) for row in rows], device=trees.parents.device))


def _closed(part: Collection[Path], sampled: bool) -> set[Path]:
    wanted = {(), *(tuple(path) for path in part)}
    for path in wanted - {()}:
        needed = [path[:-1]] + ([(*path[:-1], path[-1] - 1)] if sampled and path[-1] > 0 else [])
        missing = next((one for one in needed if one not in wanted), None)
        if missing is not None:
            raise InputError(f"part of a tree: rank path {list(path)} needs {list(missing)} beside it")
    return wanted


def _on_paths(parents: list[int], valid: list[bool], wanted: set[Path]) -> list[bool]:
    """Which nodes of one tree stand on the wanted paths, counting siblings in order."""
    paths: list[Path | None] = [()]
    num_children = [0] * len(parents)
    for node in range(1, len(parents)):
        above = paths[parents[node]] if valid[node] else None
        path = None if above is None else (*above, num_children[parents[node]])
        paths.append(path if path in wanted else None)
        if valid[node]:
            num_children[parents[node]] += 1
    return [path is not None for path in paths]
