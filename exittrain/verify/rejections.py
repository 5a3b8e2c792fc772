"""The sampled rules' acceptances and residuals in closed form, all trees side by side (math.md sections 3 and 4).

Shapes: B trees, M = N+1 nodes with the root (padded), flat = B * M, R nodes of one level, V vocabulary. Rows are
float32 (float64 where the logits are), sums and all that follows from them float64.

Levels. Given the tree every rejection is certain in what it changes, and all it changes is the state of its parent: a
child's own acceptance follows from its parent's at the time of its turn (its earlier siblings rejected) and from
nothing inside their subtrees. So nodes are taken level by level, and a level's children rank by rank. `traversal`
hands a node's acceptance down as its acc; for `rrs` every node starts at acc = 1, where the same update leaves it:
sum r / (sum r + 1 - 1).

Closed form. Let w be a node's target row and d its draft row, in any scale, m_j the mass of d that was not rejected
before turn j (all of it for i.i.d. children), acc_j the node's acc. Then, with c_0 = 0 and M(c) = sum [w - c d]+,

    p_j = [w - c_j d]+ / M(c_j),   q_j = d / m_j off the rejected tokens,   c_{j+1} = c_j + M(c_j) / (acc_j m_j),
    r = [acc_j p_j - q_j]+ = acc_j [w - c_{j+1} d]+ / M(c_j),   sum r = acc_j M(c_{j+1}) / M(c_j),

because [w - c d]+ is 0 wherever a smaller c made it 0. A rejected token needs no case of its own, although its q is 0
from then on: it was accepted with less than certainty only if w - c_{j+1} d < 0 there, so its residual is 0 and stays
0; after a certain acceptance nothing follows that has a probability.

Cost in passes over V. A node with children that can be come to: its target row processed and summed, its draft row
summed; then one read-only pass a rejection for M(c), none after a certain child, none after the last child of a node
whose acc stays 1 (the root; every node of `rrs`). Nothing [N, V] is written but the rows of one level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, log_weights
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.verify.siblings import Siblings, sibling_levels

ELEMENTS = {"cpu": 1 << 16}  # of a float64 temporary: a core's cache
MANY_ELEMENTS = 1 << 24  # elsewhere
NOISE = 1e-14  # a residual this small a part of its row is rounding: float64 sums of V terms
NEVER = 1e-30  # an acceptance below is 0, so that no quotient overflows


@dataclass(frozen=True, eq=False)
class Tries:
    """All [flat] float64, 0 where a node is never come to.

    accept: a node's acceptance when it is handed its own (root 1); final: `traversal`'s acc once all its children are
    rejected (a leaf's is its accept, the root's 1); cut: its c once they are, see `SampledVerifier.batch_exits`.
    """

    levels: list[list[Siblings]]
    accept: Tensor
    final: Tensor
    cut: Tensor


@dataclass(eq=False)
class _Level:
    """The nodes of one depth that have children and can be come to, R rows; acc, cut, mass change with the turns.

    weights w [R, V]; draft [R]: the row of d among `probs`; whole M(0), acc, cut c_j, mass M(c_j): [R] float64;
    pinned [R]: nodes whose acc stays 1 whatever is rejected; row_of [flat]: a node's row, -1 for all others.
    """

    weights: Tensor
    probs: Tensor
    draft: Tensor
    whole: Tensor
    acc: Tensor
    cut: Tensor
    mass: Tensor
    pinned: Tensor
    row_of: Tensor


def try_children(
    trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows, inherited: bool
) -> Tries:
    """Every node's acceptance and residual from raw target_logits [B, M, V].

    inherited: a node's acc is its own acceptance (`traversal`), or 1 wherever it can be come to (`rrs`).
    Raises InputError on NaN logits, a node with children whose draft row was not recorded or holds no mass.
    """
    _check_recorded(trees, draft_rows)
    levels, width = sibling_levels(trees), trees.parents.shape[1]
    draft_of, tokens = draft_rows.row_of.flatten(), trees.token_ids.flatten()
    accept = torch.zeros(trees.parents.numel(), dtype=torch.float64, device=trees.parents.device)
    accept[::width] = 1
    final, cut, available = accept.clone(), torch.zeros_like(accept), torch.zeros_like(accept)
    for groups in levels:
        nodes = groups[0].parents
        nodes = nodes[accept[nodes] > 0]
        if not len(nodes):
            break
        level = _read_level(nodes, target_logits, sampling, draft_rows.probs, draft_of)
        if inherited:
            level.acc, level.pinned = accept[nodes], nodes % width == 0
        _mass_at_turns(level, groups, tokens, available, trees.drawn == "without_replacement", width)
        for group in groups:
            row = level.row_of[group.parents]
            turn = ((row >= 0) & (level.acc[row] > 0)).nonzero().flatten()
            node, row = group.nodes[turn], row[turn]
            accept[node] = final[node] = _turn(level, row, tokens[node], available[node], group.last[turn])
        final[nodes], cut[nodes] = level.acc, level.cut
    final[::width] = 1
    return Tries(levels, accept, final, cut)


def walked_exits(trees: TreeBatch, tries: Tries) -> Tensor:
    """[B, M] exits of `rrs`: come to a node, try its children in turn, leave when none is accepted."""
    waiting = torch.zeros_like(tries.accept)
    waiting[:: trees.parents.shape[1]] = 1
    for group in (group for groups in tries.levels for group in groups):
        come = waiting[group.parents]
        waiting[group.nodes] = come * tries.accept[group.nodes]
        waiting[group.parents] = come * (1 - tries.accept[group.nodes])
    return waiting.view_as(trees.parents)


def traversed_exits(trees: TreeBatch, tries: Tries) -> Tensor:
    """[B, M] exits of `traversal`: final(v) times the product of 1 - final over all nodes whose turn comes before v's,
    which is the order of a depth-first search that leaves a node after its subtree."""
    refused = 1 - tries.final  # times the same of all below it, once its level is done: the whole subtree refused
    for group in (group for groups in reversed(tries.levels) for group in reversed(groups)):
        refused[group.parents] *= refused[group.nodes]
    waiting = torch.zeros_like(refused)
    waiting[:: trees.parents.shape[1]] = 1
    for group in (group for groups in tries.levels for group in groups):
        waiting[group.nodes] = waiting[group.parents]
        waiting[group.parents] *= refused[group.nodes]
    return (waiting * tries.final).view_as(trees.parents)


def _turn(level: _Level, row: Tensor, token: Tensor, available: Tensor, last: Tensor) -> Tensor:
    """One child each of the nodes `row`: its acceptance [n]; the state goes on to the child being rejected."""
    target, draft = level.weights[row, token].double(), level.probs[level.draft[row], token].double()
    acc, cut = level.acc[row], level.cut[row]
    scale = acc * available / level.mass[row]
    chance = (scale * (target - cut * draft).clamp(min=0) / draft).clamp(max=1)
    chance = torch.where((draft > 0) & (chance > NEVER), chance, 0.0)
    cut = cut + torch.where(available > 0, 1 / scale, 0.0)
    certain, pinned = chance == 1, level.pinned[row]
    level.acc[row] = torch.where(certain, 0.0, acc)  # what would follow has no probability
    level.cut[row] = torch.where(last & pinned, cut, level.cut[row])
    summed = (~certain & ~(last & pinned)).nonzero().flatten()
    row, acc, cut, pinned = row[summed], acc[summed], cut[summed], pinned[summed]
    mass, before = _residual_mass(level, row, cut), level.mass[row]
    left = mass > NOISE * level.whole[row]
    total = acc * mass / before
    acc = torch.where(left, total / (total + (1 - acc)), pinned.double())
    level.acc[row] = torch.where(acc > NEVER, acc, 0.0)
    level.cut[row] = torch.where(left, cut, level.cut[row])
    level.mass[row] = torch.where(left, mass, before)
    return chance


def _read_level(nodes: Tensor, target_logits: Tensor, sampling: Sampling, probs: Tensor, draft_of: Tensor) -> _Level:
    width, vocab = target_logits.shape[1:]
    dtype = torch.float64 if target_logits.dtype == torch.float64 else torch.float32
    weights = torch.empty((len(nodes), vocab), dtype=dtype, device=nodes.device)
    whole = torch.empty(len(nodes), dtype=torch.float64, device=nodes.device)
    for part in _parts(weights):
        tree, node = nodes[part] // width, nodes[part] % width
        torch.exp(log_weights(target_logits[tree, node], sampling), out=weights[part])
        whole[part] = weights[part].double().sum(1)
    row_of = torch.full_like(draft_of, -1)
    row_of[nodes] = torch.arange(len(nodes), device=nodes.device)
    ones = torch.ones_like(whole)
    return _Level(
        weights, probs, draft_of[nodes], whole, ones, torch.zeros_like(whole), whole.clone(), ones > 0, row_of
    )


def _mass_at_turns(
    level: _Level, groups: list[Siblings], tokens: Tensor, available: Tensor, removed: bool, width: int
) -> None:
    """Fills available [flat] at the children: the mass m_j of d that is left at their turn.

    removed: earlier siblings are. Summed from the tokens of no child up, so that a drafter who is all but certain of
    the first child still has exact odds for the second: no 1 - sum.
    """
    rows = [level.row_of[group.parents] for group in groups]
    known = [row >= 0 for row in rows]
    rows = [row[live] for row, live in zip(rows, known, strict=True)]
    nodes = [group.nodes[live] for group, live in zip(groups, known, strict=True)]
    drafted = tokens[nodes[0]][:, None].repeat(1, len(groups))  # [R, ranks]; ranks that a node lacks repeat its first
    for rank, (row, node) in enumerate(zip(rows, nodes, strict=True)):
        drafted[row, rank] = tokens[node]
    left = torch.empty_like(level.whole)
    for part in _parts(level.weights):
        draft = level.probs[level.draft[part]].double()
        left[part] = (draft.scatter_(1, drafted[part], 0.0) if removed else draft).sum(1)
    for row, node in zip(reversed(rows), reversed(nodes), strict=True):
        if removed:
            left[row] += level.probs[level.draft[row], tokens[node]].double()
        available[node] = left[row]
    bad = (~(torch.isfinite(left) & (left > 0))).nonzero().flatten()
    if len(bad):
        flat = int((level.row_of == bad[0]).nonzero()[0])
        raise InputError(f"the draft row of node {flat % width} of tree {flat // width} sums to {float(left[bad[0]])}")


def _residual_mass(level: _Level, row: Tensor, cut: Tensor) -> Tensor:
    """M(c) = sum over V of [w - c d]+ [n] float64 of the nodes `row`."""
    mass = torch.empty_like(cut)
    for part in _parts(level.weights, len(row)):
        left = level.probs.index_select(0, level.draft[row[part]]).double().mul_(-cut[part, None])
        mass[part] = left.add_(level.weights.index_select(0, row[part])).clamp_(min=0).sum(1)
    return mass


def _parts(rows: Tensor, count: int | None = None) -> Iterator[slice]:
    """Slices over `count` rows (all of them) of one temporary each."""
    size = max(1, ELEMENTS.get(rows.device.type, MANY_ELEMENTS) // rows.shape[1])
    for start in range(0, len(rows) if count is None else count, size):
        yield slice(start, start + size)


def _check_recorded(trees: TreeBatch, draft_rows: DraftRows) -> None:
    missing = (trees.has_children() & (draft_rows.row_of < 0)).nonzero()
    if len(missing):
        tree, node = missing[0].tolist()
        raise InputError(
            f"node {node} of tree {tree} has children and no draft row: draft_rows must hold what they were drawn from"
        )
