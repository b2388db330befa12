"""An LM head that a draft learns, and the loss on its logits: gradients for the draft's states and for the head.

Shapes: R rows of all passes together, C rows of a chunk, H hidden, V' the draft's tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from eagle_train.drafts.losses import Buffers, default_chunk_rows, exact_dtype, logits_of, loss_on_logits
from eagle_train.models.head import LMHead
from eagle_train.ops.grouped import cast_kept


class Share(NamedTuple):
    """A pass: how many rows it has, and the weight of its loss."""

    rows: int
    weight: float


class Learnt(NamedTuple):
    """What rows are learnt from: `target` [R,H], what `head` reads, the target's frozen LM head for the draft's tokens.
    `kind`: see `loss_on_logits`. `shares`: of the passes, whose rows come one after the other."""

    target: torch.Tensor
    head: LMHead
    kind: str
    shares: Sequence[Share]


class OwnHead(nn.Module):
    """Logits [.., V'] = states [.., H] @ weight.T, without bias, scale or cap.

    Its weight is used in its own forward alone, where it is whole whatever a backend divides.
    """

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))

    def forward(self, draft: torch.Tensor, learnt: Learnt | None = None) -> Any:
        """Logits; or with `learnt`, the result of `_losses`."""
        if learnt is None:
            return nn.functional.linear(draft.to(self.weight.dtype), self.weight)
        return self._losses(draft, learnt)

    def _losses(self, draft: torch.Tensor, learnt: Learnt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss on logits: the sum over the passes' rows, each pass with its weight, fp32; and of the first pass the
        cross-entropy in nats, fp32, and the rows in which both have the same most likely token, int64.

        `draft` [R,H]: what this head reads. Products are in the dtype of `learnt.head`, sums in fp32 (fp64 in fp64),
        under autocast too. A chunk's logits exist at a time, and one gradient for the weight.
        """
        assert not learnt.target.requires_grad, "the target is frozen"
        with_gradient = torch.is_grad_enabled() and (draft.requires_grad or self.weight.requires_grad)
        with torch.autocast(draft.device.type, enabled=False):
            return _OwnHeadLoss.apply(draft, self.weight, learnt, with_gradient)


class _OwnHeadLoss(torch.autograd.Function):
    """As in losses.py, gradients are computed in the forward, while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        draft: torch.Tensor,
        weight: torch.Tensor,
        learnt: Learnt,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        target, head, kind, shares = learnt
        exact, own = exact_dtype(head), LMHead(cast_kept(weight, head.weight.dtype))
        of_rows = torch.empty_like(draft) if with_gradient else None
        of_weight = torch.zeros_like(own.weight, dtype=exact) if with_gradient else None
        chunk_rows = max(1, min(default_chunk_rows(len(weight), draft.device.type), len(draft)))
        buffers = Buffers(own, chunk_rows, kind)
        loss, sums, start = torch.zeros((), dtype=torch.float64, device=draft.device), [], 0
        for count, share in shares:
            found = torch.zeros(3, dtype=torch.float64, device=draft.device)
            for first in range(start, start + count, chunk_rows):
                rows = slice(first, min(first + chunk_rows, start + count))
                x = draft[rows].to(own.weight.dtype)
                of_target, of_draft = _products(target[rows], x, head, own, buffers.products)
                found += loss_on_logits(of_target, of_draft, own, kind, with_gradient, buffers)
                if of_rows is not None and of_weight is not None:
                    of_rows[rows] = torch.mm(of_draft, own.weight) * share
                    of_weight.add_(torch.mm(of_draft.t(), x), alpha=share)
            loss, start = loss + share * found[0], start + count
            sums.append(found)
        ctx.save_for_backward(of_rows, None if of_weight is None else of_weight.to(weight.dtype))
        ce, agree = sums[0][1].to(exact), sums[0][2].long()
        ctx.mark_non_differentiable(ce, agree)
        return loss.to(exact), ce, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        of_rows, of_weight = ctx.saved_tensors
        # Scalars multiply in any dtype: a weight's gradient has the weight's.
        return (of_rows * grad_loss).to(of_rows.dtype), of_weight * grad_loss.to(of_weight.dtype), None, None


def _products(
    target: torch.Tensor, draft: torch.Tensor, head: LMHead, own: LMHead, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's logits [C,V'], with all that its family makes of them, and the draft's."""
    count = len(draft)
    of_target = torch.mm(target.to(out.dtype), head.weight.t(), out=out[:count])
    of_draft = torch.mm(draft, own.weight.t(), out=out[count : 2 * count])
    return logits_of(of_target, head, None), of_draft
