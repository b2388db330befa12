"""Attention over packed documents, and over a prefix plus a tree. Knows nothing of models, caches or requests.

A model calls `attend(layer, q, k, v, rule)`; who calls the model decides what `attend` is: training packs documents
(`packed_attention`), the engine merges a cached prefix with a tree (`slot_attention`, `merge`; paper section 3.1).

Which way is taken; the first line that fits. "CUDA" is what ops/flash.py serves: bf16 or fp16, heads that fit.

    what                          where  rule                           way
    packed documents, prompts     CUDA   no softcap                     one flash kernel over all documents, cut where
                                                                        a chunk ends and behind a skipped first
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
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from eagle_train.hardware import computes_bf16
from eagle_train.ops import flash
from eagle_train.ops.documents import Beside, Documents, Piece, document_attention
from eagle_train.ops.kernels import is_plain
from eagle_train.ops.threads import threads_for_keys
from eagle_train.ops.tiled import Scores
from eagle_train.ops.torch_private import flash_attention_on_cpu
from eagle_train.ops.transfer import to_device

MATMUL_LENGTH = 1024  # up to this length a document's scores may exist whole
FEW_QUERIES = 32  # up to so many, their mask is kept for those who come
FEW = 256  # queries times key/value heads: about two for each processor of a large GPU


@dataclass(frozen=True, eq=False)
class Rule:
    """What a layer asks of attention beside causality.

    `window`: a query sees the last `window` positions, its own included. `chunk`: it sees its own chunk of positions
    only (Llama 4's iRoPE). `softcap`: scores become softcap * tanh(scores / softcap) (Gemma 2). `sinks` [Q]: a logit
    per head that takes part in the softmax and has no value (gpt-oss). `skip_first`: the key at position 0 is seen by
    its own query alone (a draft whose first token has no slot, DESIGN section 3.1).
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    skip_first: bool = False

    @property
    def reach(self) -> tuple[int | None, int | None, bool]:
        """What masks depend on: rules of the same reach share them."""
        return self.window, self.chunk, self.skip_first

    @property
    def is_local(self) -> bool:
        return self.window is not None or self.chunk is not None

    @property
    def sees_all(self) -> bool:
        """Whether causality is all there is."""
        return not self.is_local and not self.skip_first

    @cached_property
    def behind_first(self) -> "Rule":
        """The same where position 0 is not among the keys."""
        return replace(self, skip_first=False)

    def sees(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Which keys there are for a query, bool; causality is the caller's. Both arguments broadcast."""
        near = torch.ones((), dtype=torch.bool, device=query_positions.device)
        if self.window is not None:
            near = near & (query_positions - key_positions < self.window)
        if self.chunk is not None:
            near = near & (query_positions // self.chunk == key_positions // self.chunk)
        if self.skip_first:
            near = near & ((key_positions > 0) | (query_positions == key_positions))
        return near

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        """The first position that a query sees, for queries at `positions`, int64: from there to itself it sees all."""
        first = torch.zeros_like(positions)
        if self.window is not None:
            first = (positions - (self.window - 1)).clamp(min=0)
        if self.chunk is not None:
            first = torch.maximum(first, positions // self.chunk * self.chunk)
        if self.skip_first:
            first = torch.maximum(first, positions.clamp(max=1))
        return first


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Rule], torch.Tensor]
"""attend(layer, q [B,Q,T,D], k [B,K,T,D], v [B,K,T,D], rule) -> [B,Q,T,D]; keys and values are the new tokens'."""


def additive_mask(seen: torch.Tensor) -> torch.Tensor:
    """A bool mask as fp32 numbers to add to scores: 0 where a key is seen, -inf where not."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B,Q,T,D] over the keys k, v [B,K,S,D] with its log-sum-exp, sinks left out.

    `mask` is None or `additive_mask` (0 where a key is seen, -inf where not), [B or 1, 1, T or 1, S]. Returns [B,Q,T,D]
    and [B,Q,T]; a query that sees no key has output 0 and log-sum-exp -inf. Fast where the CPU's flash kernel serves.
    """
    # The kernel reports 0, not -inf, for a query without keys, so a local rule's masks go the plain way. `skip_first`
    # leaves every query its own key, and a tree's more than one of the prefix.
    if q.device.type == "cpu" and rule.softcap is None and not rule.is_local and not is_plain("attention"):
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


class VisibleSlots:
    """Which of its row's slots a query sees, a slot for each position: those before its end that the rule lets it see.

    `positions` int64 [A, T] of the queries; `ends` int64 [A, 1] for all queries of a row, None for causality: each
    query's own slot is its last. Of `count` slots; `whole`: every row's last end is `count`. What the kernels are told
    is made once for all layers of the same reach.
    """

    def __init__(self, positions: torch.Tensor, ends: torch.Tensor | None, count: int, whole: bool):
        self.positions, self.given, self.count, self.whole = positions, ends, count, whole
        self.causal = ends is None and positions.shape[1] > 1
        self.masks: dict[tuple, torch.Tensor | None] = {}
        self.made: dict[tuple, flash.Sequences] = {}
        self._by_rows: dict[tuple[int, int], VisibleSlots] = {}
        self._runs: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def ends(self) -> torch.Tensor:
        """int64 [A, 1 or T]."""
        return self.positions + 1 if self.given is None else self.given

    def rows(self, rows: slice) -> "VisibleSlots":
        """The same of these rows alone, made once."""
        if rows == slice(None):
            return self
        key = (rows.start, rows.stop)
        if key not in self._by_rows:
            given = None if self.given is None else self.given[rows]
            self._by_rows[key] = VisibleSlots(self.positions[rows], given, self.count, self.whole)
        return self._by_rows[key]

    def behind(self, slots: int) -> "VisibleSlots":
        """What is seen behind the first `slots` slots, which every row has; of rules that are not local."""
        given = None if self.given is None else self.given - slots
        return VisibleSlots(self.positions - slots, given, self.count - slots, self.whole)

    def mask(self, rule: Rule) -> torch.Tensor | None:
        """`additive_mask` [A or 1, 1, 1 or T, count]; None where every slot is seen."""
        if rule.reach not in self.masks:
            self.masks[rule.reach] = self.new_mask(rule)
        return self.masks[rule.reach]

    def new_mask(self, rule: Rule) -> torch.Tensor | None:
        length = self.positions.shape[1]
        if self.whole and rule.sees_all and (not self.causal or length <= FEW_QUERIES):
            return _causal_end(length, self.count, self.positions.device) if self.causal else None
        slots = torch.arange(self.count, device=self.ends.device)
        seen = slots < self.ends.unsqueeze(2)
        if not rule.sees_all:
            seen = seen & rule.sees(self.positions.unsqueeze(2), slots)
        return additive_mask(seen.unsqueeze(1))

    def runs(self, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
        """For paged.py: the first slot that each query sees, and the one behind the last, int32 [A, T] each."""
        if rule.reach not in self._runs:
            ends = self.ends.expand_as(self.positions)
            self._runs[rule.reach] = rule.first(self.positions).int(), ends.int().contiguous()
        return self._runs[rule.reach]

    def sequences(self, rule: Rule, together: bool) -> flash.Sequences:
        """For flash: all queries of a row as one sequence, or each alone with the run of slots that it sees."""
        key = (together, *rule.reach)
        if key not in self.made:
            self.made[key] = self.new_sequences(rule, together)
        return self.made[key]

    def new_sequences(self, rule: Rule, together: bool) -> flash.Sequences:
        """The kernel's flat layout: queries [A * T], keys [A * count]; S sequences: A together, else A * T."""
        (rows, length), device = self.positions.shape, self.positions.device
        # A sequence's keys are the slots [first, ends) of its row, int64 [A, 1] together, [A, T] alone.
        first, ends = (0, self.ends[:, -1:]) if together else (rule.first(self.positions), self.ends)
        queries = length if together else 1  # of a sequence
        starts_q = torch.arange(rows * length // queries + 1, device=device) * queries  # [S + 1]
        starts_k = first + torch.arange(rows, device=device).unsqueeze(1) * self.count  # in the flat keys, [A, 1 or T]
        starts_k = F.pad(starts_k.flatten(), (0, 1))  # [S + 1]; the kernel does not use the last, as `used` ends each
        used = (ends - first).clamp(min=0).flatten()  # [S]: keys of each sequence
        most = min(x for x in (self.count, rule.window, rule.chunk) if x is not None)
        seen = (self.count, used.int(), self.causal, rule.window) if together else (most, used.int())
        return flash.Sequences(starts_q.int(), starts_k.int(), queries, *seen)


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
    together = is_one_sequence(q, k, rule, seen.causal)
    few = together or q.shape[0] * q.shape[2] <= flash.MAX_SEQUENCES
    if rule.softcap is None and few and flash.supports(q, k, v):
        return flash.attention(q, k, v, seen.sequences(rule, together), rule.scale)
    if rule.skip_first and not rule.is_local and seen.whole and seen.count > q.shape[2]:  # faster than a mask
        mask = seen.mask(rule.behind_first)
        mask = None if mask is None else mask[..., 1:]
        return partial_attention(q, k[:, :, 1:], v[:, :, 1:], mask, rule.behind_first)
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


def _causal_end(length: int, count: int, device: torch.device) -> torch.Tensor:
    """`additive_mask` [1, 1, length, count] for queries in the last `length` of `count` slots."""
    room = 1 << (count - 1).bit_length()
    return _causal_ends(room, device)[..., FEW_QUERIES - length :, room - count :]


@lru_cache(maxsize=16)
def _causal_ends(count: int, device: torch.device) -> torch.Tensor:
    """`_causal_end` of FEW_QUERIES: its last rows and columns are those of fewer queries and slots."""
    with torch.inference_mode(False):
        seen = torch.ones(FEW_QUERIES, count, dtype=torch.bool, device=device).tril(count - FEW_QUERIES)
        return additive_mask(seen[None, None])


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

    @torch.compiler.disable  # compiled, it would be so anew for every batch's lengths
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

    return attend


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
    before them, position 0 left out where the rule skips it.
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
        borders |= {1} if rule.skip_first else set()
        pieces += [end - start for start, end in pairwise(sorted(borders))]
    return pieces
