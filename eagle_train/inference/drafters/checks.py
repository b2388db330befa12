"""Checks of the return values of a user's drafter, so that a mistake stays with its row. Knows nothing of requests.

Shapes and types are checked on the host. Values are checked on the device, without a wait for it: a row with wrong ones
gets no drafts, and the host learns of it with the round's results.

Shapes: A active rows, N tree nodes, V vocabulary.
"""

from typing import Any

import torch

from eagle_train.errors import check
from eagle_train.inference.decode.row_trees import mended
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Pending

WRONG_VALUES = "it proposed tokens outside the vocabulary, NaN or negative probabilities, or no tree"


def checked_drafts(drafter: Drafter, drafted: Any, round: DraftRound) -> tuple[Drafted, torch.Tensor]:
    """The return value of `drafter.propose`, harmless, and the rows that were wrong, bool [A].

    The pending token is set at each root. Raises UserError unless it is a `Drafted` with tokens int64 [A, N], q None or
    [A, N, V], and trees that the plan allows.
    """
    last, tree, vocab_size = round.pending.last, round.plan.tree, round.vocab_size
    name = f"drafter {type(drafter).__name__}: propose"
    check(isinstance(drafted, Drafted), f"{name} returned {type(drafted).__name__}; it must return a Drafted")
    tokens, q, trees = drafted.tokens, drafted.q, drafted.trees
    check((trees is not None) == drafter.needs.by_row, f"{name} must give trees if Needs.by_row is set, and not else")
    nodes = tree.num_nodes
    if trees is not None:
        check(trees.parents.ndim == 2 and trees.num_nodes <= nodes, f"{name} gave trees of more than {nodes} nodes")
        check(q is None, f"{name} gave q beside trees; it must be None")
        nodes = trees.num_nodes
        for what, x in (("parents", trees.parents), ("real", trees.real)):
            _check_tensor(f"{name} gave trees.{what}", x, (len(last), nodes), last.device)
    _check_tensor(f"{name} gave tokens", tokens, (len(last), nodes), last.device)
    check(tokens.dtype == torch.int64, f"{name} gave tokens of {tokens.dtype}; they must be torch.int64")
    tokens = torch.cat((last, tokens[:, 1:]), 1)  # a copy: theirs may be a view of the drafter's own state
    wrong = ((tokens < 0) | (tokens >= vocab_size)).any(1)
    if q is not None:
        _check_tensor(f"{name} gave q", q, (len(last), nodes, vocab_size), last.device)
        wrong |= ~((q >= 0) & (q < torch.inf)).flatten(1).all(1)
    if trees is not None:
        trees, no_tree = mended(trees.parents, trees.real, tree.max_depth)
        wrong |= no_tree
    # The pending token again is a draft like any other, and q of zeros accepts none.
    tokens = torch.where(wrong.unsqueeze(1), last, tokens)
    q = None if q is None else q.masked_fill(wrong[:, None, None], 0.0)
    return drafted._replace(tokens=tokens, q=q, trees=trees), wrong


def checked_pending(drafter: Drafter, pending: Any) -> Pending:
    """The return value of `drafter.rewind`. Raises UserError unless it is a Pending."""
    name = f"drafter {type(drafter).__name__}: rewind"
    told = "it must return the Pending it was given, or the newest of it"
    check(isinstance(pending, Pending), f"{name} returned {type(pending).__name__}; {told}")
    return pending


def _check_tensor(what: str, x: Any, shape: tuple[int, ...], device: torch.device) -> None:
    check(isinstance(x, torch.Tensor), f"{what} as {type(x).__name__}; it must be a tensor {list(shape)}")
    check(x.shape == shape, f"{what} of shape {list(x.shape)}; it must be {list(shape)}")
    check(x.device == device, f"{what} on {x.device}; it must be on {device}")
