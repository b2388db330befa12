"""The trees of an evaluation: whether they draft at all, and their names in a report."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from eagle_train.errors import UserError, check
from eagle_train.inference import Dispatcher, Engine, OpenTree, PlanTree, Tree


def check_tree(tree: Any, batch_size: int) -> None:
    """Raise UserError for a tree, or a table of trees, that drafts for no batch of up to this size."""
    dispatcher = Dispatcher(tree)
    drafts = any(tree.max_depth > 0 for tree, _ in dispatched(dispatcher, batch_size))
    check(
        drafts,
        f"{told_tree(dispatcher, batch_size)}: it drafts nothing at batch sizes up to batch_size={batch_size}, so "
        "there is nothing to measure; try tree=chain3",
    )


def told_tree(dispatcher: Dispatcher, batch_size: int, gate: bool = False) -> str:
    """What a message on the trees of batches of up to this size begins with. `gate`: as of EngineConfig."""
    return f"tree ({tree_names(dispatcher, batch_size)}){' and engine.gate=true' if gate else ''}"


def dispatched(dispatcher: Dispatcher, batch_size: int) -> list[tuple[PlanTree, list[int]]]:
    """The trees of batches of 1 to `batch_size` rows, and the sizes of each: a batch shrinks as requests finish."""
    by_tree = groupby(range(1, batch_size + 1), lambda size: dispatcher.dispatch(size).tree)
    return [(tree, list(sizes)) for tree, sizes in by_tree]


def have_one_depth(dispatcher: Dispatcher, batch_size: int) -> bool:
    """Whether all rounds of batches of up to this size that draft do so to the same depth."""
    trees = [tree for tree, _ in dispatched(dispatcher, batch_size) if tree.max_depth > 0]
    return (
        not dispatcher.auto and all(isinstance(tree, Tree) for tree in trees) and len({t.max_depth for t in trees}) == 1
    )


def one_chain(tree: Any, gate: bool) -> Tree:
    """The chain that every round drafts. `gate`: as of EngineConfig. Raises UserError for a tree that is none."""
    dispatcher = Dispatcher(tree)
    chain = dispatcher.table[0][1].tree
    is_fixed = len(dispatcher.table) == 1 and not dispatcher.auto and not gate
    if not (isinstance(chain, Tree) and chain.is_chain and chain.max_depth > 0 and is_fixed):
        first = dispatcher.table[0][0] if len(dispatcher.table) > 1 else 0  # rows, behind which the tree is another
        told = told_tree(dispatcher, first + 1, gate)
        raise UserError(f"{told}: vLLM drafts one chain, whatever the batch; try tree=chain3 engine.gate=false")
    return chain


def not_drafted(engine: Engine, batch_size: int) -> str:
    """What to tell where an engine with drafts drafted nothing at batch sizes up to this one."""
    told = told_tree(engine.dispatcher, batch_size, engine.config.gate)
    if may_decline(engine):
        instead = "tree=chain3 engine.gate=false"
        return f"{told}: no drafts were expected to pay, so there is nothing to measure; try {instead}"
    return f"{told}: no round was of a batch size that it drafts for, so there is nothing to measure; try tree=chain3"


def may_decline(engine: Engine) -> bool:
    """Whether rounds may go without drafts where none are expected to pay, as with tree=auto and engine.gate."""
    return engine.config.gate or bool(engine.dispatcher.auto)


def tree_names(dispatcher: Dispatcher, batch_size: int) -> str:
    """The trees of batches of up to this size, for a report."""
    trees = dispatched(dispatcher, batch_size)
    if dispatcher.auto:
        lengths = sorted({plan.tree.max_depth for plans in dispatcher.auto.values() for plan in plans})
        return f"auto: none, or of depth {', '.join(map(str, lengths))}"
    if len(trees) == 1:
        return tree_name(trees[0][0])
    return ", ".join(f"{tree_name(tree)} (batch size {' to '.join(map(str, _ends(sizes)))})" for tree, sizes in trees)


def tree_name(tree: PlanTree) -> str:
    """A tree, for a report."""
    if tree.max_depth == 0:
        return "no draft"
    if isinstance(tree, OpenTree):
        return f"trees by row of {tree.num_nodes - 1} nodes at most"
    if tree.is_chain:
        return f"chain{tree.max_depth}"
    return f"tree of {tree.num_nodes - 1} nodes, depth {tree.max_depth}"


def unpaid(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence on the batch sizes at which no tree pays, of the rows of `evals.tune_trees`; none where some pays."""
    sizes = [str(row["batch_size"]) for row in table if row["speedup"] <= 1]
    if not sizes:
        return []
    at = f"batch size{'s' if len(sizes) > 1 else ''} {', '.join(sizes)}"
    return [f"No tree pays at {at}: none is faster than plain decoding, so the table drafts nothing there."]


def _ends(sizes: list[int]) -> list[int]:
    return sorted({sizes[0], sizes[-1]})
