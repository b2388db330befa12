"""Trees that a name describes: `chainN` and `dM_bfN`. Knows nothing of tensors, so that commands can list them at once.
DESIGN section 3.5.
"""

import re
from typing import Any

CHAIN, FULL = re.compile(r"chain(0|[1-9]\d{0,5})"), re.compile(r"d([1-9]\d{0,5})_bf([1-9]\d{0,5})")
TREES = ("chain1", "chain2", "chain3", "chain5", "d3_bf2")  # of those that have no YAML, some to be shown
ANY_TREE = "any chainN and dM_bfN (depth M, N children each)"


def tree_of(name: str) -> dict[str, Any] | None:
    """The tree that a name describes by itself, as a YAML in conf/tree would; None for any other name. DESIGN 3.5."""
    if found := CHAIN.fullmatch(name):
        return {"_target_": "eagle_train.inference.decode.tree.chain", "length": int(found[1])}
    if found := FULL.fullmatch(name):
        depth, branching = map(int, found.groups())
        return {"_target_": "eagle_train.inference.decode.tree.full", "depth": depth, "branching": branching}
    return None
