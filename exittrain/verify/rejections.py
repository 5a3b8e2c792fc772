"""The sampled rules' acceptances and residuals in closed form, all trees side by side (math.md sections 3 and 4).

Shapes: B trees, M = N+1 nodes with the root (padded), flat = B * M, R nodes of one level that have children, K children
at most, V vocabulary. Rows stay on their device, float32 (float64 where the logits are), and are summed in float64; the
few numbers a node that follow from them are handled on the host, where a small step costs least.

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exittrain.errors import InputError
from exittrain.law.sampling import Sampling, log_weights
from exittrain.tree.batch import TreeBatch
from exittrain.tree.draft_rows import DraftRows
from exittrain.verify.families import Families, Indices, families

ELEMENTS = {"cpu": 1 << 16}  # of a float64 temporary: a core's cache
MANY_ELEMENTS = 1 << 24  # elsewhere
NOISE = 1e-14  # a residual this small a part of its row is rounding: float64 sums of V terms
NEVER = 1e-30  # an acceptance below is 0, so that no quotient overflows

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tries:
    """All [flat], 0 where a node is never come to.

    accept: a node's acceptance when it is handed its own (root 1); final: `traversal`'s acc once all its children are
    rejected (a leaf's is its accept, the root's 1); cut: its c once they are, see `SampledVerifier.batch_exits`.
    """

    levels: list[Families]
    accept: Floats
    final: Floats
    cut: Floats


@dataclass(frozen=True, eq=False)
class _Rows:
    """What one level reads. weights w [R, V] and probs [*, V], of which d is row draft [R], are on the device.

    At the children's tokens, by rank: target w(x), drafted d(x), available m_j, all [R, K]. whole [R]: M(0).
    """

    weights: Tensor
    probs: Tensor
    draft: Tensor
    target: Floats
    drafted: Floats
    available: Floats
    whole: Floats


@dataclass(frozen=True, eq=False)
class _State:
    """acc_j, c_j and M(c_j) of a level's nodes [R], written to as their children are rejected in turn.

    pinned [R]: nodes whose acc stays 1 whatever is rejected; last [R]: the rank of their last child.
    """

    acc: Floats
    cut: Floats
    mass: Floats
    pinned: NDArray[np.bool_]
    last: Indices


def try_children(
    trees: TreeBatch, target_logits: Tensor, sampling: Sampling, draft_rows: DraftRows, inherited: bool
) -> Tries:
    """Every node's acceptance and residual from raw target_logits [B, M, V].

    inherited: a node's acc is its own acceptance (`traversal`), or 1 wherever it can be come to (`rrs`).
    Raises InputError on NaN logits, a node with children whose draft row was not recorded or holds no mass.
    """
    _check_recorded(trees, draft_rows)
    levels, width = families(trees), trees.parents.shape[1]
    accept = np.zeros(trees.parents.numel())
    accept[::width] = 1
    final, cut = accept.copy(), np.zeros_like(accept)
    for level in levels:
        come = accept[level.parents] > 0
        if not come.any():
            break
        parents, children = level.parents[come], level.children[come]
        rows = _read_rows(parents, children, trees, target_logits, sampling, draft_rows)
        roots = parents % width == 0
        acc, pinned = (accept[parents], roots) if inherited else (np.ones(len(parents)), roots | True)
        last = (children >= 0).sum(1) - 1
        state = _State(acc, np.zeros_like(acc), rows.whole.copy(), pinned, last)
        for rank in range(children.shape[1]):
            turn = np.flatnonzero((rank <= last) & (acc > 0))
            node = children[turn, rank]
            accept[node] = final[node] = _turn(state, rows, turn, rank)
        final[parents], cut[parents] = state.acc, state.cut
    final[::width] = 1
    return Tries(levels, accept, final, cut)


def walked_exits(tries: Tries, width: int) -> Floats:
    """[flat] exits of `rrs`: come to a node, try its children in turn, leave when none is accepted."""
    waiting = np.zeros_like(tries.accept)
    waiting[::width] = 1
    for parents, nodes in _turns(tries.levels):
        come = waiting[parents]
        waiting[nodes] = come * tries.accept[nodes]
        waiting[parents] = come * (1 - tries.accept[nodes])
    return waiting


def traversed_exits(tries: Tries, width: int) -> Floats:
    """[flat] exits of `traversal`: final(v) times the product of 1 - final over all nodes whose turn comes before v's,
    which is the order of a depth-first search that leaves a node after its subtree."""
    turns = list(_turns(tries.levels))
    refused = 1 - tries.final  # times the same of all below it, once its level is done: the whole subtree refused
    for parents, nodes in reversed(turns):
        refused[parents] *= refused[nodes]
    waiting = np.zeros_like(refused)
    waiting[::width] = 1
    for parents, nodes in turns:
        waiting[nodes] = waiting[parents]
        waiting[parents] *= refused[nodes]
    exits: Floats = waiting * tries.final
    return exits


def _turns(levels: list[Families]) -> Iterator[tuple[Indices, Indices]]:
    """(parents, nodes) by depth, then by rank: no parent twice in one turn."""
    for level in levels:
        for rank in range(level.children.shape[1]):
            has = level.children[:, rank] >= 0
            yield level.parents[has], level.children[has, rank]


def _turn(state: _State, rows: _Rows, turn: Indices, rank: int) -> Floats:
    """One child each of the nodes `turn`: its acceptance; their state goes on to the child being rejected."""
    target, drafted, available = rows.target[turn, rank], rows.drafted[turn, rank], rows.available[turn, rank]
    acc, before = state.acc[turn], state.cut[turn]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = acc * available / state.mass[turn]
        chance = np.minimum(scale * np.maximum(target - before * drafted, 0) / drafted, 1)
        chance = np.where((drafted > 0) & (chance > NEVER), chance, 0)
        cut = before + np.where(available > 0, 1 / scale, 0)
    certain, unsummed = chance == 1, state.pinned[turn] & (state.last[turn] == rank)
    state.acc[turn] = np.where(certain, 0, acc)  # what would follow has no probability
    state.cut[turn] = np.where(unsummed, cut, before)
    go = ~certain & ~unsummed
    _reject(state, rows, turn[go], acc[go], cut[go])
    return chance


def _reject(state: _State, rows: _Rows, row: Indices, acc: Floats, cut: Floats) -> None:
    """The nodes `row` go on to c = cut; where nothing is left acc becomes 0 (1 where pinned) and p stays."""
    if not len(row):
        return
    mass, before = _residual_mass(rows, row, cut), state.mass[row]
    left = mass > NOISE * rows.whole[row]
    total = acc * np.where(left, mass, before) / before
    acc = np.where(left, total / (total + (1 - acc)), state.pinned[row])
    state.acc[row] = np.where(acc > NEVER, acc, 0)
    state.cut[row] = np.where(left, cut, state.cut[row])
    state.mass[row] = np.where(left, mass, before)


def _read_rows(
    parents: Indices,
    children: Indices,
    trees: TreeBatch,
    target_logits: Tensor,
    sampling: Sampling,
    draft_rows: DraftRows,
) -> _Rows:
    """The masses m_j are summed from the tokens of no child up: a drafter who is all but certain of the first child
    still has exact odds for the second, which 1 - q(x) would not keep."""
    width, vocab = target_logits.shape[1:]
    device, probs = target_logits.device, draft_rows.probs
    nodes, ranked = torch.from_numpy(parents).to(device), torch.from_numpy(children).to(device)
    draft, known = draft_rows.row_of.flatten()[nodes], ranked >= 0
    token = trees.token_ids.flatten()[torch.where(known, ranked, ranked[:, :1])]  # [R, K], the first for none
    dtype = torch.float64 if target_logits.dtype == torch.float64 else torch.float32
    weights = torch.empty((len(nodes), vocab), dtype=dtype, device=device)
    whole, others = torch.empty((2, len(nodes), 1), dtype=torch.float64, device=device)
    removed = trees.drawn == "without_replacement"
    for part in _parts(weights, len(nodes)):
        logits = target_logits[nodes[part] // width, nodes[part] % width]
        torch.exp(log_weights(logits, sampling), out=weights[part])
        whole[part] = weights[part].double().sum(1, keepdim=True)
        left = probs.index_select(0, draft[part]).double()
        others[part] = (left.scatter_(1, token[part], 0.0) if removed else left).sum(1, keepdim=True)
    target, drafted = weights.gather(1, token).double(), probs[draft[:, None], token].double()
    own = torch.where(known, drafted, 0.0) if removed else torch.zeros_like(drafted)
    available = others + own.flip(1).cumsum(1).flip(1)
    numbers = torch.cat([target, drafted, available, whole], 1).cpu().numpy()  # one copy from the device
    at_target, at_draft, at_turn = np.split(numbers[:, :-1], 3, axis=1)
    _check_mass(at_turn[:, 0], parents, width)
    return _Rows(weights, probs, draft, at_target, at_draft, at_turn, numbers[:, -1])


def _residual_mass(rows: _Rows, row: Indices, cut: Floats) -> Floats:
    """M(c) = sum over V of [w - c d]+ [n] of the nodes `row`."""
    device = rows.weights.device
    index, scale = torch.from_numpy(row).to(device), torch.from_numpy(-cut[:, None]).to(device)
    mass = torch.empty(len(row), dtype=torch.float64, device=device)
    for part in _parts(rows.weights, len(row)):
        left = rows.probs.index_select(0, rows.draft[index[part]]).double().mul_(scale[part])
        mass[part] = left.add_(rows.weights.index_select(0, index[part])).clamp_(min=0).sum(1)
    found: Floats = mass.cpu().numpy()
    return found


def _parts(rows: Tensor, count: int) -> Iterator[slice]:
    """Slices over `count` rows of the width of rows [*, V], one temporary each."""
    size = max(1, ELEMENTS.get(rows.device.type, MANY_ELEMENTS) // rows.shape[1])
    return (slice(start, start + size) for start in range(0, count, size))


def _check_recorded(trees: TreeBatch, draft_rows: DraftRows) -> None:
    missing = (trees.has_children() & (draft_rows.row_of < 0)).nonzero()
    if len(missing):
        tree, node = missing[0].tolist()
        raise InputError(
            f"node {node} of tree {tree} has children and no draft row: draft_rows must hold what they were drawn from"
        )


def _check_mass(masses: Floats, nodes: Indices, width: int) -> None:
    bad = np.flatnonzero(~(np.isfinite(masses) & (masses > 0)))
    if len(bad):
        tree, node = divmod(int(nodes[bad[0]]), width)
        raise InputError(f"the draft row of node {node} of tree {tree} sums to {masses[bad[0]]}")
