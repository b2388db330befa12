"""Dispatcher: which static tree the current batch gets. Paper section 3.4 (pre-computed static trees); DESIGN 3.5."""

from collections.abc import Mapping
from typing import Any

import torch

from eagle_train.config import check
from eagle_train.inference.drafting import Plan
from eagle_train.inference.tree import Tree, load_tree


class Dispatcher:
    """A table from batch size to tree. A tree whose only node is the root means: no speculation."""

    def __init__(self, spec: Any, device: torch.device | str = "cpu"):
        """`spec`: one tree for every batch size, or a mapping {largest batch size: tree}. Raises UserError."""
        is_table = isinstance(spec, Mapping) and bool(spec) and all(str(size).isdigit() for size in spec)
        table = {int(size): tree for size, tree in spec.items()} if is_table else {1 << 62: spec}
        check(all(size > 0 for size in table), f"dispatch: batch sizes {sorted(table)} must be above 0")
        self.table = sorted((size, Plan(load_tree(tree).to(device))) for size, tree in table.items())

    def dispatch(self, batch_size: int) -> Plan:
        """The plan of the smallest listed size that holds the batch; beyond the table, the last one."""
        return next((plan for size, plan in self.table if batch_size <= size), self.table[-1][1])

    @property
    def largest(self) -> Tree:
        """The tree with the most nodes, for which room is kept."""
        return max((plan.tree for _, plan in self.table), key=lambda tree: tree.num_nodes)

    @property
    def deepest(self) -> int:
        return max(plan.tree.max_depth for _, plan in self.table)
