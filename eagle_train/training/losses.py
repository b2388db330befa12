"""The distillation loss: smooth-L1 on hidden states and cross-entropy against the target's distribution. DESIGN 3.2.

Sums over supervised rows, which the caller has selected; the caller also counts them, over micro-batches and ranks.
Of models it knows the frozen LM head's four fields, of data and ranks nothing. Source: the paper, section 2.1.

Shapes: R rows, C rows of a chunk, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eagle_train.models.target import LMHead

# A chunk's four [C, V] buffers are all that ever exists of the logits.
CHUNK_ROWS = 256
CHUNK_ELEMENTS = 2**24
BLOCK = 256


@dataclass(frozen=True)
class LossSums:
    """`loss` is what to call backward on; the others are detached sums over `rows` rows, left on their device."""

    loss: torch.Tensor  # scalar: scale * (l1_weight * l1 + ce_weight * ce)
    l1: torch.Tensor  # scalar: smooth-L1, mean over H
    ce: torch.Tensor  # scalar: cross-entropy in nats
    agree: torch.Tensor  # int64 scalar: rows in which draft and target choose the same token
    rows: int


def distillation_loss(
    draft_hidden: torch.Tensor,
    target_hidden: torch.Tensor,
    lm_head: LMHead,
    *,
    l1_weight: float = 1.0,
    ce_weight: float = 0.1,
    scale: float = 1.0,
    chunk_rows: int | None = None,
) -> LossSums:
    """The loss of draft_hidden [R,H] against target_hidden [R,H], supervised rows only; R may be 0.

    `scale` is one over the number of supervised rows of the whole step (all micro-batches, all ranks), so that the
    gradients of several calls add up to those of one. Logits are computed in the LM head's dtype, with or without
    autocast; softmax and smooth-L1 in fp32, or in fp64 where their inputs are. Gradients flow to `draft_hidden` alone,
    and none is formed where none is wanted (evaluation).
    """
    assert draft_hidden.shape == target_hidden.shape, (draft_hidden.shape, target_hidden.shape)
    assert not target_hidden.requires_grad, "the target is frozen"
    assert not lm_head.weight.requires_grad, "the LM head is frozen"
    rows, width = draft_hidden.shape
    with torch.autocast(draft_hidden.device.type, enabled=False):
        exact = torch.promote_types(draft_hidden.dtype, torch.float32)
        l1 = F.smooth_l1_loss(draft_hidden.to(exact), target_hidden.to(exact), reduction="sum") / width
        with_gradient = torch.is_grad_enabled() and draft_hidden.requires_grad
        chunk_rows = chunk_rows or default_chunk_rows(lm_head.weight.shape[0])
        ce, agree = ChunkedCrossEntropy.apply(draft_hidden, target_hidden, lm_head, chunk_rows, with_gradient)
        loss = scale * (l1_weight * l1 + ce_weight * ce)
    return LossSums(loss, l1.detach(), ce.detach(), agree, rows)


def default_chunk_rows(vocab_size: int) -> int:
    return max(1, min(CHUNK_ROWS, CHUNK_ELEMENTS // vocab_size))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over rows of CE(softmax(z_t), log_softmax(z_d)), and in how many rows both logits have the same argmax.

    The gradient for the draft's hidden states is formed in the forward, chunk by chunk, while the chunk's probabilities
    exist; the backward only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any, draft: torch.Tensor, target: torch.Tensor, head: LMHead, chunk_rows: int, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(draft) if with_gradient else None
        buffers = chunk_buffers(head, min(chunk_rows, len(draft)))
        ce, agree = buffers[-1].new_zeros(()), torch.zeros((), dtype=torch.int64, device=draft.device)
        for start in range(0, len(draft), chunk_rows):
            rows = slice(start, start + chunk_rows)
            used = [buffer[: len(draft[rows])] for buffer in buffers]
            chunk_ce, chunk_agree = cross_entropy(draft[rows], target[rows], head, *used)
            ce += chunk_ce
            agree += chunk_agree
            if gradient is not None:
                gradient[rows] = hidden_gradient(head, *used)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agree)
        return ce, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ce: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_ce, None, None, None, None


def chunk_buffers(head: LMHead, rows: int) -> list[torch.Tensor]:
    """`raw` for the matmuls, in their dtype, and `p`, `z`, `q` for the softmax, in fp32 or more: four of [rows,V]."""
    dtype = head.weight.dtype
    exact = torch.promote_types(dtype, torch.float32)
    return [head.weight.new_empty(rows, len(head.weight), dtype=kind) for kind in (dtype, exact, exact, exact)]


def cross_entropy(
    draft: torch.Tensor,
    target: torch.Tensor,
    head: LMHead,
    raw: torch.Tensor,
    p: torch.Tensor,
    z: torch.Tensor,
    q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's cross-entropy and agreement, two scalars.

    Leaves the target's probabilities in `p`, the draft's in `q` and its logits in `z`. Each distribution costs one pass
    of exponentials: the draft's normaliser is read off its most likely token, whose probability is exp(0) / normaliser.
    """
    logits(target, head, raw, z)
    _, choice = row_max(z)
    torch.softmax(z, -1, out=p)
    logits(draft, head, raw, z)
    peak, guess = row_max(z)
    expected = torch.sub(z, peak, out=q).mul_(p).sum()  # no term is positive, so nothing cancels
    torch.softmax(z, -1, out=q)
    log_normaliser = -q.gather(-1, guess).log().sum()
    return log_normaliser - expected, (choice == guess).sum()


def hidden_gradient(head: LMHead, raw: torch.Tensor, p: torch.Tensor, z: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The cross-entropy's gradient [C,H] for the draft's hidden states, from what `cross_entropy` left; uses it up."""
    q -= p
    if head.softcap is not None:  # softcap * tanh(x / softcap) has the slope 1 - tanh(x / softcap)^2
        q.addcmul_(q, z.div_(head.softcap).square_(), value=-1)
    raw.copy_(q)
    return torch.mm(raw, head.weight).mul_(head.scale)


def logits(hidden: torch.Tensor, head: LMHead, raw: torch.Tensor, out: torch.Tensor) -> None:
    """`head(hidden)` in `out`: the matmul in the head's dtype, what follows it in `out`'s."""
    torch.mm(hidden.to(raw.dtype), head.weight.t(), out=raw)
    out.copy_(raw)
    if head.bias is not None:
        out += head.bias
    if head.scale != 1.0:
        out *= head.scale
    if head.softcap is not None:
        out.div_(head.softcap).tanh_().mul_(head.softcap)


def row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's maximum and where it first occurs, [C,1] each. torch.max with indices is 5 times slower on a CPU."""
    size = x.shape[-1]
    width = min(BLOCK, size)
    blocks = x.unfold(-1, width, width).amax(-1)  # leaves out what does not fill a block, hence one more at the end
    first = torch.cat([blocks, x[:, -width:].amax(-1, keepdim=True)], -1).argmax(-1, keepdim=True)
    start = (first * width).clamp(max=size - width)
    value, offset = x.gather(-1, start + torch.arange(width, device=x.device)).max(-1, keepdim=True)
    return value, start + offset
