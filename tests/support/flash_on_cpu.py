"""A stand-in for torch's CUDA flash attention on the CPU, behind the same operator: its arguments' meaning, in float64.

It takes what the kernel takes and refuses what the kernel refuses: packed sequences, heads in groups, causality from
the last key back, windows, keys used of each sequence; a query without keys has output 0 and log-sum-exp +inf. Torch's
own formula asks for its gradients.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from eagle_train.ops import flash


def check_arguments(q, k, v, starts_q, starts_k, longest_q, longest_k, used) -> None:
    """What the kernel's host code raises for, and what it reads or writes out of bounds for."""
    width = q.shape[-1]
    assert q.ndim == k.ndim == v.ndim == 3
    assert k.shape == v.shape
    assert k.shape[-1] == width
    assert width % 8 == 0
    assert width <= 256
    assert q.shape[1] % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    given = [x for x in (starts_q, starts_k, used) if x is not None]
    assert all(x.dtype == torch.int32 and x.is_contiguous() and x.ndim == 1 for x in given)
    assert len(starts_q) == len(starts_k)
    queries = starts_q.diff()
    assert starts_q[0] == 0
    assert starts_q[-1] == len(q)
    assert queries.min() >= 0
    assert queries.max() <= longest_q
    assert longest_q > 1 or len(starts_q) - 1 == len(q)
    keys = starts_k.diff() if used is None else used
    assert used is None or len(used) == len(queries)
    assert keys.min() >= 0
    assert keys.max() <= longest_k
    assert not ((starts_k[:-1] + keys > len(k)) & (keys > 0)).any()


def pieces(q, k, starts_q, starts_k, causal, scale, left, right, used) -> Iterator:
    """Of each sequence: its queries and its keys as slices, and scores [Q, queries, keys], -inf where unseen."""
    keys = starts_k.diff() if used is None else used
    for start, end, first, count in zip(
        *(x.tolist() for x in (starts_q[:-1], starts_q[1:], starts_k[:-1], keys)), strict=True
    ):
        mine, theirs = slice(start, end), slice(first, first + count)
        grouped = k[theirs].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("thd,shd->hts", q[mine], grouped) * scale
        ahead = torch.arange(count) - (torch.arange(end - start) + count - (end - start)).unsqueeze(1)
        unseen = torch.zeros_like(ahead, dtype=torch.bool)
        if causal or right >= 0:
            unseen |= ahead > max(right, 0)
        if left >= 0:
            unseen |= ahead < -left
        yield mine, theirs, scores.masked_fill(unseen, -math.inf)


def forward(
    q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, seqused_k=None, **newer,
):  # fmt: skip
    assert not any(value is not None for value in newer.values())
    assert dropout == 0
    assert not debug
    check_arguments(q, k, v, starts_q, starts_k, longest_q, longest_k, seqused_k)
    calls.append((longest_q, longest_k))
    limits = starts_q, starts_k, causal, scale, window_size_left, window_size_right, seqused_k
    out, lse = torch.empty(q.shape).double(), torch.empty(q.shape[1], len(q))
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    for mine, theirs, scores in pieces(q.double(), k.double(), *limits):
        total = scores.logsumexp(-1)
        lse[:, mine] = total.masked_fill(total == -math.inf, math.inf)
        out[mine] = torch.einsum("hts,shd->thd", (scores - lse[:, mine].double().unsqueeze(2)).exp(), values[theirs])
    state = torch.zeros(2, dtype=torch.uint64)
    return out.to(q.dtype), lse, state, state[0].clone(), q.new_empty(0)


def backward(
    grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, dropout, causal, state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    given, groups = (grad, q, k, v, out), q.shape[1] // k.shape[1]
    grad, q, k, v, out = (x.double() for x in given)
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (q, k, v))
    limits = starts_q, starts_k, causal, scale, window_size_left, window_size_right, None
    for mine, theirs, scores in pieces(q, k, *limits):
        weights = (scores - lse[:, mine].double().unsqueeze(2)).exp()
        grouped_k, grouped_v = (x[theirs].repeat_interleave(groups, dim=1) for x in (k, v))
        per_weight = torch.einsum("thd,shd->hts", grad[mine], grouped_v)
        per_score = weights * (per_weight - (grad[mine] * out[mine]).sum(-1).t().unsqueeze(2)) * scale
        of_q[mine] = torch.einsum("hts,shd->thd", per_score, grouped_k)
        of_k[theirs] = torch.einsum("hts,thd->shd", per_score, q[mine]).unflatten(1, (-1, groups)).sum(2)
        of_v[theirs] = torch.einsum("hts,thd->shd", weights, grad[mine]).unflatten(1, (-1, groups)).sum(2)
    return tuple(x.to(like.dtype) for x, like in zip((of_q, of_k, of_v), given[1:4], strict=True))


calls: list[tuple[int, int]] = []
"""`longest_q` and `longest_k` of every call of the kernel."""


@contextmanager
def flash_on_cpu() -> Iterator[list[tuple[int, int]]]:
    """The CPU passes for a GPU whose kernel takes fp32 and fp64 too. Gives `calls`, empty."""
    calls.clear()
    dtypes = (*flash.DTYPES, torch.float32, torch.float64)
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        patch.object(flash, "runs_on", lambda device: True),
        patch.object(flash, "DTYPES", dtypes),
    ):
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls
