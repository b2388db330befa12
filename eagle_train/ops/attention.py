"""Attention over packed documents, and over a prefix plus a tree. Knows nothing of models, caches or requests.

A model calls `attend(layer, q, k, v, rule)`; who calls the model decides what `attend` is: training packs documents
(`packed_attention`), the engine merges a cached prefix with a tree (`slot_attention`, `merge`; paper section 3.1).

Which way is taken; the first line that fits. "CUDA" is what ops/flash.py serves: bf16 or fp16, heads that fit.

    what                          where  rule                           way
    packed documents, prompts     CUDA   no softcap                     one flash kernel over all documents, cut where
                                                                        a chunk ends and behind skipped first slots
    packed documents, prompts     any    no softcap, sinks, window      torch's kernel or products, by document or chunk
    packed documents, prompts     any    any                            ops/documents.py, by document or chunk
    committed slots, few queries  CUDA   any                            through the block table (ops/paged.py)
    committed slots               CUDA   no softcap                     flash, a row's queries together, or each alone
    slots, nodes of a tree        CPU    no softcap, window or chunk    the CPU's flash kernel under a mask
    slots, nodes of a tree        any    any                            plain: a tree's nodes are few keys

Shapes: B batch, T new tokens, S keys, Q query heads, K key/value heads, G = Q / K, D head width.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from eagle_train.hardware import computes_bf16
from eagle_train.ops import flash
from eagle_train.ops.documents import Beside, Documents, Piece, document_attention
from eagle_train.ops.kernels import is_plain
from eagle_train.ops.rule import Attend, Rule, Uncompiled, additive_mask
from eagle_train.ops.threads import threads_for_keys
from eagle_train.ops.tiled import Scores
from eagle_train.ops.torch_private import flash_attention_on_cpu
from eagle_train.ops.transfer import to_device
from eagle_train.ops.visible_slots import VisibleSlots

MATMUL_LENGTH = 1024  # up to this length a document's scores may exist whole
FEW = 256  # queries times key/value heads: about two for each processor of a large GPU


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B,Q,T,D] over the keys k, v [B,K,S,D] with its log-sum-exp, sinks left out.

    `mask` is None or `additive_mask` (0 where a key is seen, -inf where not), [B or 1, 1, T or 1, S]. Returns [B,Q,T,D]
    and [B,Q,T]; a query that sees no key has output 0 and log-sum-exp -inf. Fast where the CPU's flash kernel serves.
    """
    # The kernel reports 0, not -inf, for a query without keys, so a local rule's masks go the plain way, and those that
    # skip several positions. Where the first alone is skipped, a query has its own key, a tree's more than one of the
    # prefix.
    sees_some = not rule.is_local and rule.skip_first <= 1
    if q.device.type == "cpu" and rule.softcap is None and sees_some and not is_plain("attention"):
        return flash_partial(q, k, v, mask, rule)
    return plain_partial(q, k, v, mask, rule)


def plain_partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain twin of `partial_attention`, for any device and rule; scores and softmax in at least fp32."""
    (batch, heads, length, _), groups = q.shape, q.shape[1] // k.shape[1]
    grouped = q.unflatten(1, (k.shape[1], groups))
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    blind = (scores == -math.inf).all(-1, keepdim=True)  # a query without keys, whose gradient would be NaN
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1, keepdim=True).masked_fill(blind, -math.inf)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    out = weights.to(v.dtype) @ v.unsqueeze(2)
    return out.reshape(batch, heads, length, v.shape[-1]), lse.reshape(batch, heads, length)


def flash_partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`partial_attention` by the CPU's flash kernel; every query must see a key."""
    shape, width = q.shape[:-1], v.shape[-1]
    if mask is None or mask.shape[2] == 1:  # a group's heads as further queries, so that their keys are read once
        q = q.reshape(shape[0], k.shape[1], -1, q.shape[-1])
    if mask is not None:
        mask = mask.to(q.dtype).expand(-1, -1, q.shape[2], -1)
    q, k, v = flash.pad_to_one_width(q, k, v)
    with threads_for_keys(k.numel()):
        out, lse = flash_attention_on_cpu(q, k, v, mask, rule.scale)
    return out[..., :width].reshape(*shape, width), lse.reshape(shape)


def is_one_sequence(q: torch.Tensor, k: torch.Tensor, rule: Rule, causal: bool) -> bool:
    """Whether flash takes a row's queries as one sequence, not each as its own.

    Alone, a query has the heads of a group handled as one, its keys are divided among the GPU's processors, and they
    may be any run. Together, a head's keys are read once for all queries. So queries go together where they are more
    than a group's heads, and enough to keep a GPU busy.
    """
    (rows, heads, length, _), kv_heads = q.shape, k.shape[1]
    groups = heads // kv_heads
    if rule.chunk is not None or rule.skip_first or (rule.window is not None and not causal):
        return False  # they begin elsewhere than causality and a window have it
    return length > 1 and (groups == 1 or (length > groups and rows * length * kv_heads > FEW))


def slot_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: VisibleSlots, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`partial_attention` of q [A,Q,T,D] over what is seen of the slots k, v [A,K,S,D]."""
    if rule.softcap is None and flash.supports(q, k, v):
        together = is_one_sequence(q, k, rule, seen.causal)
        if together or q.shape[0] * q.shape[2] <= flash.MAX_SEQUENCES:
            return flash.attention(q, k, v, seen.sequences(rule, together), rule.scale)
    first = rule.skip_first
    if first and not rule.is_local and seen.whole and seen.count >= q.shape[2] + first:  # faster than a mask
        mask = seen.mask(rule.behind_first)
        mask = None if mask is None else mask[..., first:]
        return partial_attention(q, k[:, :, first:], v[:, :, first:], mask, rule.behind_first)
    return partial_attention(q, k, v, seen.mask(rule), rule)


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from each set's (output, log-sum-exp). Paper section 3.1."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    share = torch.sigmoid(lse_2 - lse_1).to(out_1.dtype)
    return torch.lerp(out_1, out_2, share.unsqueeze(-1)), torch.logaddexp(lse_1, lse_2)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The output [B,Q,T,D] after the heads' sinks took their share of the softmax."""
    if rule.sinks is None:
        return out
    return out * torch.sigmoid(lse - rule.sinks.to(lse.dtype).view(1, -1, 1)).unsqueeze(-1).to(out.dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Causal attention of tokens at positions from 0 on over themselves. Returns [B,Q,T,D]; differentiable."""
    return _attend_pieces(q, k, v, split_lengths([q.shape[2]], rule), rule)


def _attend_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: list[int], rule: Rule) -> torch.Tensor:
    """Causal attention within each of `pieces`, the lengths of which `split_lengths` made."""
    if len(pieces) == 1:
        return _attend_piece(q, k, v, rule)
    qs, ks, vs = (x.split(pieces, dim=2) for x in (q, k, v))
    return torch.cat([_attend_piece(*piece, rule) for piece in zip(qs, ks, vs, strict=True)], dim=2)


def _attend_piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Causal attention where of the rule's reach only the window is left."""
    length = q.shape[2]
    if rule.softcap is None and rule.sinks is None and (rule.window is None or length <= rule.window):
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and length <= MATMUL_LENGTH and computes_bf16("cpu"):
            return causal_matmul(q, k, v, rule.scale)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True)
    return chained_attention(q, k, v, Documents([Piece(slice(None), 0, length)]), rule)


