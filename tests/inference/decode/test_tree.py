"""Trees: their tables agree with each other and with small examples, pruning is optimal, and invalid trees are
refused.
"""

import itertools
import re
import textwrap

import pytest
import torch
from omegaconf import OmegaConf

from eagle_train.errors import UserError
from eagle_train.inference.decode import tree as tree_module
from eagle_train.inference.decode.named_trees import load_tree
from eagle_train.inference.decode.tree import MAX_NODES, Tree, chain, full, pruned
from eagle_train.settings import CONF_DIR
from eagle_train.tree_names import ANY_TREE, tree_of
from tests.support.pages import text_of

RAGGED = Tree((-1, 0, 0, 0, 1, 1, 2, 5))
ACCEPTANCE = [[0.6, 0.3, 0.05], [0.5, 0.25], [0.4]]
MODULE = "eagle_train.inference.decode.tree"
CHAIN = f"{MODULE}.chain"


def test_tables_of_a_ragged_tree():
    assert (RAGGED.num_nodes, RAGGED.max_depth) == (8, 3)
    assert RAGGED.levels == ((0, 1), (1, 4), (4, 7), (7, 8))
    assert RAGGED.fanout == (3, 2, 1, 0)
    assert RAGGED.depth.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert RAGGED.child_rank.tolist() == [0, 0, 1, 2, 0, 1, 0, 0]
    assert RAGGED.parent.tolist() == [0, 0, 0, 0, 1, 1, 2, 5]
    assert RAGGED.children.tolist()[:3] == [[1, 2, 3], [4, 5, -1], [6, -1, -1]]
    assert RAGGED.paths.tolist() == [[0, 3, -1, -1], [0, 1, 4, -1], [0, 2, 6, -1], [0, 1, 5, 7]]
    assert RAGGED.path_to.tolist()[5] == [0, 1, 5, 5]
    assert RAGGED.ancestors[7].nonzero().flatten().tolist() == [0, 1, 5, 7]
    assert RAGGED.priority.argsort().tolist() == [0, 3, 2, 6, 1, 5, 7, 4]


@pytest.mark.parametrize(
    "tree", [chain(0), chain(4), full(3, 2), RAGGED, pruned(5, ACCEPTANCE), Tree(RAGGED.parents, siblings_repeat=True)]
)
def test_tables_agree(tree):
    """Each table follows from the paths from the root, which are computed here from `parents`."""
    assert [node for level in tree.levels for node in range(*level)] == list(range(tree.num_nodes))
    for node, parent in enumerate(tree.parents):
        path = [node]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        assert tree.depth[node] == len(path) - 1
        assert tree.levels[len(path) - 1][0] <= node < tree.levels[len(path) - 1][1]
        assert tree.path_to[node].tolist() == path + [node] * (tree.max_depth + 1 - len(path))
        assert tree.ancestors[node].nonzero().flatten().tolist() == path
        mine = tree.priority[node]
        assert [j for j, left in enumerate(tree.if_rejected[node]) if left != mine] == path[1:]
        assert tree.if_rejected[node].min() == (-1 if node else mine)
        if node:
            assert tree.children[parent, tree.child_rank[node]] == node
    leaves = [node for node in range(tree.num_nodes) if node not in tree.parents]
    assert tree.paths.tolist() == [[*p[: d + 1], *[-1] * (tree.max_depth - d)] for p, d in of_leaves(tree, leaves)]
    assert (tree.children >= 0).sum() == tree.num_nodes - 1
    for name in ("depth", "child_rank", "parent", "children", "paths", "path_to", "priority", "if_rejected"):
        assert getattr(tree, name).dtype == torch.int64
    assert tree.ancestors.dtype == torch.bool


def of_leaves(tree: Tree, leaves: list[int]) -> list[tuple[list[int], int]]:
    return [(tree.path_to[leaf].tolist(), int(tree.depth[leaf])) for leaf in leaves]


def test_where_siblings_repeat_the_longest_path_is_accepted():
    """Of one level the first; without it, that of the first sibling."""
    accepted = {(1, 2, 6): (1, 6), (1, 2, 3): (1, 1), (2, 3): (2, 2), (2, 4, 7): (2, 2), (1, 2, 4, 5, 6, 7): (4, 7)}
    match = torch.tensor([[node in nodes for node in range(RAGGED.num_nodes)] for nodes in accepted])
    repeating = Tree(RAGGED.parents, siblings_repeat=True)
    pairs = zip(RAGGED.accepted(match).tolist(), repeating.to("cpu").accepted(match).tolist(), strict=True)
    assert list(pairs) == list(accepted.values())
    assert repeating == repeating.to("cpu") != RAGGED


def test_chain_and_full():
    assert chain(3).parents == (-1, 0, 1, 2)
    assert full(2, 2).parents == (-1, 0, 0, 1, 1, 2, 2)
    assert full(4, 1) == chain(4)
    assert hash(full(4, 1)) == hash(chain(4))
    assert full(3, 4).num_nodes == 1 + 4 + 16 + 64


