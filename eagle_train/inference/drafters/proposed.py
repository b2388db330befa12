"""What the drafters of an engine propose for a round: each one's part, and all rows' drafts. DESIGN section 3.5.

Knows nothing of how drafts are made or verified.

Shapes: A active rows, N nodes of the largest tree, V vocabulary.
"""

from typing import NamedTuple

import torch

from eagle_train.inference.decode.row_trees import AnyTree, RowChains, RowTrees
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound
from eagle_train.ops.transfer import to_device

NO_TOKEN = -1
"""The id of no token."""


class Part(NamedTuple):
    """What one drafter was given, and what it proposed. `rows`: None for all of them."""

    drafter: Drafter
    rows: list[int] | None
    round: DraftRound
    drafted: Drafted

    def of(self, rows: list[int]) -> "Part":
        """The same of some of its rows."""
        places = rows if self.rows is None else [self.rows.index(row) for row in rows]
        return Part(self.drafter, rows, self.round.rows(places), self.drafted.rows(places))


class Proposed(NamedTuple):
    """A round's drafts: tokens int64 [A, N], q [A, N, V] or None, and the tree that they fill.

    `parts`: of the drafters. `wrong`: bool [A], the rows that get no more drafts; None where nobody is checked.
    `reasons`: why, as far as the host knows. `undrafted`: bool [A], the rows whose nodes are no drafts; None where
    there are none.
    """

    tokens: torch.Tensor
    q: torch.Tensor | None
    tree: AnyTree
    parts: list[Part]
    wrong: torch.Tensor | None
    reasons: dict[int, str]
    undrafted: torch.Tensor | None

    @property
    def offered(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and q by which nodes are accepted; where nothing was drawn in the round, by the tokens alone.
        Of a row without drafts no node is: its nodes hold its pending token, which the target may well repeat, but
        plain decoding has one token a round."""
        if self.undrafted is None:
            return self.tokens, self.q
        tokens = self.tokens.masked_fill(self.undrafted[:, None], NO_TOKEN)
        return tokens, None if self.q is None else self.q.masked_fill(self.undrafted[:, None, None], 0.0)


def tree_of(part: Part) -> AnyTree:
    if part.drafted.trees is not None:
        return part.drafted.trees
    assert isinstance(part.round.plan.tree, Tree)
    return part.round.plan.tree


def chains(
    last: torch.Tensor, parts: list[Part], trees: list[AnyTree]
) -> tuple[torch.Tensor, torch.Tensor | None, AnyTree]:
    """Tokens, q and tree of all rows, of parts whose trees are chains. `last` int64 [A, 1]: the pending tokens."""
    width = max([1, *(tree.num_nodes for tree in trees)])
    tokens, lengths = last.repeat(1, width), torch.zeros_like(last[:, 0])
    for part, tree in zip(parts, trees, strict=True):
        place = index_of(part.rows, last.device)
        tokens[place, : tree.num_nodes] = part.drafted.tokens
        lengths[place] = tree.row_depth if isinstance(tree, RowTrees) else tree.max_depth
    return tokens, None, RowChains(lengths, width)


def merged_q(parts: list[Part], count: int) -> torch.Tensor | None:
    """q [A, N, V] of `count` rows, 0 for those without a part; None where a part has none: accepting what the target
    draws itself is exact for drawn drafts too."""
    given = [part.drafted.q for part in parts if part.drafted.q is not None]
    if not given or len(given) < len(parts):
        return None
    q = given[0].new_zeros(count, *given[0].shape[1:])
    for part, own in zip(parts, given, strict=True):
        q[index_of(part.rows, q.device)] = own
    return q


def index_of(rows: list[int] | None, device: torch.device) -> torch.Tensor | slice:
    """Rows for an assignment: a list of numbers would have the host wait for the device."""
    return slice(None) if rows is None else to_device(rows, device, torch.long)
