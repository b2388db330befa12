"""Trees by name, from YAMLs and from mappings, and the choice among several that a name may stand for. DESIGN 3.5.

Knows nothing of models, tokens, probabilities or requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from eagle_train.errors import check
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.decode.tree import Tree, chain, check_count
from eagle_train.settings import CONF_DIR, instantiate
from eagle_train.tree_names import ANY_TREE, TREES, tree_of


@dataclass(frozen=True)
class AutoTree:
    """tree=auto: a chain of one of these lengths, or no draft, by what is expected to pay in a round. Raises
    UserError."""

    lengths: tuple[int, ...] = (1, 2, 3, 5, 7)

    def __post_init__(self) -> None:
        lengths = tuple(self.lengths)
        object.__setattr__(self, "lengths", lengths)  # YAML gives a list
        for length in lengths:
            check_count("lengths", length, 1)
        check(bool(lengths) and sorted(set(lengths)) == list(lengths), f"tree.lengths is {lengths}; they must increase")

    def trees(self, most: int | None = None) -> list[Tree]:
        """The chains, the shortest first. `most`: leaves longer ones out, unless all are."""
        short = [length for length in self.lengths if most is None or length <= most]
        return [chain(length) for length in short or self.lengths]


AnySpec = Tree | AutoTree | DynamicTree | str | Mapping[str, Any]
"""What `load_tree` takes."""


def load_tree(spec: AnySpec) -> Tree | AutoTree | DynamicTree:
    """A tree, AutoTree or DynamicTree from itself, a name (`chainN`, `dM_bfN` or a YAML in conf/tree), or a mapping
    that has `_target_` or `parents`.

    Raises UserError for an unknown name, and for a mapping that describes no tree.
    """
    if isinstance(spec, Tree | AutoTree | DynamicTree):
        return spec
    if isinstance(spec, str):
        if (described := tree_of(spec)) is not None:
            return _instantiated(described)
        named = sorted({path.stem for path in (CONF_DIR / "tree").glob("*.yaml")} - {"table"})  # a table of trees
        check(spec in named, f"tree is {spec!r}; known trees are {', '.join([*TREES, *named])}, and {ANY_TREE}")
        named_tree: Any = OmegaConf.load(CONF_DIR / "tree" / f"{spec}.yaml")
        return load_tree(named_tree)
    check(isinstance(spec, Mapping), f"tree is {spec!r}; it must be a name in conf/tree or a mapping")
    if "_target_" in spec:
        return _instantiated(spec)
    check(
        set(spec) == {"parents"},
        f"tree has the keys {sorted(map(str, spec))}; it must have `_target_` or `parents` alone",
    )
    parents = spec["parents"]
    check(isinstance(parents, Sequence), f"tree.parents is {parents!r}; it must be a list of node numbers")
    return Tree(tuple(parents))


def _instantiated(spec: Mapping[str, Any]) -> Tree | AutoTree | DynamicTree:
    """The tree that calling `_target_` gives. Raises UserError where it gives none."""
    tree = instantiate(spec, "tree")
    check(
        isinstance(tree, Tree | AutoTree | DynamicTree), f"tree._target_ is {spec['_target_']!r}; it must make a Tree"
    )
    return tree
