"""Checks of the return values of a user's drafter, so that a mistake stays with its row. Knows nothing of requests.

Shapes and types are checked on the host. Values are checked on the device, without a wait for it: a row with wrong ones
gets no drafts, and the host learns of it with the round's results.

Shapes: A active rows, N tree nodes, P pending tokens of a row at most, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch

from eagle_train.errors import check, shown
from eagle_train.inference.decode.row_trees import OpenTree, RowTrees, mended
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Pending

WRONG_VALUES = (
    "it proposed tokens outside the vocabulary, probabilities that are NaN, negative or not 1 in sum, or no tree"
)
_LEAST_OFF = 1e-3  # by so much a sum of probabilities may differ from 1 in any dtype


def checked_form(drafter: Drafter, drafted: Any, round: DraftRound) -> Drafted:
    """The return value of `drafter.propose`, whose values may yet be wrong. On the host alone.

    Raises UserError unless it is a `Drafted` with tokens int64 [A, N], q None or floating [A, N, V], trees that have
    room in the plan, and faults of its rows.
    """
    tree, rows, device = round.plan.tree, len(round.pending.tokens), round.pending.tokens.device
    name = f"drafter {type(drafter).__name__}: propose"
    check(isinstance(drafted, Drafted), f"{name} returned {type(drafted).__name__}; it must return a Drafted")
    tokens, q, trees, nodes = drafted.tokens, drafted.q, drafted.trees, tree.num_nodes
    by_row = drafter.needs.by_row or isinstance(tree, OpenTree)
    told = f"{name} must give trees if Needs.by_row is set or the tree is dynamic, and not else"
    check((trees is not None) == by_row, told)
    if trees is not None:
        check(isinstance(trees, RowTrees), f"{name} gave trees as {type(trees).__name__}; they must be RowTrees")
        check(trees.parents.ndim == 2 and trees.num_nodes <= nodes, f"{name} gave trees of more than {nodes} nodes")
        check(q is None, f"{name} gave q beside trees; it must be None")
        nodes = trees.num_nodes
        _check_tensor(f"{name} gave trees.parents", trees.parents, (rows, nodes), device, torch.int64)
        _check_tensor(f"{name} gave trees.real", trees.real, (rows, nodes), device, torch.bool)
    _check_tensor(f"{name} gave tokens", tokens, (rows, nodes), device, torch.int64)
    if q is not None:
        _check_tensor(f"{name} gave q", q, (rows, nodes, round.vocab_size), device)
        check(q.is_floating_point(), f"{name} gave q of {q.dtype}; it must be a floating type")
    faults = drafted.faults
    right = isinstance(faults, Mapping) and all(isinstance(row, int) and row in range(rows) for row in faults)
    check(right, f"{name} gave faults={shown(faults)}; it must be a mapping from rows, 0 to {rows - 1}, to reasons")
    return drafted


def checked_drafts(drafter: Drafter, drafted: Any, round: DraftRound) -> tuple[Drafted, torch.Tensor]:
    """The return value of `drafter.propose`, and the rows that were wrong, bool [A].

    The pending token is set at each root, and at all nodes of a wrong row, whose `q` may be anything; validation goes
    on from nothing that it computed. Raises UserError as `checked_form` does.
    """
    drafted = checked_form(drafter, drafted, round)
    last, q, trees = round.pending.last, drafted.q, drafted.trees
    tokens = torch.cat((last, drafted.tokens[:, 1:]), 1)  # a copy: theirs may be a view of the drafter's own state
    wrong = ((tokens < 0) | (tokens >= round.vocab_size)).any(1)
    if q is not None:
        wrong |= ~((q >= 0) & (q < torch.inf)).flatten(1).all(1)
        total, off = q.sum(-1, dtype=torch.float32), max(_LEAST_OFF, torch.finfo(q.dtype).eps)
        wrong |= ((total > 0) & ((total - 1).abs() > off)).any(1)  # leaves have zeros
    if trees is not None:
        trees, no_tree = mended(trees.parents, trees.real, round.plan.tree.max_depth)
        wrong |= no_tree
    tokens = torch.where(wrong.unsqueeze(1), last, tokens)  # tokens that the target can read; none is accepted
    return drafted._replace(tokens=tokens, trees=trees, computed=None), wrong


def checked_pending(drafter: Drafter, left: Any, pending: Pending) -> Pending:
    """As many of the newest tokens of `pending` as `drafter.rewind` has left of them, at least one. Nothing else of
    `left` is used, so that no answer depends on it. Raises UserError unless it is a Pending with counts int64 [A]."""
    name = f"drafter {type(drafter).__name__}: rewind"
    told = "it must return the Pending it was given, or the newest of it"
    check(isinstance(left, Pending), f"{name} returned {type(left).__name__}; {told}")
    _check_tensor(f"{name} gave counts", left.counts, tuple(pending.counts.shape), pending.counts.device, torch.int64)
    has_width = isinstance(left.tokens, torch.Tensor) and left.tokens.ndim == 2 and left.tokens.shape[1] > 0
    check(has_width, f"{name} gave no tokens; {told}")
    width = min(left.tokens.shape[1], pending.tokens.shape[1])
    return pending.newest(left.counts.clamp(1, width).minimum(pending.counts), width)


def _check_tensor(
    what: str, x: Any, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """`dtype`: None: any."""
    check(isinstance(x, torch.Tensor), f"{what} as {type(x).__name__}; it must be a tensor {list(shape)}")
    check(x.shape == shape, f"{what} of shape {list(x.shape)}; it must be {list(shape)}")
    check(x.device == device, f"{what} on {x.device}; it must be on {device}")
    check(dtype is None or x.dtype == dtype, f"{what} of {x.dtype}; they must be {dtype}")
