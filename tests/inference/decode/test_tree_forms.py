"""Forms of trees, by which validation is recorded: trees of one form differ in their tables alone."""

import pytest
import torch

from eagle_train.inference.decode.row_trees import AnyTree, DynamicTree, OpenTree, RowChains, RowTrees
from eagle_train.inference.decode.tree import Tree, chain
from eagle_train.inference.decode.tree_forms import TreeForm

OPEN = OpenTree(6, 3)
ROWS = RowTrees.of([[0, 0, 0, 1, 3], [0, 0, 1]], 3, "cpu")


@pytest.mark.parametrize(
    ("plan", "tree", "wanted"),
    [
        (chain(2), chain(2), TreeForm(chain(2), True)),
        (Tree((-1, 0, 0)), Tree((-1, 0, 0)), TreeForm(Tree((-1, 0, 0)), False)),
        (OPEN, ROWS, TreeForm(OPEN, False)),
        (OPEN, RowChains(torch.tensor([2, 0]), 3), TreeForm(OPEN, True)),
        (OPEN, RowChains(torch.tensor([0, 0]), 1), TreeForm(chain(0), True)),  # nobody drafted
        (OPEN, chain(2), TreeForm(chain(2), True)),  # of one drafter among several
        (DynamicTree(6, 3, 2), ROWS, TreeForm(DynamicTree(6, 3, 2), False)),
    ],
)
def test_forms_of_trees(plan, tree, wanted):
    assert TreeForm.of(plan, tree) == wanted


def test_all_forms_of_a_plan():
    assert TreeForm.all_of(chain(2)) == [TreeForm(chain(2), True)]
    assert TreeForm.all_of(OPEN) == [TreeForm(OPEN, True), TreeForm(OPEN, False)]
    assert TreeForm.all_of(DynamicTree(6, 3, 2)) == [TreeForm(DynamicTree(6, 3, 2), False)]


def tables_of(tree: AnyTree) -> list[list]:
    ancestors = tree.ancestors if isinstance(tree, RowTrees) else tree.ancestors.unsqueeze(0)
    return [ancestors.tolist(), tree.depth.tolist()]


@pytest.mark.parametrize("tree", [ROWS, RowChains(torch.tensor([4, 1]), 5), chain(4), Tree((-1, 0, 0))])
def test_a_tree_is_its_tables(tree):
    plan = tree if isinstance(tree, Tree) else OpenTree(5, 4)
    form = TreeForm.of(plan, tree)
    tables = form.tables(tree)
    assert len(tables) == {Tree: 0, RowChains: 1, RowTrees: 2}[type(tree)]
    again = form.tree(tables)
    assert (type(again), again.num_nodes, again.is_chain) == (type(tree), tree.num_nodes, tree.is_chain)
    assert tables_of(again) == tables_of(tree)


@pytest.mark.parametrize("form", [*TreeForm.all_of(OpenTree(9, 3)), *TreeForm.all_of(DynamicTree(7, 3, 2))])
def test_examples_have_as_many_nodes_and_levels_as_there_may_be(form):
    tree = form.example(torch.device("cpu"))
    assert TreeForm.of(form.plan, tree) == form
    assert (tree.num_nodes, int(tree.depth.max())) == (form.num_nodes, 3)
    assert form.num_nodes == (4 if form.is_chain else form.plan.num_nodes)
    assert bool(tree.real.all())
