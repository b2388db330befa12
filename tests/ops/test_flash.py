"""The way over torch's flash attention: what it is told, and that models and engine come to the same by it.

Without a GPU the kernel is a stand-in with its arguments' meaning (flash_on_cpu.py), or torch's own shapes (meta).
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache import paged_kv
from eagle_train.models.target import Target
from eagle_train.ops import attention, flash, paged
from eagle_train.ops.attention import is_one_sequence, packed_attention, plain_partial, slot_attention, split_lengths
from eagle_train.ops.rule import Rule
from eagle_train.ops.visible_slots import VisibleSlots
from tests.support.attention_cases import RULES, SINKS, random_qkv
from tests.support.flash_on_cpu import flash_on_cpu
from tests.support.reference_answers import PROMPTS, token_ids
from tests.support.tiny import shared_target, tiny_draft, trained_draft

IN_TORCH_2_11 = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) "
    "-> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
)
WITHOUT_SOFTCAP = [name for name, rule in RULES.items() if rule.softcap is None]


def test_torch_takes_what_its_oldest_supported_version_takes():
    ours = torch.ops.aten._flash_attention_forward.default._schema
    assert ours.is_backward_compatible_with(torch._C.parse_schema(IN_TORCH_2_11))


def test_what_is_served():
    x = torch.zeros(1, 2, 3, 64)
    with patch.object(flash, "runs_on", lambda device: True):
        assert flash.supports(*3 * [x.bfloat16()])
        assert flash.supports(*3 * [x.half()])
        assert not flash.supports(*3 * [x])
        assert not flash.supports(x.bfloat16(), x.half(), x.half())
        assert not flash.supports(*3 * [x[..., :60].bfloat16()])
        assert flash.supports(*2 * [x.bfloat16()], x[..., :32].bfloat16())  # with zeros behind the values
        assert not flash.supports(*2 * [x.bfloat16()], x.repeat(1, 1, 1, 5).bfloat16())
        assert not flash.supports(*3 * [x.repeat(1, 1, 1, 5).bfloat16()])
    assert not flash.supports(*3 * [x.bfloat16()])  # on a CPU


@pytest.mark.parametrize(
    "limits", [{}, {"window": 3}, {"chunk": 4}, {"skip_first": 1}, {"skip_first": 3}, {"window": 5, "chunk": 4}]
)
def test_a_query_sees_all_from_its_first_key_to_itself(limits):
    rule, positions = Rule(1.0, **limits), torch.arange(13)
    seen = rule.sees(positions[:, None], positions) & (positions <= positions[:, None])
    run = (positions >= rule.first(positions)[:, None]) & (positions <= positions[:, None])
    assert torch.equal(seen, run) or rule.skip_first


def test_documents_are_cut_where_a_rule_ends():
    assert split_lengths([5, 1, 9], Rule(1.0, window=3)) == [5, 1, 9]
    assert split_lengths([5, 1, 9], Rule(1.0, chunk=4)) == [4, 1, 1, 4, 4, 1]
    assert split_lengths([5, 1, 9], Rule(1.0, skip_first=True)) == [1, 4, 1, 1, 8]
    assert split_lengths([5, 2, 9], Rule(1.0, skip_first=3)) == [1, 1, 1, 2, 1, 1, 1, 1, 1, 6]
    assert split_lengths([5, 1, 9], Rule(1.0, chunk=4, skip_first=True)) == [1, 3, 1, 1, 1, 3, 4, 1]


def test_queries_go_together_when_that_saves_reading_and_leaves_no_gpu_idle():
    def chosen(rows, length, limits=None, causal=True, kv_heads=8):
        q, k = torch.empty(rows, 32, length, 8), torch.empty(rows, kv_heads, 9, 8)
        return is_one_sequence(q, k, Rule(1.0, **limits or {}), causal)

    assert [chosen(1, 4), chosen(64, 4), chosen(1, 16), chosen(8, 16), chosen(1, 512)] == [False] * 3 + [True] * 2
    assert chosen(64, 512, {"window": 3})
    assert not chosen(64, 512, {"window": 3}, causal=False)
    assert not chosen(64, 512, {"chunk": 3})
    assert not chosen(64, 512, {"skip_first": True})
    assert [chosen(1, 1, kv_heads=32), chosen(1, 2, kv_heads=32)] == [False, True]


def a_cache(rule_name, length, tree, lengths=(6, 0, 3), groups=2):
    """Queries [3, 4, T, 8] and a cache of 10 slots a row, of which `lengths` are committed; and what is seen of it."""
    q, k, v = random_qkv(batch=3, kv_heads=4 // groups, queries=length, keys=10 + length)
    prefix = torch.tensor(lengths)
    positions = prefix.unsqueeze(1) + (torch.arange(length) // 2 if tree else torch.arange(length))
    ends = prefix.unsqueeze(1) if tree else None
    return q, k, v, VisibleSlots(positions, ends, k.shape[2], whole=False), RULES[rule_name]


@pytest.mark.parametrize("few", [0, 256], ids=["together", "alone"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("name", RULES)
def test_slots_are_attended_as_under_a_mask(name, length, tree, few, monkeypatch):
    """Ragged rows, one of them empty; a query without keys has log-sum-exp -inf and output 0."""
    monkeypatch.setattr(attention, "FEW", few)
    for groups in (1, 2, 4):
        q, k, v, seen, rule = a_cache(name, length, tree, groups=groups)
        wanted = plain_partial(q, k, v, seen.mask(rule), rule)
        with flash_on_cpu() as calls:
            found = slot_attention(q, k, v, seen, rule)
        for ours, twin in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-5)
        assert bool(calls) == (rule.softcap is None)
        if tree and rule.softcap is None:
            assert (found[1][1] == -math.inf).all()
            assert (found[0][1] == 0).all()


@pytest.mark.parametrize("lengths", [[[5, 1, 6], [12]], [[12], [12]], [[1, 11], [4, 8]], [[1] * 12, [1] * 12]])
@pytest.mark.parametrize("name", RULES)
def test_packed_documents_and_their_gradients(name, lengths):
    rule, results = RULES[name], []
    for way in (flash_on_cpu(), nullcontext()):
        with way as calls:
            q, k, v = (x.double().requires_grad_() for x in random_qkv(queries=12, keys=12))
            out = packed_attention(lengths)(0, q, k, v, rule)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
            results.append([out.detach(), q.grad, k.grad, v.grad])
            if calls is not None:
                assert len(calls) == (rule.softcap is None)
                with torch.no_grad():
                    results.append([packed_attention(lengths)(0, q, k, v, rule), q.grad, k.grad, v.grad])
                assert len(calls) == 2 * (rule.softcap is None)
    for found in results[:-1]:
        for ours, twin in zip(found, results[-1], strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("name", WITHOUT_SOFTCAP)
def test_the_host_asks_the_device_for_nothing(name, length):
    """On tensors without values, by torch's own account of the kernel's results."""
    rule, meta = RULES[name], torch.device("meta")
    rule = replace(rule, sinks=None if rule.sinks is None else SINKS.to(meta))
    q, k, v = (torch.empty(2, heads, 6, 64, dtype=torch.bfloat16, device=meta) for heads in (4, 2, 2))
    with patch.object(flash, "runs_on", lambda device: True):
        out = packed_attention([[4, 2], [6]])(0, q, k, v, rule)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        positions = torch.empty(2, length, dtype=torch.int64, device=meta)
        seen = VisibleSlots(positions, None, 6, whole=False)
        out, lse = slot_attention(q[:, :, :length], k, v, seen, rule)
        assert (out.shape, out.dtype) == ((2, 4, length, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 4, length), torch.float32)


PARAMS = [SamplingParams(max_tokens=size, ignore_eos=True) for size in (14, 3, 9, 14, 1)]


ENGINES = [
    ("llama", {}),
    ("qwen3", {"first_token": "skip"}),
    ("gpt_oss", {"irope": True, "attention_chunk": 6}),
    ("llama4", {"irope": True, "attention_chunk": 6, "first_token": "skip"}),
    ("gemma2", {"window": 4, "sink": True}),
    ("deepseek_v3", {"window": 5, "first_token": "skip"}),
    ("gemma4", {}),
]


@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
@pytest.mark.parametrize(("family", "overrides"), ENGINES)
def test_the_engine_says_the_same(family, overrides, tree, monkeypatch):
    """Ragged batches, prompts in chunks, windows, chunks, sinks; and Gemma 2, whose scores are capped."""
    together = (ENGINES.index((family, overrides)) % 2 == 0) == (tree == "chain3")  # each with each family and tree
    monkeypatch.setattr(attention, "FEW", 0 if together else 256)
    target, said = shared_target(family), []
    draft = tiny_draft(target, **overrides)
    for way in (nullcontext(), flash_on_cpu()):
        with way as calls:
            engine = Engine(target, draft, tree, max_batch_size=3, prefill_tokens=6, prefix_cache=True)
            outputs = engine.generate(PROMPTS, PARAMS)
            said.append((token_ids(outputs), [output.rounds for output in outputs]))
    assert said[0] == said[1]
    assert {queries > 1 for queries, _ in calls} == {True, False}


def test_a_draft_learns_the_same():
    """Of rows with several documents: the outputs, and what training makes of the weights."""
    target, drafts = shared_target("llama"), []
    for way in (nullcontext(), flash_on_cpu()):
        with way as calls:
            drafts.append(trained_draft.__wrapped__(target, steps=5))  # each way anew
    assert calls
    for ours, twin in zip(*(draft.parameters() for draft in drafts), strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-3, atol=1e-4)


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In bf16, and wide enough for what is common."""
    return [x.repeat(1, 1, 1, 8).cuda().bfloat16() for x in tensors]


