"""Attention: fast and plain paths, parts merged and documents packed, against a dense softmax in float64."""

import math
from dataclasses import replace

import pytest
import torch

from eagle_train.ops.attention import (
    causal_attention,
    flash_partial,
    merge,
    packed_attention,
    partial_attention,
    plain_partial,
    slot_attention,
    with_sinks,
)
from eagle_train.ops.rule import additive_mask
from eagle_train.ops.visible_slots import FEW_QUERIES, VisibleSlots
from tests.support.attention_cases import RULES, SINKS, WIDTH, random_qkv

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2}


def dense(q, k, v, seen, rule, sinks=True):
    """The twin: attention with its log-sum-exp in float64, one query of one head at a time. `seen` [B, T, S]."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(*q.shape[:3], v.shape[-1]).double(), torch.zeros(q.shape[:3]).double()
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        scores = k[b, h // groups] @ q[b, h, t] * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        weights = scores.exp() * seen[b, t]
        total = weights.sum()
        lse[b, h, t] = total.log()
        if sinks and rule.sinks is not None:
            total = total + rule.sinks[h].double().exp()
        out[b, h, t] = (weights / total.clamp(min=1e-300)) @ v[b, h // groups]
    return out, lse


def near(seen_causally, positions, rule):
    """`seen_causally` [B, T, S] restricted to a rule's window, chunk and beginning, for tokens at `positions` [T] and
    [S]."""
    query, key = positions
    for t, s in torch.cartesian_prod(torch.arange(len(query)), torch.arange(len(key))).tolist():
        too_far = rule.window is not None and key[s] <= query[t] - rule.window
        elsewhere = rule.chunk is not None and int(key[s]) // rule.chunk != int(query[t]) // rule.chunk
        nowhere = key[s] < rule.skip_first and query[t] != key[s]
        if too_far or elsewhere or nowhere:
            seen_causally[:, t, s] = False
    return seen_causally


def close(found, wanted, dtype=torch.float32):
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


MASKS = {
    "none": torch.ones(2, 3, 7).bool(),
    "ragged": (torch.arange(7) < torch.tensor([4, 7])[:, None, None]).expand(2, 3, 7),
    "tree": torch.tensor([[1, 0, 0, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0, 1]]).bool().expand(2, 3, 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_partial_attention_paths_agree(kv_heads, name, dtype):
    """The CPU's kernel, the plain twin and the dense one, for multi-query, grouped and full heads."""
    q, k, v = random_qkv(kv_heads=kv_heads, dtype=dtype)
    seen = MASKS[name]
    rows = {"none": None, "ragged": seen[:, None, :1], "tree": seen[:1, None]}[name]  # masks broadcast as the engine's
    mask = None if rows is None else additive_mask(rows)
    wanted = dense(q, k, v, seen, RULES["plain"])
    for path in (partial_attention, plain_partial, flash_partial):
        for found, exact in zip(path(q, k, v, mask, RULES["plain"]), wanted, strict=True):
            close(found, exact, dtype)


def test_fast_path_is_taken_where_it_serves(monkeypatch):
    taken = []
    monkeypatch.setattr("eagle_train.ops.attention.flash_partial", lambda *_: taken.append("fast"))
    monkeypatch.setattr("eagle_train.ops.attention.plain_partial", lambda *_: taken.append("plain"))
    for name in ("plain", "sinks", "skip first", "softcap", "window", "chunk"):
        partial_attention(*random_qkv(), None, RULES[name])
    assert taken == ["fast", "fast", "fast", "plain", "plain", "plain"]


def test_partial_attention_reads_a_slice_of_a_cache():
    """Keys and values as the engine hands them over: transposed views of a larger store."""
    q, k, v = random_qkv()
    store_k, store_v = (torch.full((5, 9, 2, WIDTH), 1e4) for _ in range(2))
    for store, x in ((store_k, k), (store_v, v)):
        store[:2, :7] = x.transpose(1, 2)
    views = [store[:2, :7].transpose(1, 2) for store in (store_k, store_v)]
    for found, exact in zip(
        partial_attention(q, *views, None, RULES["plain"]), dense(q, k, v, MASKS["none"], RULES["plain"]), strict=True
    ):
        close(found, exact)