def causal_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`causal_attention` as two batched products: on a CPU in bf16 1.8 times as fast as the flash kernel at 130 tokens,
    and 3.9 times with the backward pass (2.1 and 2.8 at 512); the scores are rounded to bf16 once more. Where bf16 is
    emulated it is the slower one: 10.6 ms against 0.6 at 130 tokens on an AMD EPYC with AVX2."""
    (batch, _, length, _), groups = q.shape, q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, groups)).flatten(0, 1).flatten(1, 2)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    scores = torch.baddbmm(_causal_mask(length, groups), folded, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), values).view(batch, -1, length, v.shape[-1])


@lru_cache(maxsize=128)
def _causal_mask(length: int, groups: int) -> torch.Tensor:
    """Additive bf16 mask [1, groups * length, length], on the CPU."""
    with torch.inference_mode(False):  # training must be able to save what inference cached
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        return additive_mask(seen).to(torch.bfloat16).repeat(groups, 1).unsqueeze(0)


def packed_attention(lengths: list[list[int]]) -> Attend:
    """`attend` for packed rows: causal within each document, nothing between documents. DESIGN section 3.1.

    `lengths` holds, for each row, its documents' lengths (and the padding's), which sum to the row's. No [T, T] mask
    exists, nor scores of a whole document but for short ones in products; and the work is that of the documents, not of
    the rows: where flash serves, all of them are one call of it, elsewhere they are attended one by one.
    """
    flat = [length for row in lengths for length in row]
    made: dict[tuple, flash.Sequences] = {}
    documents = documents_by_reach(lengths)

    def sequences(rule: Rule, device: torch.device) -> flash.Sequences:
        key = (device, *rule.reach)
        if key not in made:
            pieces = split_lengths(flat, rule)
            with torch.inference_mode(False):  # training must be able to save what inference cached
                starts = to_device([0, *accumulate(pieces)], device, torch.int32)
            made[key] = flash.Sequences(starts, starts, max(pieces), max(pieces), causal=True, window=rule.window)
        return made[key]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        batch, _, length, _ = q.shape
        if rule.softcap is None and flash.supports(q, k, v):
            wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            if rule.sinks is not None and wants_gradient:  # of the log-sum-exp, which torch's own backward has not
                return chained_attention(q, k, v, documents(rule), rule)
            return with_sinks(*flash.attention(q, k, v, sequences(rule, q.device), rule.scale), rule)
        if len(flat) == batch:
            return causal_attention(q, k, v, rule)
        q, k, v = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v))
        out = _attend_pieces(q, k, v, split_lengths(flat, rule), rule)
        return out.squeeze(0).unflatten(1, (batch, length)).transpose(0, 1)

    return Uncompiled(attend)


def chained_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, rule: Rule, beside: Sequence[Beside] = ()
) -> torch.Tensor:
    """`document_attention` under a rule, whose documents `documents_by_reach` made: [B,Q,T,E]."""
    window = None if rule.window is None else rule.window - documents.behind
    return document_attention(q, k, v, documents, Scores(rule.scale, window, rule.softcap), rule.sinks, beside)


def documents_by_reach(lengths: list[list[int]], behind: int = 0) -> Callable[[Rule], Documents]:
    """`_documents_of`, made once for all rules of the same reach."""
    made: dict[tuple, Documents] = {}

    def documents(rule: Rule) -> Documents:
        if rule.reach not in made:
            made[rule.reach] = _documents_of(lengths, rule, behind)
        return made[rule.reach]

    return documents


def _documents_of(lengths: list[list[int]], rule: Rule, behind: int) -> Documents:
    """The documents of rows, cut as `split_lengths` cuts them, for queries that see what is `behind` slots or more
    before them, those left out that the rule skips.
    """
    if rule.window is not None and rule.window <= behind:
        return Documents([], behind)
    pieces = []
    for row, own in enumerate(lengths):
        ends = [0, *accumulate(split_lengths(own, rule))]
        pieces += [Piece(slice(row, row + 1), start, end) for start, end in pairwise(ends)]
    return Documents(pieces, behind)


def split_lengths(lengths: list[int], rule: Rule) -> list[int]:
    """Documents' lengths cut to those of sequences within which a rule comes down to causality and its window."""
    pieces = []
    for length in lengths:
        borders = {0, *range(rule.chunk or length, length, rule.chunk or length), length}
        borders |= set(range(1, min(rule.skip_first + 1, length)))
        pieces += [end - start for start, end in pairwise(sorted(borders))]
    return pieces