def test_the_recipe_of_a_tree_by_rule():
    """CONTRIBUTING's function, with what tree.py has, and the test that goes with it."""
    section = text_of("CONTRIBUTING.md").partition("## Add a tree")[2].partition("\n## ")[0]
    function, its_test = (textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    names = dict(vars(tree_module))
    exec(function + its_test, names)
    names["test_a_comb"]()
    with pytest.raises(UserError, match=f"tree.depth 600 with tree.width 2 exceeds {MAX_NODES} nodes"):
        names["comb"](600, 2)


@pytest.mark.parametrize("num_nodes", range(1, 12))
def test_pruned_is_the_best_of_all_trees_of_its_size(num_nodes):
    """Against the nodes of the greatest path products: where acceptance falls with rank and depth these form a tree."""
    ranks = itertools.chain.from_iterable(
        itertools.product(*(range(len(row)) for row in ACCEPTANCE[:depth])) for depth in (1, 2, 3)
    )
    worth = {path: product(path) for path in ranks}
    best = sorted(worth, key=lambda path: (-worth[path], len(path), path))[:num_nodes]
    assert sorted(rank_paths(pruned(num_nodes, ACCEPTANCE))) == sorted(best)


def product(path: tuple[int, ...]) -> float:
    worth = 1.0
    for depth, rank in enumerate(path):
        worth *= ACCEPTANCE[depth][rank]
    return worth


def rank_paths(tree: Tree) -> list[tuple[int, ...]]:
    """Each drafted node as the child ranks on its path."""
    paths = [tuple(path[1 : depth + 1]) for path, depth in of_leaves(tree, list(range(1, tree.num_nodes)))]
    return [tuple(int(tree.child_rank[node]) for node in path) for path in paths]


def test_pruned_breaks_ties_and_keeps_siblings_in_order():
    assert pruned(3, [[0.5, 0.5], [1.0]]).parents == (-1, 0, 0, 1)
    assert pruned(2, [[0.1, 0.9]]).parents == (-1, 0, 0)  # rank 1 is better, but cannot be without rank 0


def test_every_bundled_tree_loads():
    """Trees that a name describes have no YAML."""
    names = {path.stem for path in (CONF_DIR / "tree").glob("*.yaml")} - {"table"}
    assert not any(map(tree_of, names))
    trees = {name: load_tree(name) for name in names}
    assert len(trees["n8"].parents) == 9
    assert trees["auto"].trees() == [chain(length) for length in (1, 2, 3, 5, 7)]


@pytest.mark.parametrize("length", [0, 1, 3, 7, 12, MAX_NODES - 1])
def test_a_chain_by_its_name(length):
    assert load_tree(f"chain{length}") == chain(length)


@pytest.mark.parametrize(("depth", "branching"), [(1, 1), (2, 3), (3, 2), (1, 12), (9, 2)])
def test_a_full_tree_by_its_name(depth, branching):
    assert load_tree(f"d{depth}_bf{branching}") == full(depth, branching)


@pytest.mark.parametrize("name", ["chain", "chain-1", "chain03", "chain3 ", "Chain3", "d0_bf2", "d3_bf0", "d3bf2"])
def test_names_that_describe_no_tree(name):
    with pytest.raises(UserError, match=rf"known trees are chain1, .*n8, and {re.escape(ANY_TREE)}"):
        load_tree(name)


def test_a_table_is_no_tree():
    with pytest.raises(UserError, match=r"^tree is 'table'; known trees are chain1, "):
        load_tree("table")


def test_load_tree_takes_trees_and_mappings():
    assert load_tree(RAGGED) is RAGGED
    assert load_tree({"parents": [-1, 0, 0]}).parents == (-1, 0, 0)
    assert load_tree(OmegaConf.create({"_target_": CHAIN, "length": 2})) == chain(2)


def test_to_moves_every_table():
    there = chain(3).to("meta")
    assert there == chain(3)
    assert {value.device.type for value in vars(there).values() if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain_99", "tree is 'chain_99'; known trees are .*chain3.*n8"),
        ("chain1024", f"tree.length is 1024; it must be below {MAX_NODES}"),
        ("d30_bf9", "tree.depth 30 with tree.branching 9 exceeds"),
        ({1: "chain3", "y": 2}, r"tree has the keys \['1', 'y'\]; it must have"),
        ("../tree/chain3", "known trees"),
        (3, "tree is 3"),
        ({"parents": []}, "node 0"),
        ({"parents": [0, 0]}, "node 0 .* -1"),
        ({"parents": [-1, 0, 2]}, "node 2 has parent 2"),
        ({"parents": [-1, 0, -1]}, "node 2 has parent -1"),
        ({"parents": [-1, 0, "x"]}, "node 2 has parent 'x'"),
        ({"parents": [-1, 0, 0, 2, 1]}, "node 4 has parent 1 but node 3 has 2"),
        ({"parents": 5}, "tree.parents is 5"),
        ({"parents": [-1], "length": 3}, "'length', 'parents'"),
        ({"_target_": CHAIN, "length": -1}, "tree.length is -1"),
        ({"_target_": CHAIN, "length": 2.5}, "tree.length is 2.5"),
        ({"_target_": CHAIN, "length": MAX_NODES}, f"below {MAX_NODES}"),
        ({"_target_": CHAIN, "lenght": 3}, "lenght"),
        ({"_target_": f"{MODULE}.nothing"}, "nothing"),
        ({"_target_": "builtins.dict"}, "must make a Tree"),
        ({"_target_": f"{MODULE}.full", "depth": 30, "branching": 9}, "exceeds"),
        ({"_target_": f"{MODULE}.full", "depth": 0, "branching": 2}, "tree.depth is 0"),
        (
            {"_target_": f"{MODULE}.pruned", "num_nodes": 4, "acceptance": [[0.5, 0.2]]},
            "only 2",
        ),
        (
            {"_target_": f"{MODULE}.pruned", "num_nodes": 1, "acceptance": [[1.5]]},
            "between 0 and 1",
        ),
    ],
)
def test_what_is_no_tree_is_refused_in_one_line(spec, message):
    with pytest.raises(UserError, match=message) as refused:
        load_tree(spec)
    assert "\n" not in str(refused.value)
