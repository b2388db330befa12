"""The distillation loss: smooth-L1 on hidden states, cross-entropy against the target's distribution. DESIGN 3.2.

Instead of the cross-entropy, the LK loss (arXiv 2602.23881), which optimises the acceptance rate. Sums over supervised
rows, which the caller has selected and counted. Of models it knows the frozen LM head's four fields; of data and ranks
nothing. Source: the paper, section 2.1.

Shapes: R rows, C rows of a chunk or of a block of it, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eagle_train.models.target import LMHead
from eagle_train.ops import fused_loss

# Rows whose products exist at once: enough for a fast matmul, few enough for memory. Median time on one core in bf16,
# forward and backward, for chunks of 64, 128, 256, 512, 1024 rows:
#   2,048 rows x  32,000 x 512: 1020, 858, 756, 747, 813 ms (581 of them products)
#     512 rows x 128,256 x 512: 1016, 790, 757, 863 ms (577)
_CHUNK_ROWS = 256
_CHUNK_LOGITS = 2**25  # 64 MiB in bf16, of each model
# On a GPU: 1,024 rows give each of 132 processors a tile of the gradient's product of 4,096 columns.
_GPU_CHUNK_ROWS = 1024
_GPU_CHUNK_LOGITS = 2**28
# Logits that go through softmax and the gradient together, to stay in a CPU's caches: 2**17, 18, 19, 20 took 773, 719,
# 696 and 715 ms for the first line's work, a whole chunk 772.
_BLOCK_LOGITS = 2**19  # 2 MiB in fp32
_STRIPE = 256  # columns, see _row_max
LOGITS_LOSSES = ("ce", "lk")
LEARNT_LOGITS = {"soft": "ce", "hard": "hard", "lk": "lk"}  # `loss` of kinds that learn logits alone, as `kind` here
_MAX_WORKERS = 2  # threads that may share the chunks
RunParallel = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Lesson:
    """The settings of `train` that a loss may read, with their defaults. `run_parallel`: see `distillation_loss`."""

    l1_weight: float = 1.0
    ce_weight: float = 0.1
    logits_loss: str = "ce"
    run_parallel: RunParallel = lambda work: work()


@dataclass(frozen=True)
class LossSums:
    """Call backward on `loss`. The others are detached sums over `rows` rows, on their device."""

    loss: torch.Tensor  # fp32 scalar: scale * (l1_weight * l1 + ce_weight * (ce or lk))
    l1: torch.Tensor | None  # fp32 scalar: smooth-L1, its mean over H; None: of a draft that regresses nothing
    ce: torch.Tensor  # fp32 scalar: cross-entropy in nats
    agree: torch.Tensor  # int64 scalar: rows in which draft and target have the same most likely token
    rows: int

    @property
    def figures(self) -> dict[str, torch.Tensor]:
        """The sums by the names that records have for them, but the loss."""
        regression = {} if self.l1 is None else {"l1": self.l1}
        return regression | {"ce": self.ce, "top1_agreement": self.agree}


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
    run_parallel: RunParallel = lambda work: work(),
) -> LossSums:
    """The loss of draft_hidden [R,H] against target_hidden [R,H], supervised rows only; R may be 0.

    `scale`: one over the number of supervised rows of the whole step (all micro-batches, all ranks), so that the
    gradients of several calls add up to those of one. `logits_loss`: ce, or lk (see `_lk_gradient`). Products are in
    the LM head's dtype, softmax and smooth-L1 in fp32 (fp64 for fp64 inputs), under autocast too. Gradients flow to
    `draft_hidden` only, and are computed only if it requires one. `chunk_rows` trades memory for speed; None is the
    fastest measured. `run_parallel(work)` runs `work`, which computes chunks until none is left, in one thread or in
    several at once (`Lookahead.run_parallel`); the sums do not depend on it.
    """
    assert draft_hidden.shape == target_hidden.shape, (draft_hidden.shape, target_hidden.shape)
    assert not target_hidden.requires_grad, "the target is frozen"
    assert not lm_head.weight.requires_grad, "the LM head is frozen"
    rows, width = draft_hidden.shape
    with torch.autocast(draft_hidden.device.type, enabled=False):
        exact = torch.promote_types(draft_hidden.dtype, torch.float32)
        l1 = F.smooth_l1_loss(draft_hidden.to(exact), target_hidden.to(exact), reduction="sum") / width
    on_logits, ce, agree = chunked_logits_loss(
        draft_hidden, target_hidden, lm_head, logits_loss, chunk_rows=chunk_rows, run_parallel=run_parallel
    )
    loss = scale * (l1_weight * l1 + ce_weight * on_logits)
    return LossSums(loss, l1.detach(), ce.detach(), agree, rows)


def chunked_logits_loss(
    draft_hidden: torch.Tensor,
    target_hidden: torch.Tensor,
    lm_head: LMHead,
    kind: str,
    *,
    chunk_rows: int | None = None,
    run_parallel: RunParallel = lambda work: work(),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part of `distillation_loss` on logits: sums over the rows R, scalars, of the loss of this `kind` (see
    `loss_on_logits`), fp32 (fp64 for an fp64 head), of the cross-entropy in nats, and of the rows in which both have
    the same most likely token, int64. The first alone has a gradient."""
    chunk_rows = chunk_rows or default_chunk_rows(len(lm_head.weight), draft_hidden.device.type)
    with_gradient = torch.is_grad_enabled() and draft_hidden.requires_grad
    with torch.autocast(draft_hidden.device.type, enabled=False):
        return _ChunkedLogitsLoss.apply(
            draft_hidden, target_hidden, lm_head, kind, chunk_rows, with_gradient, run_parallel
        )


def default_chunk_rows(vocab_size: int, device: str) -> int:
    """Rows of a chunk on cpu or cuda, a multiple of 64 if the vocabulary allows it: products work in tiles of 64."""
    most, logits = (_CHUNK_ROWS, _CHUNK_LOGITS) if device == "cpu" else (_GPU_CHUNK_ROWS, _GPU_CHUNK_LOGITS)
    rows = max(1, min(most, logits // vocab_size))
    return rows // 64 * 64 or rows


class _ChunkedLogitsLoss(torch.autograd.Function):
    """Sums over rows: the loss, CE(softmax(z_t), log_softmax(z_d)), and whether both logits have the same argmax.

    The gradient for the draft's hidden states is computed in the forward, chunk by chunk, while the chunk's logits
    exist; the backward only scales it. Products are computed for a chunk, softmax and gradient for a block of it.
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
        run_parallel: RunParallel,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(draft) if with_gradient else None
        chunk_rows = max(1, min(chunk_rows, len(draft)))
        starts = range(0, len(draft), chunk_rows)
        left = iter(starts)  # each start goes to one of the threads
        sums: dict[int, torch.Tensor] = {}
        # Allocated in this thread: another thread's allocator returns memory to the kernel each time.
        spare = [Buffers(head, chunk_rows, kind) for _ in range(_MAX_WORKERS if draft.device.type == "cpu" else 1)]

        @torch.no_grad()  # each thread has its own setting
        def work() -> None:
            buffers = spare.pop()
            for start in left:
                rows = slice(start, start + chunk_rows)
                slope = None if gradient is None else gradient[rows]
                sums[start] = _chunk_loss(draft[rows], target[rows], head, kind, slope, buffers)

        run_parallel(work)
        none = torch.zeros(3, dtype=torch.float64, device=draft.device)
        loss, ce, agree = torch.stack([none, *(sums[start] for start in starts)]).sum(0).unbind()
        exact = exact_dtype(head)
        loss, ce, agree = loss.to(exact), ce.to(exact), agree.long()
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ce, agree)
        return loss, ce, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None, None


class Buffers:
    """A thread's memory: both models' products of a chunk, and, if these are in low precision, a block's logits.

    Products in fp32 or fp64 are turned into softmax and gradient in place, and any by the fused kernel.
    """

    def __init__(self, head: LMHead, chunk_rows: int, kind: str):
        weight, exact = head.weight, exact_dtype(head)
        vocab_size = len(weight)
        self.products = weight.new_empty(2 * chunk_rows, vocab_size)
        # A block fits in a CPU's caches. A GPU computes the whole chunk at once.
        block_rows = _BLOCK_LOGITS // vocab_size if weight.device.type == "cpu" else chunk_rows
        self.block_rows = max(1, min(chunk_rows, block_rows))

        is_fused = is_fused_loss(self.products, kind)

        def block(needed: bool) -> torch.Tensor | None:
            needed = needed and not is_fused
            return weight.new_empty(self.block_rows, vocab_size, dtype=exact) if needed else None

        self.of_target, self.of_draft = block(weight.dtype != exact), block(weight.dtype != exact)
        self.capped = block(head.softcap is not None)  # the cap's slope needs the draft's logits


def exact_dtype(head: LMHead) -> torch.dtype:
    """The dtype of softmax and sums: fp32, or fp64 where the head's is."""
    return torch.promote_types(head.weight.dtype, torch.float32)


def _chunk_loss(
    draft: torch.Tensor, target: torch.Tensor, head: LMHead, kind: str, gradient: torch.Tensor | None, buffers: Buffers
) -> torch.Tensor:
    """A chunk's sums, fp64 [3]: the loss, the cross-entropy, the agreements. Fills `gradient` [C,H] if given."""
    of_target, of_draft = _products(target, draft, head, buffers.products)
    sums = loss_on_logits(of_target, of_draft, head, kind, gradient is not None, buffers)
    if gradient is not None:
        gradient.copy_(torch.mm(of_draft, head.weight).mul_(head.scale))
    return sums


def is_fused_loss(logits: torch.Tensor, kind: str) -> bool:
    """Whether one kernel turns such logits into the loss."""
    return kind != "hard" and fused_loss.supports(logits)


def loss_on_logits(
    of_target: torch.Tensor, of_draft: torch.Tensor, head: LMHead, kind: str, with_gradient: bool, buffers: "Buffers"
) -> torch.Tensor:
    """A chunk's sums, fp64 [3]: the loss, the cross-entropy, the agreements, from both models' products [C,V], which
    are overwritten: with a gradient, the draft's by the loss's gradient for (product + bias) * scale.

    `kind`: ce, lk (see `_lk_gradient`), or hard: the cross-entropy of the target's most likely token.
    """
    loss_of = _fused_loss if is_fused_loss(of_draft, kind) else _plain_loss
    return loss_of(of_target, of_draft, head, kind, with_gradient, buffers)


def _fused_loss(
    of_target: torch.Tensor, of_draft: torch.Tensor, head: LMHead, kind: str, with_gradient: bool, _: Buffers
) -> torch.Tensor:
    """`_plain_loss` by one kernel."""
    return fused_loss.fused_loss(
        of_target,
        of_draft,
        kind,
        bias=head.bias,
        scale=head.scale,
        softcap=head.softcap,
        with_gradient=with_gradient,
    )


def _plain_loss(
    of_target: torch.Tensor, of_draft: torch.Tensor, head: LMHead, kind: str, with_gradient: bool, buffers: Buffers
) -> torch.Tensor:
    """A chunk's sums, fp64 [3], from both models' products [C,V]. With a gradient, the draft's become the loss's
    gradient for what the cap is given."""
    sums = torch.zeros(3, dtype=torch.float64, device=of_draft.device)
    for block in (slice(first, first + buffers.block_rows) for first in range(0, len(of_draft), buffers.block_rows)):
        p = logits_of(of_target[block], head, buffers.of_target)
        q = logits_of(of_draft[block], head, buffers.of_draft)
        capped = None if buffers.capped is None else buffers.capped[: len(q)].copy_(q)
        ce, same = _cross_entropy(p, q)
        loss = _GRADIENTS[kind](ce, p, q)
        sums += torch.stack([loss, ce.sum(), same.sum()])
        if with_gradient:
            _before_cap(q, capped, head)
            if buffers.of_draft is not None:
                of_draft[block] = q
    return sums


def _products(
    target: torch.Tensor, draft: torch.Tensor, head: LMHead, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The LM head's products [C,V] with both, in its dtype. Computed as one product: more rows take less time each."""
    hidden = torch.cat((target.to(out.dtype), draft.to(out.dtype)))
    of_target, of_draft = torch.mm(hidden, head.weight.t(), out=out[: len(hidden)]).chunk(2)
    return of_target, of_draft


def _cross_entropy(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's cross-entropies and agreements, [C,1] each. Replaces logits by probabilities: the target's in `p`, the
    draft's in `q`.

    Each distribution costs one pass of exponentials: the draft's normaliser follows from its most likely token, whose
    probability is exp(0) / normaliser.
    """
    _, choice = _row_max(p)
    torch.softmax(p, -1, out=p)
    peak, guess = _row_max(q)
    q -= peak
    expected = torch.linalg.vecdot(p, q).unsqueeze(-1)  # no term is positive, so there is no cancellation
    torch.softmax(q, -1, out=q)
    log_normaliser = -q.gather(-1, guess).log()
    return log_normaliser - expected, choice == guess


def _ce_gradient(ce: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A block's cross-entropy. Replaces `q` by its gradient for the draft's logits."""
    q -= p
    return ce.sum()


def _lk_gradient(ce: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A block's LK loss. Replaces `q` by its gradient for the draft's logits.

    A row's acceptance at temperature 1 is a = sum(min(p, q)); its loss is w * CE + (1 - w) * (1 - a). The weight
    w = exp(-LK_RATE * a) counts as a constant: where nothing is accepted, 1 - a has no gradient. The source uses the
    mean acceptance of a batch for a; a row's own does not depend on how rows are split over chunks and ranks.
    """
    accepted = torch.minimum(p, q).sum(-1, keepdim=True)
    weight = torch.exp(-fused_loss.LK_RATE * accepted)
    loss = (weight * ce + (1 - weight) * (1 - accepted)).sum()
    below = (q < p).to(q.dtype)  # where more probability would be accepted
    gained = (q * below).sum(-1, keepdim=True)
    below.sub_(gained).mul_(1 - weight)  # the gradient of a, without its factor q
    q.mul_(below.neg_().add_(weight)).addcmul_(p, -weight.expand_as(p))
    return loss


def _hard_gradient(ce: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A block's cross-entropy of the target's most likely tokens. Replaces `q` by its gradient for the draft's
    logits."""
    _, best = _row_max(p)
    loss = -q.gather(-1, best).clamp_min_(torch.finfo(q.dtype).tiny).log_().sum()
    q.scatter_add_(-1, best, torch.full_like(best, -1, dtype=q.dtype))
    return loss


_GRADIENTS = {"ce": _ce_gradient, "lk": _lk_gradient, "hard": _hard_gradient}


def _before_cap(slope: torch.Tensor, capped: torch.Tensor | None, head: LMHead) -> None:
    """Turn the gradient [C,V] for logits into that for uncapped logits, in place. Overwrites `capped`."""
    if capped is not None:  # the derivative of softcap * tanh(x / softcap) is 1 - tanh(x / softcap)^2
        assert head.softcap is not None
        slope.addcmul_(slope, capped.div_(head.softcap).square_(), value=-1)


def logits_of(product: torch.Tensor, head: LMHead, out: torch.Tensor | None) -> torch.Tensor:
    """`head(hidden)` from its product, in `out` and its dtype, or in place of the product if that is None."""
    out = product if out is None else out[: len(product)].copy_(product)
    if head.bias is not None:
        out += head.bias
    if head.scale != 1.0:
        out *= head.scale
    if head.softcap is not None:
        out.div_(head.softcap).tanh_().mul_(head.softcap)
    return out


def _row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's maximum and its first column, [C,1] each: `x.max(-1)`, which takes 5 times as long on a CPU."""
    size = x.shape[-1]
    width = min(_STRIPE, size)
    blocks = x.unfold(-1, width, width).amax(-1)
    last = x[:, -width:].amax(-1, keepdim=True)  # covers the columns that fill no block; may overlap
    first = torch.cat([blocks, last], -1).argmax(-1, keepdim=True)
    start = (first * width).clamp(max=size - width)
    value, offset = x.gather(-1, start + torch.arange(width, device=x.device)).max(-1, keepdim=True)
    return value, start + offset
