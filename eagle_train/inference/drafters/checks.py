"""Checks of the return values of a user's drafter, so that a mistake is one line or harmless. Knows nothing of
requests.

On a GPU only shapes and types are checked, because values would need a synchronisation.

Shapes: A active rows, N tree nodes, V vocabulary.
"""

from typing import Any

import torch

from eagle_train.errors import check
from eagle_train.inference.drafters.drafter import Drafted, Drafter, Pending, TreePlan


def checked_drafts(drafter: Drafter, drafted: Any, plan: TreePlan, pending: Pending, vocab_size: int) -> Drafted:
    """The return value of `drafter.propose`, with the pending token set at each root.

    Raises UserError unless it is a `Drafted` with tokens int64 [A, N], and q None or [A, N, V]; on a CPU also for token
    ids outside the target's vocabulary.
    """
    name, last = f"drafter {type(drafter).__name__}: propose", pending.last
    check(isinstance(drafted, Drafted), f"{name} returned {type(drafted).__name__}; it must return a Drafted")
    tokens, q, _ = drafted
    shape = (len(last), plan.tree.num_nodes)
    _check_tensor(f"{name} gave tokens", tokens, shape, last.device)
    check(tokens.dtype == torch.int64, f"{name} gave tokens of {tokens.dtype}; they must be torch.int64")
    if q is not None:
        _check_tensor(f"{name} gave q", q, (*shape, vocab_size), last.device)
    tokens = torch.cat((last, tokens[:, 1:]), 1)  # a copy: theirs may be a view of the drafter's own state
    if tokens.device.type == "cpu":
        low, high = (int(each) for each in tokens.aminmax())
        wrong = low if low < 0 else high
        check(0 <= wrong < vocab_size, f"{name} gave the token {wrong}; tokens must be from 0 to {vocab_size - 1}")
    return drafted._replace(tokens=tokens)


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
