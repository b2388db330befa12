"""The loss on logits and its gradient in one Triton kernel: a row of both models' logits is read twice, written once.

Of torch's operations, each of which reads and writes whole logits, the same takes eleven: 84 to 100 bytes a logit in
place of 10 (12 for LK). drafts/losses.py has the plain twin, and says what is computed. Knows nothing of hidden
states, LM heads or models.

Shapes: C rows, V vocabulary. A program computes one row, in blocks of columns; each of a block's lanes has running sums
of its own, which are put together at the row's end.
"""

from functools import cache
from typing import Any

import torch

from eagle_train.hardware import current
from eagle_train.ops.kernels import is_plain, starts_triton

__all__ = ["LK_RATE", "fused_loss", "supports"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LK_RATE = 3.0  # how fast the LK loss shifts from cross-entropy to acceptance as the acceptance grows
_BLOCK = 2048  # columns of a block: 8 for each of 256 threads, 16 bytes in bf16
_WARPS = 8


def supports(logits: torch.Tensor) -> bool:
    """Whether `fused_loss` takes logits of this device and dtype."""
    on_gpu = logits.device.type == "cuda" and not is_plain("loss")
    return on_gpu and logits.dtype in DTYPES and starts_triton()


def fused_loss(
    of_target: torch.Tensor,
    of_draft: torch.Tensor,
    kind: str,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> torch.Tensor:
    """A chunk's sums, fp64 [3]: the loss, the cross-entropy, and the rows whose logits have the same argmax.

    `of_target`, `of_draft` [C, V]: an LM head's products, each row's numbers side by side. A logit is
    (product + bias) * scale, and softcap * tanh(logit / softcap) of that where there is a cap. `kind`: ce or lk.
    `with_gradient`: `of_draft` is replaced by the gradient of the loss for (product + bias) * scale, in its dtype.
    Softmax and sums are fp32.
    """
    rows, vocabulary = of_draft.shape
    assert of_target.shape == of_draft.shape
    assert of_target.stride(1) == of_draft.stride(1) == 1
    sums = torch.empty(rows, 3, dtype=torch.float32, device=of_draft.device)
    block = min(_BLOCK, 1 << (vocabulary - 1).bit_length())
    with current(of_draft.device):
        _kernel()[(rows,)](
            of_target,
            of_draft,
            of_draft if bias is None else bias,
            sums,
            of_target.stride(0),
            of_draft.stride(0),
            scale,
            1.0 if softcap is None else softcap,
            VOCABULARY=vocabulary,
            HAS_BIAS=bias is not None,
            HAS_CAP=softcap is not None,
            IS_LK=kind == "lk",
            WITH_GRADIENT=with_gradient,
            LK_RATE=LK_RATE,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return sums.sum(0, dtype=torch.float64)


@cache
def _kernel() -> Any:
    """Triton is imported when a GPU needs it: a CPU's installation has none."""
    from eagle_train.ops.fused_loss_kernel import loss_of_row

    return loss_of_row
