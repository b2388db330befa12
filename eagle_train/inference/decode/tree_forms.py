"""What a round's trees have in common with those of other rounds, by which their validation is recorded once for all.

Knows nothing of models, tokens or recordings.

Shapes: A rows, N nodes of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle_train.inference.decode.row_trees import AnyTree, DynamicTree, PlanTree, RowChains, RowTrees
from eagle_train.inference.decode.tree import Tree, chain

_ROOT = chain(0)


@dataclass(frozen=True)
class TreeForm:
    """A static tree, or trees that differ by row: of `plan`'s nodes and levels at most, chains or not."""

    plan: PlanTree
    is_chain: bool

    @classmethod
    def of(cls, plan: PlanTree, tree: AnyTree) -> "TreeForm":
        """The form of a tree that was proposed by this plan. Rows without drafts are a root alone, as a static tree."""
        if isinstance(tree, Tree) or (tree.is_chain and tree.num_nodes == 1):
            tree = tree if isinstance(tree, Tree) else _ROOT
            return cls(tree, tree.is_chain)
        return cls(plan, tree.is_chain)

    @classmethod
    def all_of(cls, plan: PlanTree) -> "list[TreeForm]":
        """Those that trees of a plan may have, but the root alone of an open one."""
        if isinstance(plan, Tree):
            return [cls(plan, plan.is_chain)]
        return [cls(plan, False)] if isinstance(plan, DynamicTree) else [cls(plan, True), cls(plan, False)]

    @property
    def num_nodes(self) -> int:
        """N; trees that have fewer are padded."""
        return self.plan.max_depth + 1 if self.is_chain else self.plan.num_nodes

    def tables(self, tree: AnyTree) -> list[torch.Tensor]:
        """The tensors by which a tree of this form differs from others: none; a chain's lengths int64 [A]; or parents
        int64 [A, N] and `real` bool [A, N]."""
        if isinstance(self.plan, Tree):
            return []
        if isinstance(tree, RowChains):
            return [tree.lengths]
        assert isinstance(tree, RowTrees)
        return [tree.parents, tree.real]

    def tree(self, tables: Sequence[torch.Tensor]) -> AnyTree:
        """The tree of such tensors, which have N columns."""
        if isinstance(self.plan, Tree):
            return self.plan
        if self.is_chain:
            return RowChains(tables[0], self.num_nodes)
        parents, real = tables
        return RowTrees(parents, real, self.plan.max_depth)

    def example(self, device: torch.device) -> AnyTree:
        """A tree of one row, with as many nodes as there may be."""
        if isinstance(self.plan, Tree):
            return self.plan
        nodes = torch.arange(self.num_nodes, device=device)
        if self.is_chain:
            return RowChains(nodes[-1:], self.num_nodes)
        parents = (nodes - 1).clamp(0, self.plan.max_depth - 1).unsqueeze(0)
        return RowTrees(parents, torch.ones_like(parents, dtype=torch.bool), self.plan.max_depth)
