"""Attention within the documents of packed rows and, beside it, to single keys and sinks, exact and in linear memory.

For the backward pass queries, keys, values, output and log-sum-exp are kept, and no scores. As in ring attention (arXiv
2310.01889) the attention of each query falls into parts whose outputs are merged by log-sum-exp; a part's backward
kernel that is given the output and the log-sum-exp of the whole returns the gradients of the whole. Parts are

- the documents: by torch's flash kernel on CUDA, all in one call; by the CPU's where it serves, one by one; else in
  tiles (ops/tiled.py), one by one;
- single keys: to each query one, some slots before it; elementwise;
- sinks: a logit for each head, without a value.

Knows nothing of rules or models. Shapes: B rows, T tokens, Q query heads, K key/value heads, G = Q / K, D head width, E
values' width, C queries of all documents together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eagle_train.ops import flash
from eagle_train.ops.kernels import is_plain
from eagle_train.ops.tiled import Scores, capped, exact_dtype, tiled_attention, tiled_gradients
from eagle_train.ops.torch_private import flash_attention_on_cpu, flash_gradients_on_cpu
from eagle_train.ops.transfer import to_device

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, or their gradients."""


class Piece(NamedTuple):
    """Slots [start, end) of these rows: in each row a document, or as much of one as a query can see."""

    rows: slice
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents lie in rows of T tokens, and which of a document's keys its queries see.

    A query sees the keys that are `behind` slots or more before it; the first `behind` queries of a piece see none.
    Made once for all layers of the same reach.
    """

    pieces: Sequence[Piece]
    behind: int = 0
    _places: dict[tuple, "_Places"] = field(default_factory=dict, init=False)

    @property
    def seeing(self) -> list[Piece]:
        """The pieces of which some query sees a key."""
        return [piece for piece in self.pieces if piece.end - piece.start > self.behind]

    def queries(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Those that see a key, of x [B, heads, T, ...]; `keys` has as many."""
        return x[piece.rows, :, piece.start + self.behind : piece.end]

    def keys(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Those that are seen."""
        return x[piece.rows, :, piece.start : piece.end - self.behind]

    def cut(self, piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Three:
        """A piece's queries, and as many keys and values."""
        return self.queries(q, piece), self.keys(k, piece), self.keys(v, piece)

    def places(self, batch: int, length: int, device: torch.device) -> "_Places":
        """Where B rows of T tokens have the queries and keys of all pieces. The host does not wait."""
        key = (batch, length, device)
        if key not in self._places:
            spans = [
                range(row * length + piece.start, row * length + piece.end - self.behind)
                for piece in self.seeing
                for row in range(*piece.rows.indices(batch))
            ]
            sizes = [len(span) for span in spans]
            with torch.inference_mode(False):  # training must be able to save what inference cached
                starts = to_device([0, *accumulate(sizes)], device, torch.int32)
                begins = to_device([span.start for span in spans], device, torch.int64)
                moved = (begins - starts[:-1]).repeat_interleave(starts.diff(), output_size=sum(sizes))
                keys = torch.arange(sum(sizes), device=device) + moved
            sequences = flash.Sequences(starts, starts, max(sizes), max(sizes), causal=True)
            self._places[key] = _Places(keys // length, keys % length + self.behind, keys % length, sequences)
        return self._places[key]


class _Places(NamedTuple):
    """For one call over all pieces: their rows and slots, int64 [C] each, and how they follow one another in C."""

    rows: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    sequences: flash.Sequences

    @property
    def slots(self) -> _Three:
        """For what queries have, what keys have and what values have."""
        return self.queries, self.keys, self.keys


class Beside(NamedTuple):
    """Single keys and values [B,K,T,D or E]: a query attends to the one `steps` slots before its own, if `seen`, bool
    [B,T], says so; where `steps` reach beyond the row's start, it does not.
    """

    k: torch.Tensor
    v: torch.Tensor
    steps: int
    seen: torch.Tensor


def document_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scores: Scores,
    sinks: torch.Tensor | None = None,
    beside: Sequence[Beside] = (),
) -> torch.Tensor:
    """Attention of q [B,Q,T,D] over k [B,K,T,D], v [B,K,T,E] within `documents`, and over what is `beside`: [B,Q,T,E].

    `sinks` [Q]; all have gradients. Softmax and merging are at least fp32; a query that sees no key has output 0.
    `scores.window` counts from the last key that a query sees in its document, and holds for the documents alone.
    """
    given = [x for single in beside for x in (single.k, single.v)]
    places = [(single.steps, single.seen) for single in beside]
    return _DocumentAttention.apply(documents, scores, places, sinks, q, k, v, *given)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        documents: Documents,
        scores: Scores,
        places: list[tuple[int, torch.Tensor]],
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *beside: torch.Tensor,
    ) -> torch.Tensor:
        out, lse = _attend(q, k, v, documents, scores)
        singles = [Beside(*pair, *place) for pair, place in zip(_pairs(beside), places, strict=True)]
        if singles or sinks is not None:
            out, lse = _merged(out, lse, q, singles, scores, sinks)
        ctx.documents, ctx.scores, ctx.places = documents, scores, places
        ctx.save_for_backward(sinks, q, k, v, out, lse, *beside)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        sinks, q, k, v, out, lse, *beside = ctx.saved_tensors
        scores = ctx.scores
        delta = (grad.to(lse.dtype) * out).sum(-1)
        of_q, of_k, of_v = _gradients(grad, q, k, v, out, lse, delta, ctx.documents, scores)
        of_beside: list[torch.Tensor] = []
        for pair, place in zip(_pairs(beside), ctx.places, strict=True):
            of_query, *of_pair = _single_gradients(grad, q, Beside(*pair, *place), lse, delta, scores)
            of_q[:, :, place[0] :] += of_query
            of_beside += of_pair
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            taken = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
            of_sinks = -(taken * delta).sum((0, 2)).to(sinks.dtype)
        return None, None, None, of_sinks, of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), *of_beside