def rule_on_gpu(name: str) -> Rule:
    rule = RULES[name]
    return rule if rule.sinks is None else replace(rule, sinks=SINKS.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[[5, 1, 6], [12]], [[12], [12]], [[1] * 12, [1] * 12]])
@pytest.mark.parametrize("name", RULES)
def test_documents_on_a_gpu(name, lengths):
    """Values and gradients in bf16, against fp32 document by document."""
    inputs, results = on_gpu(*random_qkv(queries=12, keys=12)), []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = ((x.to(dtype) / 4).detach().requires_grad_() for x in inputs)
        assert flash.supports(q, k, v) == (dtype == torch.bfloat16)
        out = packed_attention(lengths)(0, q, k, v, rule_on_gpu(name))
        (out * torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(dtype)).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
        with torch.inference_mode():
            results[-1].append(packed_attention(lengths)(0, q, k, v, rule_on_gpu(name)))
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), twin, rtol=5e-2, atol=5e-2)


def check_slots(q, k, v, seen, rule) -> tuple[torch.Tensor, torch.Tensor]:
    """`slot_attention` in bf16, against the plain twin in fp32."""
    found = slot_attention(q, k, v, seen, rule)
    wanted = plain_partial(q.float(), k.float(), v.float(), seen.mask(rule), rule)
    for ours, twin in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.float(), twin, rtol=5e-2, atol=5e-2)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("few", [0, 256], ids=["together", "alone"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("name", RULES)
def test_slots_on_a_gpu(name, length, tree, few, monkeypatch):
    """A few keys, of rows of which one is empty; and many, which the kernel divides, in slots that hold more."""
    monkeypatch.setattr(attention, "FEW", few)
    for groups in (1, 2, 4):
        q, k, v, seen, _ = a_cache(name, length, tree, groups=groups)
        for lengths, repeats in ((torch.tensor([6, 0, 3]), 1), (torch.tensor([2900, 0, 300]), 300)):
            positions = (lengths.unsqueeze(1) - lengths[:, None].new_tensor([[6], [0], [3]]) + seen.positions).cuda()
            ends = lengths.unsqueeze(1).cuda() if tree else None
            keys, values = (x.repeat(1, 1, repeats, 1) for x in (k, v))
            sight = VisibleSlots(positions, ends, keys.shape[2], whole=False)
            out, lse = check_slots(*on_gpu(q / 4, keys / 4, values), sight, rule_on_gpu(name))
            if tree:
                assert (lse[1] == -math.inf).all()
                assert (out[1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
@pytest.mark.parametrize(("family", "overrides"), [("llama", {}), ("gpt_oss", {}), ("llama4", {"first_token": "skip"})])
def test_the_engine_on_a_gpu(family, overrides, tree):
    """Every attention over committed slots that an engine asks for."""
    model, counted = shared_target(family).model, []
    target = Target(type(model)(model.config).cuda().bfloat16())
    target.model.load_state_dict(model.state_dict())
    draft = tiny_draft(shared_target(family), **overrides)

    def checked(q, k, v, seen, rule):
        counted.append(flash.supports(q, k, v))
        return check_slots(q, k, v, seen, rule)

    # In place of the kernel that reads through the block table, which takes fewer queries than these are meant for.
    with patch.object(paged_kv, "slot_attention", checked), patch.object(paged, "supports", lambda *_: False):
        Engine(target, draft, tree, max_batch_size=3, prefill_tokens=6, graphs=False).generate(PROMPTS, PARAMS)
    assert counted
    assert all(counted)
