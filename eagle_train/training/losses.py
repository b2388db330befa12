"""The distillation loss: smooth-L1 on hidden states, cross-entropy against the target's distribution. DESIGN 3.2.

Or, instead of the cross-entropy, the LK loss (arXiv 2602.23881), which aims at the acceptance rate. Sums over
supervised rows, which the caller has selected and counted. Of models it knows the frozen LM head's four fields; of data
and ranks nothing. Source: the paper, section 2.1.

Shapes: R rows, C rows of a chunk, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eagle_train.models.target import LMHead

# Rows whose logits exist at once: enough to fill a matmul, few enough for a CPU's caches. CPU time on one Zen 5 core in
# bf16, forward and backward, for chunks of 32, 64, 128, 256, 512, 1024 rows (the best of several, on a busy machine):
#   4,096 rows x   4,096 x 256: 136, 118, 115, 112, 121, 127 ms (naive: 359; 60 of ours are matmul)
#     512 rows x 128,256 x 512: 1155, 943, 882, 938, 1140 ms from 32 to 512 (naive: 2261)
CHUNK_ROWS = 256
CHUNK_LOGITS = 2**24  # 64 MiB in fp32
BLOCK = 256  # columns, see row_max
LOGITS_LOSSES = ("ce", "lk")
LK_RATE = 3.0  # how fast the LK loss turns from cross-entropy to acceptance as the acceptance grows


@dataclass(frozen=True)
class LossSums:
    """`loss` is what to call backward on; the others are detached sums over `rows` rows, left on their device."""

    loss: torch.Tensor  # scalar: scale * (l1_weight * l1 + ce_weight * (ce or lk))
    l1: torch.Tensor  # scalar: smooth-L1, its mean over H
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
    logits_loss: str = "ce",
    scale: float = 1.0,
    chunk_rows: int | None = None,
) -> LossSums:
    """The loss of draft_hidden [R,H] against target_hidden [R,H], supervised rows only; R may be 0.

    `scale` is one over the number of supervised rows of the whole step (all micro-batches, all ranks), so that the
    gradients of several calls add up to those of one. `logits_loss`: ce, or lk (see `lk_gradient`). Matmuls run in the
    LM head's dtype, softmax and smooth-L1 in fp32 (fp64 where their inputs are), under autocast too. Gradients flow to
    `draft_hidden` alone, and none is formed where none is wanted. `chunk_rows` trades memory for speed; None is what
    was measured to be fast.
    """
    assert draft_hidden.shape == target_hidden.shape, (draft_hidden.shape, target_hidden.shape)
    assert not target_hidden.requires_grad, "the target is frozen"
    assert not lm_head.weight.requires_grad, "the LM head is frozen"
    rows, width = draft_hidden.shape
    chunk_rows = chunk_rows or default_chunk_rows(len(lm_head.weight))
    with_gradient = torch.is_grad_enabled() and draft_hidden.requires_grad
    with torch.autocast(draft_hidden.device.type, enabled=False):
        exact = torch.promote_types(draft_hidden.dtype, torch.float32)
        l1 = F.smooth_l1_loss(draft_hidden.to(exact), target_hidden.to(exact), reduction="sum") / width
        on_logits, ce, agree = ChunkedLogitsLoss.apply(
            draft_hidden, target_hidden, lm_head, logits_loss, chunk_rows, with_gradient
        )
    loss = scale * (l1_weight * l1 + ce_weight * on_logits)
    return LossSums(loss, l1.detach(), ce.detach(), agree, rows)


def default_chunk_rows(vocab_size: int) -> int:
    """Rows of a chunk, a multiple of 64 where there is room: a GPU's matmul works in tiles of as many."""
    rows = max(1, min(CHUNK_ROWS, CHUNK_LOGITS // vocab_size))
    return rows // 64 * 64 or rows


class ChunkedLogitsLoss(torch.autograd.Function):
    """Sums over rows: the loss, CE(softmax(z_t), log_softmax(z_d)), and whether both logits have the same argmax.

    The gradient for the draft's hidden states is formed in the forward, chunk by chunk, while the chunk's probabilities
    exist; the backward only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        draft: torch.Tensor,
        target: torch.Tensor,
        head: LMHead,
        kind: str,
        chunk_rows: int,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(draft) if with_gradient else None
        buffers = chunk_buffers(head, min(chunk_rows, len(draft)))
        loss, total_ce = buffers[-1].new_zeros(()), buffers[-1].new_zeros(())
        agree = torch.zeros((), dtype=torch.int64, device=draft.device)
        for start in range(0, len(draft), chunk_rows):
            rows = slice(start, start + chunk_rows)
            used = raw, p, z, q = [buffer[: len(draft[rows])] for buffer in buffers]
            ce, same = cross_entropy(draft[rows], target[rows], head, *used)
            total_ce += ce.sum()
            loss += lk_gradient(ce, p, q) if kind == "lk" else ce_gradient(ce, p, q)
            agree += same.sum()
            if gradient is not None:
                gradient[rows] = hidden_gradient(head, raw, z, q)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(total_ce, agree)
        return loss, total_ce, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None


def chunk_buffers(head: LMHead, rows: int) -> list[torch.Tensor]:
    """`raw` for what goes through matmuls, in their dtype; `p`, `z`, `q` for the softmax, in fp32 or more: [rows,V]."""
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
    """A chunk's cross-entropies and agreements, [C,1] each.

    Leaves the target's probabilities in `p`, the draft's in `q` and its logits in `z`. Each distribution costs one pass
    of exponentials: the draft's normaliser is read off its most likely token, whose probability is exp(0) / normaliser.
    """
    logits(target, head, raw, z)
    _, choice = row_max(z)
    torch.softmax(z, -1, out=p)
    logits(draft, head, raw, z)
    peak, guess = row_max(z)
    expected = torch.sub(z, peak, out=q).mul_(p).sum(-1, keepdim=True)  # no term is positive, so nothing cancels
    torch.softmax(z, -1, out=q)
    log_normaliser = -q.gather(-1, guess).log()
    return log_normaliser - expected, choice == guess


def ce_gradient(ce: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chunk's cross-entropy; its gradient for the draft's logits replaces `q`."""
    q -= p
    return ce.sum()


def lk_gradient(ce: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chunk's LK loss; its gradient for the draft's logits replaces `q`.

    A row's acceptance at temperature 1 is a = sum(min(p, q)); its loss is w * CE + (1 - w) * (1 - a). The weight
    w = exp(-LK_RATE * a) is held constant: where nothing is accepted, 1 - a has no slope to follow. The source takes
    the mean acceptance of a batch for a; a row's own does not depend on how rows are split over chunks and ranks.
    """
    accepted = torch.minimum(p, q).sum(-1, keepdim=True)
    weight = torch.exp(-LK_RATE * accepted)
    loss = (weight * ce + (1 - weight) * (1 - accepted)).sum()
    below = (q < p).to(q.dtype)  # where more probability would be accepted
    gained = (q * below).sum(-1, keepdim=True)
    below.sub_(gained).mul_(1 - weight)  # the slope of a, but for the factor q
    q.mul_(below.neg_().add_(weight)).addcmul_(p, -weight.expand_as(p))
    return loss


def hidden_gradient(head: LMHead, raw: torch.Tensor, z: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The gradient [C,H] for the draft's hidden states, from that for its logits; uses up all three buffers."""
    if head.softcap is not None:  # softcap * tanh(x / softcap) has the slope 1 - tanh(x / softcap)^2
        slope.addcmul_(slope, z.div_(head.softcap).square_(), value=-1)
    raw.copy_(slope)
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
    """Each row's maximum and where it first occurs, [C,1] each: `x.max(-1)`, which is 5 times slower on a CPU."""
    size = x.shape[-1]
    width = min(BLOCK, size)
    blocks = x.unfold(-1, width, width).amax(-1)
    last = x[:, -width:].amax(-1, keepdim=True)  # may overlap: the columns that fill no block are in no other
    first = torch.cat([blocks, last], -1).argmax(-1, keepdim=True)
    start = (first * width).clamp(max=size - width)
    value, offset = x.gather(-1, start + torch.arange(width, device=x.device)).max(-1, keepdim=True)
    return value, start + offset
