"""Attention of few queries over slots that are read through a block table, and writes of new ones, by Triton kernels
on a GPU.

Each slot of a row is read once for all queries of a key/value head, where it lies: no copy is made, and slots behind
a query's end cost nothing, however wide the table. A row's slots are divided among the GPU's processors (split-KV,
flash decoding), and a second kernel merges the parts by log-sum-exp. The plain twin gathers the slots and attends by
ops/attention.py. Knows nothing of rules beyond the slots that each query sees, of caches or of requests.
"""

from functools import cache
from typing import Any

import torch

from eagle_train.hardware import current, is_gpu
from eagle_train.ops.kernels import is_plain, starts_triton

__all__ = ["paged_attention", "supports", "write", "writes"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_QUERIES = 256  # of a key/value head and row; beyond, a prompt is read, and its keys may be gathered
_LEAST_QUERIES, _TILE = 16, 64  # of a program: the matrix unit's least, and the most that a program's registers hold
_SLOTS, _MANY_SLOTS = 64, 128  # read at a time; the second where the GPU is not full, and has room for them
_PROGRAMS = 528  # to keep the 132 processors of a large GPU busy, four each
_LEAST_SLOTS = 128  # of a split
_MERGED = 32  # splits at a time
_MOST_BYTES = 256  # of a key: with _MANY_SLOTS a program takes 72 KiB, and some GPUs have no more than 99
_LANES = 1024  # numbers of a token that are written at a time


def supports(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `paged_attention` takes queries [A, Q, T, D] and stores [slots, K, D] of these devices and sizes."""
    if not _runs_on(q.device) or is_plain("attention"):  # first: a CPU asks in every layer
        return False
    widths = {keys.shape[-1], values.shape[-1]}
    queries = q.shape[1] // keys.shape[1] * q.shape[2]
    fits = all(width in (16, 32, 64, 128, 256) for width in widths) and queries <= MOST_QUERIES
    one_dtype = q.dtype in DTYPES and q.dtype == keys.dtype == values.dtype
    return fits and one_dtype


@cache
def _runs_on(device: torch.device) -> bool:
    return is_gpu(device, (8, 0)) and starts_triton()


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    block: int,
    first: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [A, Q, T, D] over stores `keys` [slots, K, D] and `values` [slots, K, D'], with its log-sum-exp.

    `table` int64 [A, W]: the blocks of each row, of `block` slots. Query t of row a sees the row's slots from
    `first[a, t]` up to, and without, `ends[a, t]`, both int32 [A, T], and no others are read but those of a row's
    other queries. Returns [A, Q, T, D'] in q's dtype and fp32 [A, Q, T], each token's heads side by side; a query that
    sees no slot has output 0 and log-sum-exp -inf. The host waits for nothing, and shapes alone decide what is
    launched.
    """
    (rows, heads, tokens, width), kv_heads, out_width = q.shape, keys.shape[1], values.shape[2]
    assert q.stride(3) == table.stride(1) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    group = heads // kv_heads
    queries = max(_LEAST_QUERIES, min(_most_queries(keys, values), 1 << (tokens * group - 1).bit_length()))
    tiles = -(-tokens * group // queries)
    has_room = queries == _LEAST_QUERIES and max(width, out_width) * keys.itemsize <= _MOST_BYTES
    splits, at_a_time = _division(rows * kv_heads * tiles, table.shape[1] * block, has_room)
    parts = q.new_empty(rows, tokens, heads, splits, out_width, dtype=q.dtype if splits == 1 else torch.float32)
    part_lse = q.new_empty(rows, tokens, heads, splits, dtype=torch.float32)
    attend_split, *_ = _kernels()
    with current(q.device):
        attend_split[(rows * kv_heads, splits, tiles)](
            q,
            keys,
            values,
            table,
            first.contiguous(),
            ends.contiguous(),
            parts,
            part_lse,
            *q.stride()[:3],
            table.stride(0),
            scale,
            1.0 if softcap is None else softcap,
            tokens,
            splits,
            GROUP=group,
            KV_HEADS=kv_heads,
            KEY_WIDTH=width,
            VALUE_WIDTH=out_width,
            BLOCK=block,
            QUERIES=queries,
            SLOTS=at_a_time,
            HAS_CAP=softcap is not None,
            IN_FP32=q.device.type == "cpu",  # Triton's interpreter has no products of bf16
            num_warps=4,
            num_stages=2 if width * keys.itemsize <= _MOST_BYTES else 1,
        )
    out, lse = (parts.squeeze(3), part_lse.squeeze(3)) if splits == 1 else _merged(parts, part_lse, q.dtype)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _most_queries(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Of a program. In fp32 fewer: 64 queries of 128 numbers take 112 KiB on GPUs of 8.6 and 8.9."""
    if keys.itemsize < 4:
        return _TILE
    return _TILE // 2 if max(keys.shape[-1], values.shape[-1]) <= 128 else _LEAST_QUERIES


def writes(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `write` takes stores of these devices."""
    return _runs_on(keys.device) and keys.is_contiguous() and values.is_contiguous() and not is_plain("attention")


def write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write k [A, K, T, D] and v [A, K, T, D'] into slots int64 [A, T] of stores `keys` [S, K, D] and `values`
    [S, K, D'], in their dtype. What two tokens write into one slot may be either's. The host waits for nothing."""
    (rows, heads, tokens, width), out_width = k.shape, v.shape[3]
    lanes = 1 << (heads * max(width, out_width) - 1).bit_length()
    *_, write_slots = _kernels()
    with current(keys.device):
        write_slots[(tokens, rows)](
            k,
            v,
            keys,
            values,
            slots.contiguous(),
            *k.stride(),
            *v.stride(),
            HEADS=heads,
            KEY_WIDTH=width,
            VALUE_WIDTH=out_width,
            LANES=min(lanes, _LANES),
            num_warps=4,
        )


def _merged(parts: torch.Tensor, part_lse: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention [A, T, Q, D'] in `dtype` and its log-sum-exp from the splits' [A, T, Q, splits, D']."""
    *queries, splits, width = parts.shape
    out, lse = parts.new_empty(*queries, width, dtype=dtype), part_lse.new_empty(queries)
    _, merge_splits, _ = _kernels()
    with current(parts.device):
        merge_splits[(lse.numel(),)](parts, part_lse, out, lse, splits, VALUE_WIDTH=width, LANES=_MERGED, num_warps=4)
    return out, lse


def _division(programs: int, slots: int, has_room: bool) -> tuple[int, int]:
    """Into how many parts each row's slots are divided, as many as keep a GPU busy and none too short; and how many
    slots are read at a time. `has_room`: for the greater number of them."""
    most = max(1, _PROGRAMS // programs)
    is_full = slots // _MANY_SLOTS >= most
    splits = max(1, min(most, slots // _LEAST_SLOTS))
    return splits, _MANY_SLOTS if has_room and not is_full else _SLOTS


@cache
def _kernels() -> tuple[Any, Any, Any]:
    """Triton is imported when a GPU needs it: a CPU's installation may have none."""
    from eagle_train.ops.paged_kernel import attend_split, merge_splits, write_slots

    return attend_split, merge_splits, write_slots
