"""Static draft trees: a tree's shape, and the tables by which it is drafted, attended to and verified. DESIGN 3.5.

Node 0 is the root: the pending token, whose successor is not known yet. The other nodes are drafted tokens. The tables
are made once per tree, never per round. Knows nothing of models, tokens, probabilities or requests.

Shapes: N nodes, D the greatest depth, C the most children of a node, or 1.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_train.errors import check

MAX_NODES = 1024  # some tables are [N, N]; useful trees are far smaller


class _TreeTables:
    """The tables that follow from a tree's parents."""

    num_nodes: int  # N, the root included
    max_depth: int  # D
    levels: tuple[tuple[int, int], ...]  # by depth: the nodes as (first, last + 1), the arguments of a slice
    fanout: tuple[int, ...]  # by depth: the most children of a node; the last is 0
    depth: torch.Tensor  # int64 [N]
    child_rank: torch.Tensor  # int64 [N]: the node's number among its parent's children, from 0; 0 for the root
    parent: torch.Tensor  # int64 [N]: `parents`, but 0 for the root, so that it can be used as an index
    children: torch.Tensor  # int64 [N, C]: padded with -1
    ancestors: torch.Tensor  # bool [N, N]: whether j is i or an ancestor of i
    paths: torch.Tensor  # int64 [leaves, D + 1]: from the root to each leaf, padded with -1
    path_to: torch.Tensor  # int64 [N, D + 1]: from the root to each node, padded with the node
    # Verification takes the accepted node of highest priority. int64 [N]: a node's is above that of its ancestors, of
    # its later siblings and of their descendants; with `siblings_repeat` above that of all nodes behind it in its level
    # and of all higher levels.
    priority: torch.Tensor
    if_rejected: torch.Tensor  # int64 [N, N]: i's priority once node j is rejected: -1 if j is i or an ancestor of i


@dataclass(frozen=True)
class Tree(_TreeTables):
    """A tree by the parent of each node. Nodes are listed level by level, siblings together, the likeliest first.

    `siblings_repeat`: siblings may be the same token and match together; of all their paths the longest is then
    accepted, and not that of the first sibling.

    Raises UserError, naming the node, if `parents` is no such list. Two trees with the same parents are equal, if
    `siblings_repeat` is.
    """

    parents: tuple[int, ...]  # -1 for the root; the others' are below their own index, and never decrease
    device: torch.device | str = field(default="cpu", compare=False)
    siblings_repeat: bool = False

    def __post_init__(self) -> None:
        _check_parents(self.parents)
        kids: list[list[int]] = [[] for _ in self.parents]
        paths = [[0]]
        for node, parent in enumerate(self.parents[1:], start=1):
            kids[parent].append(node)
            paths.append([*paths[parent], node])
        depth = [len(path) - 1 for path in paths]
        width, levels = depth[-1] + 1, _level_ranges(depth)
        ancestors = [[node in path for node in range(len(depth))] for path in map(set, paths)]
        priority = _deepest_first(depth) if self.siblings_repeat else _priorities(kids)
        values: dict[str, Any] = {
            "num_nodes": len(depth),
            "max_depth": depth[-1],
            "levels": levels,
            "fanout": tuple(max(len(kids[node]) for node in range(*level)) for level in levels),
        }
        tables: dict[str, list] = {
            "depth": depth,
            "child_rank": [0, *(kids[parent].index(node) for node, parent in enumerate(self.parents[1:], start=1))],
            "parent": [0, *self.parents[1:]],
            "children": [_padded(row, max(1, *map(len, kids)), -1) for row in kids],
            "ancestors": ancestors,
            "paths": [_padded(path, width, -1) for path, below in zip(paths, kids, strict=True) if not below],
            "path_to": [_padded(path, width, path[-1]) for path in paths],
            "priority": priority,
            "if_rejected": [
                [-1 if above and node > 0 else mine for node, above in enumerate(row)]
                for mine, row in zip(priority, ancestors, strict=True)
            ],
        }
        values |= {name: torch.tensor(table, device=self.device) for name, table in tables.items()}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.num_nodes == self.max_depth + 1

    def to(self, device: torch.device | str) -> "Tree":
        """The same tree with its tables on `device`."""
        return Tree(self.parents, device, self.siblings_repeat)

    # The same of all rows; `RowTrees` has these methods for trees that differ by row. B rows.

    def rows(self, pick: Any) -> "Tree":
        """Itself: `pick` selects rows."""
        return self

    def at_parents(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, N] at each node's parent."""
        return x.index_select(1, self.parent)

    def accepted(self, match: torch.Tensor) -> torch.Tensor:
        """int64 [B]: the node of highest priority of which it and all its ancestors but the root match, bool [B, N]."""
        # [B, N, N]: node i's priority, or -1 where node j is rejected and on i's path. The minimum over j is -1 unless
        # i is accepted, and argmax takes the accepted node of highest priority.
        return torch.where(match[:, None], self.priority[:, None], self.if_rejected).amin(-1).argmax(-1)

    def paths_to(self, node: torch.Tensor) -> torch.Tensor:
        """int64 [B, D + 1]: the nodes from the root to `node` int64 [B], padded with it."""
        return self.path_to[node]

    def depths_of(self, node: torch.Tensor) -> torch.Tensor:
        """int64 [B]: the depth of `node` int64 [B]."""
        return self.depth[node]

    def first_at(self, depth: torch.Tensor) -> torch.Tensor:
        """int64 [B]: the first node at `depth` int64 [B], or at the greatest depth where no node is so deep."""
        return torch.searchsorted(self.depth, depth.clamp(max=self.max_depth))


def _check_parents(parents: Sequence[int]) -> None:
    """Raise UserError, naming the first wrong node, unless `parents` lists a tree level by level."""
    check(len(parents) > 0 and parents[0] == -1, "tree.parents: node 0 is the root; its parent must be given as -1")
    check(len(parents) <= MAX_NODES, f"tree: {len(parents)} nodes; at most {MAX_NODES} are possible")
    for node, parent in enumerate(parents[1:], start=1):
        is_node = isinstance(parent, int) and not isinstance(parent, bool) and 0 <= parent < node
        check(is_node, f"tree.parents: node {node} has parent {parent!r}; it must be a node from 0 to {node - 1}")
        before = parents[node - 1]
        check(
            parent >= before,
            f"tree.parents: node {node} has parent {parent} but node {node - 1} has {before}; "
            "nodes must be listed level by level, siblings together, so parents never decrease",
        )


def _level_ranges(depth: list[int]) -> tuple[tuple[int, int], ...]:
    """`levels` of nodes whose depths never decrease."""
    return tuple((depth.index(d), depth.index(d) + depth.count(d)) for d in range(depth[-1] + 1))


def _padded(values: list[int], length: int, filler: int) -> list[int]:
    """`values`, padded with `filler` to `length`."""
    return values + [filler] * (length - len(values))


def _priorities(kids: list[list[int]]) -> list[int]:
    """`priority`: each node's place in the depth-first order that visits the last child first."""
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(kids[node])
    return [place for _, place in sorted(zip(order, range(len(order)), strict=True))]


def _deepest_first(depth: list[int]) -> list[int]:
    """`priority` where siblings repeat: the deepest nodes last, and of one level the first."""
    order = sorted(range(len(depth)), key=lambda node: (depth[node], -node))
    return [place for _, place in sorted(zip(order, range(len(order)), strict=True))]


def check_count(field_name: str, value: Any, lowest: int) -> None:
    """Raise UserError unless `value` is a whole number, at least `lowest`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
    check(whole, f"tree.{field_name} is {value!r}; it must be a whole number, at least {lowest}")


def chain(length: int) -> Tree:
    """A chain of `length` drafted tokens; 0 is the root alone: no speculation. Raises UserError."""
    check_count("length", length, 0)
    check(length < MAX_NODES, f"tree.length is {length}; it must be below {MAX_NODES}")
    return Tree((-1, *range(length)))


def full(depth: int, branching: int) -> Tree:
    """A tree of this depth whose inner nodes have `branching` children: the paper's D_m-BF_n (figure 8). Raises
    UserError."""
    check_count("depth", depth, 1)
    check_count("branching", branching, 1)
    parents, level = [-1], [0]
    for _ in range(depth):
        size = len(parents) + len(level) * branching
        check(size <= MAX_NODES, f"tree.depth {depth} with tree.branching {branching} exceeds {MAX_NODES} nodes")
        parents += [node for node in level for _ in range(branching)]
        level = list(range(size - len(level) * branching, size))
    return Tree(tuple(parents))


def pruned(num_nodes: int, acceptance: Sequence[Sequence[float]]) -> Tree:
    """The tree of the `num_nodes` drafted nodes most likely to be accepted: the paper's N_i (figure 8).

    `acceptance[d][r]`: of the accepted nodes at depth d, the measured share whose child of rank r is accepted next. A
    node's probability is the product along its path; a node is added after its parent and earlier siblings. Among
    equals the shallower, then the one of lower ranks, comes first. Raises UserError.
    """
    check_count("num_nodes", num_nodes, 1)
    for d, row in enumerate(acceptance):
        for r, share in enumerate(row):
            check(0 <= share <= 1, f"tree.acceptance[{d}][{r}] is {share}; it must be between 0 and 1")
    taken: dict[tuple[int, ...], float] = {(): 1.0}  # probability by the child ranks on the node's path
    frontier: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(parent: tuple[int, ...], rank: int) -> None:
        if len(parent) < len(acceptance) and rank < len(acceptance[len(parent)]):
            probability = taken[parent] * acceptance[len(parent)][rank]
            heapq.heappush(frontier, (-probability, len(parent) + 1, (*parent, rank)))

    offer((), 0)
    while len(taken) <= num_nodes:
        check(len(frontier) > 0, f"tree.num_nodes is {num_nodes}; tree.acceptance describes only {len(taken) - 1}")
        negative, _, path = heapq.heappop(frontier)
        taken[path] = -negative
        offer(path, 0)
        offer(path[:-1], path[-1] + 1)
    nodes = sorted(taken, key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(nodes)}
    return Tree((-1, *(index[path[:-1]] for path in nodes[1:])))
