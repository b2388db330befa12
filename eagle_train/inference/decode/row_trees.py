"""Trees that differ by row: each row's own parents, a fixed number of nodes. DESIGN section 3.5.

They are tensors on the device, and so are all tables that follow from them; nothing waits for the host. tree.py has
trees that are the same for all rows. Knows nothing of models, tokens, probabilities or requests.

Shapes: A rows, N nodes of a row, real or padding, P nodes of a path (the greatest depth + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from eagle_train.errors import check
from eagle_train.inference.decode.tree import MAX_NODES, Tree, check_count
from eagle_train.ops.transfer import to_device


@dataclass(frozen=True)
class OpenTree:
    """A plan for trees that rows choose for themselves in each round: of `num_nodes` nodes at most, the root included,
    and `max_depth` levels below it. Raises UserError."""

    num_nodes: int
    max_depth: int

    is_chain = False

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes, 2)
        check_count("max_depth", self.max_depth, 1)
        check(self.num_nodes <= MAX_NODES, f"tree: {self.num_nodes} nodes; at most {MAX_NODES} are possible")
        fits = self.max_depth < self.num_nodes
        check(fits, f"tree.max_depth is {self.max_depth}; it must be below the number of nodes, {self.num_nodes}")

    def to(self, device: torch.device | str) -> "OpenTree":
        """Itself: it has no tables."""
        return self


@dataclass(frozen=True)
class DynamicTree(OpenTree):
    """tree=dynamic: `nodes` drafted nodes in each row, where the draft is most confident (EAGLE-2). In each of
    `max_depth` levels the `top_k` most probable nodes are expanded, by as many tokens. Raises UserError."""

    top_k: int = 1

    def __post_init__(self) -> None:
        check_count("top_k", self.top_k, 1)
        super().__post_init__()
        most = self.top_k + (self.max_depth - 1) * self.top_k**2
        drafted = self.num_nodes - 1
        told = f"tree.nodes is {drafted}; depth={self.max_depth} and top_k={self.top_k} see {most} nodes at most"
        check(drafted <= most, told)


def dynamic(nodes: int, depth: int, top_k: int) -> DynamicTree:
    """A `DynamicTree` as conf/tree/dynamic.yaml has it: `nodes` drafted ones, in `depth` levels. Raises UserError."""
    for name, value in (("nodes", nodes), ("depth", depth), ("top_k", top_k)):
        check_count(name, value, 1)
    check(depth <= nodes, f"tree.depth is {depth}; it must be at most tree.nodes, {nodes}")
    return DynamicTree(nodes + 1, depth, top_k)


class RowTrees:
    """The trees of a round's rows. Node 0 is the root; a node's parent has a smaller number.

    `parents`: int64 [A, N], the root's is 0. `real`: bool [A, N]; other nodes are padding, which is never accepted; the
    root is real. `max_depth`: no node is deeper. What breaks these rules is to be mended first, see `mended`.
    """

    is_chain = False

    def __init__(self, parents: torch.Tensor, real: torch.Tensor, max_depth: int):
        self.parents, self.real, self.max_depth = parents, real, max_depth

    @classmethod
    def of(cls, parents: list[list[int]], max_depth: int, device: torch.device | str, width: int = 0) -> "RowTrees":
        """From each row's parents, the root's (any number) first. Padded to the longest row, or `width`."""
        width = max(width, *map(len, parents))
        table = [[0, *row[1:], *[0] * (width - len(row))] for row in parents]
        counts = to_device([[len(row)] for row in parents], device)
        real = torch.arange(width, device=device) < counts
        return cls(to_device(table, device), real, max_depth)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.parents.shape[1]

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """bool [A, N, N]: whether j is i or an ancestor of i."""
        nodes = torch.arange(self.num_nodes, device=self.parents.device)
        reach = (self.parents.unsqueeze(2) == nodes) | (nodes.unsqueeze(1) == nodes)  # one step up, or none
        steps = 1
        while steps < self.max_depth:  # each product doubles the steps
            wide = reach.float()
            reach, steps = (wide @ wide) > 0, 2 * steps
        return reach

    @cached_property
    def depth(self) -> torch.Tensor:
        """int64 [A, N]; 1 for padding, as its parent is the root."""
        return self.ancestors.sum(2) - 1

    @cached_property
    def row_depth(self) -> torch.Tensor:
        """int64 [A]: the depth of each row's deepest real node."""
        return (self.depth * self.real).amax(1)

    def rows(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> "RowTrees":
        """The trees of the rows that `pick` selects from a tensor [A, ...]."""
        return RowTrees(pick(self.parents), pick(self.real), self.max_depth)

    def at_parents(self, x: torch.Tensor) -> torch.Tensor:
        """x [A, N] at each node's parent."""
        return x.gather(1, self.parents)

    def accepted(self, match: torch.Tensor) -> torch.Tensor:
        """int64 [A]: the deepest node of which it and all its ancestors but the root match, bool [A, N]; the first
        among equals. Padding never matches."""
        missed = ~(match & self.real)
        missed[:, 0].zero_()
        whole = ~(self.ancestors & missed.unsqueeze(1)).any(2)  # [A, N]
        return (self.depth + 1).masked_fill(~whole, 0).argmax(1)

    def paths_to(self, node: torch.Tensor) -> torch.Tensor:
        """int64 [A, P]: the nodes from the root to `node` int64 [A], padded with it."""
        above = self.ancestors[torch.arange(len(node), device=node.device), node]  # [A, N]
        # Ancestors have smaller numbers, so their order is that of the path. What is no ancestor goes behind its end.
        place = (above.cumsum(1) - 1).masked_fill(~above, self.max_depth + 1)
        paths = node.unsqueeze(1).repeat(1, self.max_depth + 2)
        numbers = torch.arange(self.num_nodes, device=node.device).expand_as(place)
        return paths.scatter(1, place, numbers)[:, :-1]

    def depths_of(self, node: torch.Tensor) -> torch.Tensor:
        """int64 [A]: the depth of `node` int64 [A]."""
        return self.depth.gather(1, node.unsqueeze(1))[:, 0]

    def first_at(self, depth: torch.Tensor) -> torch.Tensor:
        """int64 [A]: the first real node at `depth` int64 [A], or at the row's greatest where none is so deep."""
        is_there = self.real & (self.depth == depth.minimum(self.row_depth).unsqueeze(1))
        return is_there.to(torch.uint8).argmax(1)


class RowChains(RowTrees):
    """Trees without siblings, of each row's own length. They are validated as chains are: causal like any text, written
    to the slots where they would be committed. Padding is behind each row's end, and is never accepted."""

    is_chain = True

    def __init__(self, lengths: torch.Tensor, width: int):
        """`lengths` int64 [A]: each row's real nodes below the root, at most `width` - 1. `width`: N."""
        nodes = torch.arange(width, device=lengths.device)
        real = nodes <= lengths.unsqueeze(1)
        super().__init__((nodes - 1).clamp(min=0).expand(real.shape) * real, real, width - 1)
        self.lengths = lengths

    @property
    def row_depth(self) -> torch.Tensor:
        return self.lengths

    def rows(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> "RowTrees":
        return RowChains(pick(self.lengths), self.num_nodes)

    def accepted(self, match: torch.Tensor) -> torch.Tensor:
        return (match & self.real)[:, 1:].cumprod(1).sum(1)

    def paths_to(self, node: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.num_nodes, device=node.device).minimum(node.unsqueeze(1))

    def depths_of(self, node: torch.Tensor) -> torch.Tensor:
        return node

    def first_at(self, depth: torch.Tensor) -> torch.Tensor:
        return depth.minimum(self.lengths)


def mended(parents: torch.Tensor, real: torch.Tensor, max_depth: int) -> tuple[RowTrees, torch.Tensor]:
    """Trees from any int64 parents [A, N] and bool `real` [A, N], and which rows were none, bool [A]: those have the
    root alone. On the device, without a wait."""
    width = parents.shape[1]
    nodes = torch.arange(width, device=parents.device)
    is_node = nodes > 0
    wrong = is_node & real & ((parents < 0) | (parents >= nodes))
    behind_padding = real[:, 1:] & ~real[:, :-1]
    bad = wrong.any(1) | behind_padding.any(1)

    def without_bad() -> tuple[torch.Tensor, torch.Tensor]:
        kept = real & is_node & ~bad.unsqueeze(1)
        return parents.masked_fill(~kept, 0), kept | ~is_node

    bad = bad | (RowTrees(*without_bad(), width).depth > max_depth).any(1)
    return RowTrees(*without_bad(), max_depth), bad


AnyTree = Tree | RowTrees
"""The trees of a round: one for all rows, or each row's own."""

PlanTree = Tree | OpenTree
"""What a round's trees are planned to be."""