def test_query_that_sees_no_key_adds_nothing():
    q, k, v = random_qkv()
    seen = torch.ones(2, 3, 7).bool()
    seen[1, 2] = False
    nothing = plain_partial(q, k, v, additive_mask(seen[:, None]), RULES["window"])
    assert (nothing[1][1, :, 2] == -math.inf).all()
    assert (nothing[0][1, :, 2] == 0).all()
    something = plain_partial(q, k, v, None, RULES["plain"])
    for order in ((nothing, something), (something, nothing)):
        merged = merge(*order)
        torch.testing.assert_close(merged[0][1, :, 2], something[0][1, :, 2])
        torch.testing.assert_close(merged[1][1, :, 2], something[1][1, :, 2])


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (1, 5), (2, 5), (5, 5), (4, 8), (3, 9), (FEW_QUERIES, 41), (FEW_QUERIES + 1, 41)]
)
@pytest.mark.parametrize("name", RULES)
def test_the_last_of_the_slots_see_all_before_them(name, length, count):
    """Masks that are kept for whoever comes are those that are made."""
    rule, (q, k, v) = RULES[name], random_qkv(queries=length, keys=count)
    positions = torch.arange(count - length, count).repeat(2, 1)
    seen = near((positions[:, :, None] >= torch.arange(count)), (positions[0], torch.arange(count)), rule)
    for found, exact in zip(
        slot_attention(q, k, v, VisibleSlots(positions, None, count, whole=True), rule),
        dense(q, k, v, seen, rule, sinks=False),
        strict=True,
    ):
        close(found, exact)


@pytest.mark.parametrize("split", [1, 4, 6])
@pytest.mark.parametrize("name", RULES)
def test_prefix_and_suffix_merge_to_the_whole(name, split):
    """Queries at positions 4..6 over keys 0..6, of which the first `split` are one part; paper section 3.1."""
    rule = RULES[name]
    q, k, v = random_qkv()
    positions = torch.arange(4, 7), torch.arange(7)
    seen = near((positions[0][:, None] >= positions[1]).repeat(2, 1, 1), positions, rule)
    parts = []
    for part in (slice(0, split), slice(split, 7)):
        allowed = (positions[0][:, None] >= positions[1][part]) & rule.sees(positions[0][:, None], positions[1][part])
        parts.append(plain_partial(q, k[:, :, part], v[:, :, part], additive_mask(allowed[None, None]), rule))
    out, lse = merge(*parts)
    without_sinks, exact_lse = dense(q, k, v, seen, rule, sinks=False)
    close(out, without_sinks)
    close(lse, exact_lse)
    close(with_sinks(out, lse, rule), dense(q, k, v, seen, rule)[0])


@pytest.mark.parametrize("name", RULES)
def test_causal_attention(name):
    for length in (1, 3, 11):
        q, k, v = random_qkv(queries=length, keys=length)
        positions = torch.arange(length)
        seen = near((positions[:, None] >= positions).repeat(2, 1, 1), (positions, positions), RULES[name])
        close(causal_attention(q, k, v, RULES[name]), dense(q, k, v, seen, RULES[name])[0])


def document_by_document(q, k, v, lengths, rule):
    """The twin of `packed_attention`: every document cut out and attended on its own."""
    out = torch.zeros_like(q)
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            piece = slice(row, row + 1), slice(None), slice(start, start + length)
            seen = torch.ones(1, length, length).bool().tril()
            scores = (q[piece] @ k[piece].repeat_interleave(2, 1).transpose(-1, -2)) * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            seen = near(seen, (torch.arange(length), torch.arange(length)), rule)
            scores = scores.masked_fill(~seen, -math.inf)
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks.to(q.dtype).view(1, -1, 1, 1).expand(1, -1, length, 1)), -1)
            out[piece] = scores.softmax(-1)[..., :length] @ v[piece].repeat_interleave(2, 1)
            start += length
    return out


@pytest.mark.parametrize(
    "lengths", [[[5, 1, 6], [12]], [[12], [12]], [[1, 11], [4, 8]]], ids=["mixed", "single", "two"]
)
@pytest.mark.parametrize("name", RULES)
def test_packed_attention_values_and_gradients(name, lengths):
    rule = RULES[name]
    inputs = random_qkv(queries=12, keys=12)
    results = []
    for function, dtype in ((packed_attention(lengths), torch.float32), (None, torch.float64)):
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in inputs)
        out = function(0, q, k, v, rule) if function else document_by_document(q, k, v, lengths, rule)
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        (out * weights).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for found, wanted in zip(*results, strict=True):
        close(found, wanted)


def test_documents_do_not_see_each_other():
    """Whatever stands in a row's other documents, or in other rows, a document's output is the same to the bit."""
    q, k, v = random_qkv(queries=12, keys=12)
    attend = packed_attention([[5, 7], [3, 9]])
    before = attend(0, q, k, v, RULES["plain"])
    for x in (q, k, v):
        x[0, :, 5:] = 50.0
        x[1] = -50.0
    assert torch.equal(attend(0, q, k, v, RULES["plain"])[0, :, :5], before[0, :, :5])


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_gpu_agrees(name):
    q, k, v = random_qkv(queries=7)
    on_gpu = RULES[name]
    if on_gpu.sinks is not None:
        on_gpu = replace(on_gpu, sinks=SINKS.cuda())
    found = packed_attention([[3, 4], [7]])(0, q.cuda(), k.cuda(), v.cuda(), on_gpu)
    torch.testing.assert_close(
        found.cpu(), packed_attention([[3, 4], [7]])(0, q, k, v, RULES[name]), rtol=1e-4, atol=1e-4
    )
