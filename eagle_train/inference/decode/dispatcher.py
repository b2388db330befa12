"""The dispatcher: which static tree a batch of a given size gets. Paper section 3.4, DESIGN section 3.5.

Knows nothing of requests or of how trees are drafted.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from yaml import YAMLError

from eagle_train.errors import UserError, check, one_line
from eagle_train.inference.decode.named_trees import AutoTree, load_tree
from eagle_train.inference.decode.row_trees import PlanTree
from eagle_train.inference.drafters.drafter import TreePlan


class Dispatcher:
    """A table from batch size to tree. A tree of the root alone is decoding without speculation.

    `table`: (largest batch size, plan) pairs, ascending. `auto`: by largest batch size, the plans of an `AutoTree`,
    whose last one is in the table.
    """

    def __init__(self, spec: Any, device: torch.device | str = "cpu", levels: int | None = None):
        """`spec`: a tree for all batch sizes; a mapping {largest batch size: tree}; or a YAML file of either, as
        FILE.yaml or {table: FILE}. A tree as `load_tree` takes it. `device`: of the trees' tables. `levels`: how deep
        an `AutoTree` may go. Raises UserError.
        """
        if isinstance(spec, Mapping) and set(spec) == {"table"}:
            spec = _read_table(spec["table"])
        elif isinstance(spec, str) and spec.endswith(".yaml"):
            spec = _read_table(spec)
        is_table = isinstance(spec, Mapping) and bool(spec) and all(str(size).isdecimal() for size in spec)
        table = {int(size): tree for size, tree in spec.items()} if is_table else {1 << 62: spec}
        check(all(size > 0 for size in table), f"dispatch: batch sizes {sorted(table)} must be above 0")
        trees = {size: load_tree(tree) for size, tree in sorted(table.items())}
        self.auto = {
            size: [TreePlan(each.to(device)) for each in tree.trees(levels)]
            for size, tree in trees.items()
            if isinstance(tree, AutoTree)
        }
        self.table = [
            (size, self.auto[size][-1] if isinstance(tree, AutoTree) else TreePlan(tree.to(device)))
            for size, tree in trees.items()
        ]

    def dispatch(self, batch_size: int) -> TreePlan:
        """The plan of the smallest listed size that is at least `batch_size`; above all of them, the last one."""
        return next((plan for size, plan in self.table if batch_size <= size), self.table[-1][1])

    def choices(self, batch_size: int) -> list[TreePlan]:
        """The plans with drafts for such a batch, the least first: several of an `AutoTree`, else one or none."""
        size = next((size for size, _ in self.table if batch_size <= size), self.table[-1][0])
        plans = self.auto.get(size) or [self.dispatch(batch_size)]
        return [plan for plan in plans if plan.tree.num_nodes > 1]

    def plans(self, sizes: list[int]) -> list[tuple[int, TreePlan]]:
        """These batch sizes, each with every plan that such a batch may get; for those who prepare for them all."""
        return [(size, plan) for size in sizes for plan in (self.choices(size) or [self.dispatch(size)])]

    @property
    def largest(self) -> PlanTree:
        """The tree with the most nodes."""
        return max((plan.tree for _, plan in self.table), key=lambda tree: tree.num_nodes)

    @property
    def deepest(self) -> int:
        """The greatest depth of a tree."""
        return max(plan.tree.max_depth for _, plan in self.table)


class ReplacedPlans(Dispatcher):
    """Another dispatcher's choice, with other plans in place of its own."""

    def __init__(self, other: Dispatcher, plan_of: Callable[[TreePlan], TreePlan]):
        self._other, self._plan_of = other, cache(plan_of)
        self.table = [(size, self._plan_of(plan)) for size, plan in other.table]
        self.auto = {size: [self._plan_of(plan) for plan in plans] for size, plans in other.auto.items()}

    def dispatch(self, batch_size: int) -> TreePlan:
        return self._plan_of(self._other.dispatch(batch_size))

    def choices(self, batch_size: int) -> list[TreePlan]:
        """The plans with drafts for such a batch, the least first: several of an `AutoTree`, else one or none."""
        size = next((size for size, _ in self.table if batch_size <= size), self.table[-1][0])
        plans = self.auto.get(size) or [self.dispatch(batch_size)]
        return [plan for plan in plans if plan.tree.num_nodes > 1]

    def plans(self, sizes: list[int]) -> list[tuple[int, TreePlan]]:
        return [(size, self._plan_of(plan)) for size, plan in self._other.plans(sizes)]


def _read_table(path: str) -> Any:
    """The content of a YAML file: trees by batch size, as evals/tune_trees.py writes them, or one tree. Raises
    UserError."""
    check(Path(path).is_file(), f"tree.table={path}: no such file")
    try:
        table = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserError(f"tree.table={path}: cannot be read: {error.strerror}") from error
    except (YAMLError, ValueError) as error:
        raise UserError(f"tree.table={path}: no YAML: {one_line(error)}") from error
    given = set(table) if isinstance(table, dict) else set()
    is_table = bool(given) and all(isinstance(size, int) for size in given)
    is_tree = bool(given & {"_target_", "parents"})
    check(is_table or is_tree, f"tree.table={path}: must map batch sizes to trees, or be one: `parents: [-1, 0]`, say")
    return table