def _pairs(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


# --- the parts merged


def _merged(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    singles: list[Beside],
    scores: Scores,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B,Q,T,E] and log-sum-exp [B,Q,T] of all parts, from those of the documents."""
    found = [_single_scores(q, single, scores) for single in singles]
    parts = [lse, *(F.pad(score, (lse.shape[2] - score.shape[2], 0), value=-math.inf) for score in found)]
    if sinks is not None:
        parts.append(sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse))
    total = torch.logsumexp(torch.stack(parts), dim=0)
    shift = total.masked_fill(total == -math.inf, 0.0)
    whole = out * (lse - shift).exp().unsqueeze(-1)
    for single, score in zip(singles, found, strict=True):
        weights = _late((score - shift[:, :, single.steps :]).exp().unsqueeze(-1), single.v)
        _late(whole[:, :, single.steps :], single.v).add_(weights * _early(single.v, single.steps))
    return whole.to(out.dtype), total


def _late(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What queries have, x [B,Q,N,...], with the heads of a group side by side: [B,K,G,N,...], a view."""
    return x.unflatten(1, (k.shape[1], -1))


def _early(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Keys or values [B,K,T,D] without the last `steps`: [B,K,1,N,D], for the queries from slot `steps` on."""
    return x[:, :, : max(0, x.shape[2] - steps)].unsqueeze(2)


def _single_scores(q: torch.Tensor, single: Beside, scores: Scores) -> torch.Tensor:
    """Scores [B,Q,N] of the queries from slot `steps` on, in at least fp32; -inf where the key is not seen."""
    return _raw_scores(q, single, scores).masked_fill_(~_seen(single), -math.inf)


def _seen(single: Beside) -> torch.Tensor:
    """bool [B,1,N]."""
    return single.seen[:, None, single.steps :]


def _raw_scores(q: torch.Tensor, single: Beside, scores: Scores) -> torch.Tensor:
    """As `_single_scores`, whether the key is seen or not."""
    queries = _late(q[:, :, single.steps :].to(exact_dtype(q)), single.k)
    return capped((queries * _early(single.k, single.steps)).sum(-1).flatten(1, 2).mul_(scores.scale), scores.softcap)


def _single_gradients(
    grad: torch.Tensor, q: torch.Tensor, single: Beside, lse: torch.Tensor, delta: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the queries from slot `steps` on [B,Q,N,D], in at least fp32, and of all keys and values."""
    steps, k, v = single.steps, single.k, single.v
    found = _raw_scores(q, single, scores)
    weights = (found - lse[:, :, steps:]).exp_().masked_fill_(~_seen(single), 0.0)
    given = _late(grad[:, :, steps:].to(weights.dtype), v)
    change = (given * _early(v, steps)).sum(-1).flatten(1, 2).sub_(delta[:, :, steps:]).mul_(weights)
    change.mul_(scores.scale)
    if scores.softcap is not None:
        change.mul_(1 - (found / scores.softcap).square_())
    changes = _late(change.unsqueeze(-1), k)
    of_q = (changes * _early(k, steps)).flatten(1, 2)
    of_k = (changes * _late(q[:, :, steps:], k)).sum(2)
    of_v = (_late(weights.unsqueeze(-1), v) * given).sum(2)
    return of_q, _at_the_start(of_k, k), _at_the_start(of_v, v)


def _at_the_start(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`part` [B,K,N,D] with zeros behind it, as large as `like` and in its dtype."""
    return F.pad(part.to(like.dtype), (0, 0, 0, like.shape[2] - part.shape[2]))


# --- the documents' part


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B,Q,T,E] and log-sum-exp [B,Q,T], in at least fp32; 0 and -inf where a query sees no key."""
    batch, heads, length, _ = q.shape
    out = v.new_zeros(batch, length, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_full((batch, heads, length), -math.inf, dtype=exact_dtype(q))
    if documents.seeing and scores.softcap is None and flash.supports(q, k, v):
        places = documents.places(batch, length, q.device)
        sequences = places.sequences._replace(window=scores.window)
        found, total = flash.flat_attention(*_gathered(places, q, k, v), sequences, scores.scale)
        out.transpose(1, 2)[places.rows, places.queries] = found
        lse.transpose(1, 2)[places.rows, places.queries] = total.t().to(lse.dtype)
        return out, lse
    for piece in documents.seeing:
        found, total = _attend_piece(*documents.cut(piece, q, k, v), scores)
        documents.queries(out, piece).copy_(found)
        documents.queries(lse, piece).copy_(total)
    return out, lse


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    documents: Documents,
    scores: Scores,
) -> _Three:
    """The gradients of q, k and v in the documents' part, in at least fp32. `out` and `lse` are those of all parts,
    `delta` [B,Q,T] is the sum over E of `out` times `grad`.
    """
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=exact_dtype(x)) for x in (q, k, v))
    results = of_q, of_k, of_v
    if documents.seeing and scores.softcap is None and flash.supports(q, k, v):
        places = documents.places(q.shape[0], q.shape[2], q.device)
        sequences = places.sequences._replace(window=scores.window)
        grads, outs, totals = (x.transpose(1, 2)[places.rows, places.queries] for x in (grad, out, lse))
        given = _gathered(places, q, k, v)
        found = flash.flat_gradients(grads, *given, outs, totals.t(), sequences, scores.scale)
        for result, slots, part in zip(results, places.slots, found, strict=True):
            result.transpose(1, 2)[places.rows, slots] = part.to(result.dtype)
        return results
    for piece in documents.seeing:
        grads, outs, totals, deltas = (documents.queries(x, piece) for x in (grad, out, lse, delta))
        found = _piece_gradients(grads, *documents.cut(piece, q, k, v), outs, totals, deltas, scores)
        for result, part in zip(documents.cut(piece, *results), found, strict=True):
            result.copy_(part)
    return results


def _gathered(places: _Places, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Three:
    """The queries, keys and values [C, heads, D or E] of all pieces."""
    flat_q, flat_k, flat_v = (
        x.transpose(1, 2)[places.rows, own] for x, own in zip((q, k, v), places.slots, strict=True)
    )
    return flat_q, flat_k, flat_v


def _on_cpus_kernel(q: torch.Tensor, scores: Scores) -> bool:
    """Whether the CPU's flash kernel takes these queries of a piece."""
    sees_all = scores.window is None or scores.window >= q.shape[2]
    return q.device.type == "cpu" and sees_all and scores.softcap is None and not is_plain("attention")


def _attend_piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention [A,Q,N,E] of a piece's queries over as many keys, and its log-sum-exp [A,Q,N]."""
    if not _on_cpus_kernel(q, scores):
        return tiled_attention(q, k, v, scores)
    wide_q, wide_k, wide_v = flash.pad_to_one_width(q, k, v)
    out, lse = flash_attention_on_cpu(wide_q, wide_k, wide_v, None, scores.scale, is_causal=True)
    return out[..., : v.shape[-1]], lse


def _piece_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scores: Scores,
) -> _Three:
    """As `_gradients`, of one piece."""
    if not _on_cpus_kernel(q, scores):
        return tiled_gradients(grad, q, k, v, lse, delta, scores)
    wide_grad, wide_q, wide_k, wide_v, wide_out = flash.pad_to_one_width(grad, q, k, v, out)
    of_q, of_k, of_v = flash_gradients_on_cpu(wide_grad, wide_q, wide_k, wide_v, wide_out, lse, scores.scale)
    return of_q[..., : q.shape[-1]], of_k[..., : k.shape[-1]], of_v[..., : v.shape[-1]]
