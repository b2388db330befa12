"""Causal attention in tiles of queries, for what no flash kernel takes: capped scores, windows on a CPU, sinks.

The scores of one tile exist at a time, of the keys that it can see alone. The backward pass computes them again from
the log-sum-exp, so memory is linear in the tokens. Knows nothing of rules, documents or autograd.

Shapes: A sequences of N tokens each, Q query heads, K key/value heads, G = Q / K, D head width, E values' width; a tile
has R queries that see S keys.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

TILE_SCORES = {"cpu": 2**20}  # numbers of a tile: a CPU's caches hold them
LARGE_TILE = 2**26  # elsewhere: they fill a GPU
MIN_ROWS = 64  # queries of a tile: with fewer, products are slow; so a tile's scores may grow with N, not with N * N


class Scores(NamedTuple):
    """How queries and keys become scores: softcap * tanh(s / softcap) of s = q k * scale where there is a cap.

    A query sees the last `window` keys up to its own; None: all of these.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


def exact_dtype(x: torch.Tensor) -> torch.dtype:
    """What scores, log-sum-exps and sums of gradients are kept in: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores under a cap. Changes `scores`."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [A,Q,N,D] over k [A,K,N,D], v [A,K,N,E]: [A,Q,N,E] in v's dtype, and its log-sum-exp
    [A,Q,N] in at least fp32. Products are computed in the dtypes of q and v, the softmax in at least fp32.
    """
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=exact_dtype(q))
    for rows, keys, mask in _tiles(q, scores.window):
        found, _ = _tile_scores(_folded(q[:, :, rows], k), k[:, :, keys], mask, scores)
        total = found.logsumexp(-1, keepdim=True)
        weights = found.sub_(total).exp_().to(v.dtype)
        out[:, :, rows] = _unfolded(weights.flatten(2, 3) @ v[:, :, keys], q)
        lse[:, :, rows] = total.squeeze(-1).flatten(1, 2)
    return out, lse


def tiled_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, in at least fp32, where `grad` [A,Q,N,E] is the output's.

    `lse` [A,Q,N] is the log-sum-exp of all that a query attends to, and `delta` [A,Q,N] the sum over E of the output
    times `grad`. If these keys are a part of what it attends to, both are those of the whole, and so is the output;
    the gradients are exact then too.
    """
    of_q = torch.empty_like(q, dtype=exact_dtype(q))
    of_k, of_v = (torch.zeros_like(x, dtype=exact_dtype(q)) for x in (k, v))
    for rows, keys, mask in _tiles(q, scores.window):
        queries, given = _folded(q[:, :, rows], k), _folded(grad[:, :, rows], k)
        found, slope = _tile_scores(queries, k[:, :, keys], mask, scores)
        per_query = (*found.shape[:-1], 1)
        weights = found.sub_(lse[:, :, rows].reshape(per_query)).exp_()  # 0 where a key is not seen
        of_v[:, :, keys] += weights.flatten(2, 3).to(v.dtype).transpose(-1, -2) @ given
        change = (given @ v[:, :, keys].transpose(-1, -2)).to(of_q.dtype).view_as(weights)
        change = change.sub_(delta[:, :, rows].reshape(per_query)).mul_(weights).mul_(scores.scale)
        change = (change if slope is None else change.mul_(slope)).flatten(2, 3).to(q.dtype)
        of_q[:, :, rows] = _unfolded(change @ k[:, :, keys], q)
        of_k[:, :, keys] += change.transpose(-1, -2) @ queries
    return of_q, of_k, of_v


def _tiles(q: torch.Tensor, window: int | None) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Of each tile: its queries, the keys that any of them sees, and which each sees, a mask [R, S] to add."""
    sequences, heads, length, _ = q.shape
    reach = length if window is None else min(length, 2 * window)  # a tile of `window` queries sees about so many keys
    rows = max(MIN_ROWS, TILE_SCORES.get(q.device.type, LARGE_TILE) // (sequences * heads * reach))
    rows = rows if window is None else min(rows, max(MIN_ROWS, window))
    for start in range(0, length, rows):
        end, first = min(start + rows, length), 0 if window is None else max(0, start - window + 1)
        places = torch.arange(first, end, device=q.device)
        back = places[start - first :].unsqueeze(1) - places  # how far before its query a key is
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        mask = torch.zeros(seen.shape, dtype=exact_dtype(q), device=q.device).masked_fill_(~seen, -math.inf)
        yield slice(start, end), slice(first, end), mask


def _folded(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """x [A,Q,R,D] as [A,K,G*R,D]: the heads of a group read the same keys, so one product serves them."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _unfolded(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`_folded` undone: [A,Q,R,D]."""
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)


def _tile_scores(
    queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [A,K,G,R,S] of folded queries, in at least fp32, under the mask; and how fast they grow with those before
    the cap, None for 1.
    """
    found = (queries @ keys.transpose(-1, -2)).to(exact_dtype(queries)).mul_(scores.scale)
    found = capped(found.unflatten(2, (-1, len(mask))), scores.softcap)
    slope = None if scores.softcap is None else 1 - (found / scores.softcap).square_()
    return found.add_(mask), slope
