"""Torch's own flash attention kernel (FlashAttention-2, arXiv 2307.08691) on CUDA, with its log-sum-exp.

Sequences lie one behind another, and any may read its keys anywhere, as one run: documents of packed rows, or a row's
slots. Keys in blocks that do not follow one another are gathered into a copy first, for each layer
(inference/cache/paged_kv.py); for few queries paged.py spares that copy. Knows nothing of rules or caches.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eagle_train.hardware import is_gpu
from eagle_train.ops.kernels import is_plain
from eagle_train.ops.torch_private import flash_attention_varlen, flash_gradients_varlen

DTYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 256  # head, in numbers
MAX_SEQUENCES = 65535  # sequences of a call: a CUDA grid has no more blocks in that direction


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU that torch's kernel was written for: Ampere or newer."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return is_gpu(device, (8, 0))


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attention` takes queries, keys and values of these devices, dtypes and widths [..., D]."""
    if not runs_on(q.device) or is_plain("attention"):  # first: a CPU asks in every layer
        return False
    width = max(q.shape[-1], v.shape[-1])
    return width % 8 == 0 and width <= MAX_WIDTH and q.dtype in DTYPES and q.dtype == k.dtype == v.dtype


def pad_to_one_width(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values with zeros behind the narrower ones: no score changes, nor what values hold."""
    widths = {x.shape[-1] for x in tensors}
    if len(widths) == 1:
        return list(tensors)
    widest = max(widths)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


class Sequences(NamedTuple):
    """Which tokens of [B, heads, T or S, D], counted through all rows, are a sequence's, and what its queries see.

    `starts_q`, `starts_k` int32 [sequences + 1]: where a sequence begins, and the next one. `used` int32 [sequences]:
    how many keys it has from its start on, wherever the next begins; then there is no gradient. None has more than
    `longest_q` queries or `longest_k` keys. `causal`: its last query sees up to its last key, the query before it up to
    the key before that, and so on; with a `window` the last so many of these alone.
    """

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int
    used: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the sequences' queries in q [B,Q,T,D] over their keys in k, v [B,K,S,D], which `supports` approves;
    values may be wider or narrower.

    Returns [B,Q,T,D] of the values' width and the log-sum-exp [B,Q,T] in fp32, which has no gradient; a query without
    keys has output 0 and log-sum-exp -inf. The host waits for nothing.
    """
    batch, _, length, _ = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out, lse = flat_attention(flat_q, flat_k, flat_v, sequences, scale)
    lse = lse.masked_fill(lse == math.inf, -math.inf)  # what the kernel says of a query without keys
    return out.unflatten(0, (batch, length)).transpose(1, 2), lse.unflatten(1, (batch, length)).transpose(0, 1)


def flat_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention`, of q [C,Q,D], k [S,K,D] and v [S,K,E]: the output [C,Q,E], and the log-sum-exp [Q,C] in fp32,
    +inf for a query without keys.
    """
    own = sequences
    wide_q, wide_k, wide_v = pad_to_one_width(q, k, v)
    out, lse = flash_attention_varlen(
        wide_q,
        wide_k,
        wide_v,
        own.starts_q,
        own.starts_k,
        own.longest_q,
        own.longest_k,
        own.causal,
        scale,
        own.window,
        own.used,
    )
    return out[..., : v.shape[-1]], lse


def flat_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `flat_attention`'s q, k and v, in their dtypes, where `grad` [C,Q,E] is the output's.

    `out` [C,Q,E] and `lse` [Q,C] are those of all that a query attends to, which may be more than these sequences.
    """
    own = sequences
    wide_grad, wide_q, wide_k, wide_v, wide_out = (x.contiguous() for x in pad_to_one_width(grad, q, k, v, out))
    of_q, of_k, of_v = flash_gradients_varlen(
        wide_grad,
        wide_q,
        wide_k,
        wide_v,
        wide_out,
        lse.contiguous(),
        own.starts_q,
        own.starts_k,
        own.longest_q,
        own.longest_k,
        own.causal,
        scale,
        own.window,
    )
    return of_q[..., : q.shape[-1]], of_k[..., : k.shape[-1]], of_v[..., : v.shape[-1]]
