"""Attention within documents, to single keys and to sinks, against one softmax over all of them in float64."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from eagle_train.ops import documents, tiled
from eagle_train.ops.attention import chained_attention, documents_by_reach
from eagle_train.ops.documents import Beside
from eagle_train.ops.kernels import plain
from eagle_train.ops.rule import Rule
from tests.support.attention_cases import HEADS, RULES, SINKS, WIDTH
from tests.support.flash_on_cpu import flash_on_cpu
from tests.support.memory_job import Held

LENGTHS = [[9, 4, 1, 6], [2, 18]]
KV_HEADS = 2
# The CPU's kernel, tiles of a few queries, and a stand-in for CUDA's kernel, whose log-sum-exp is fp32; how near they
# come.
WAYS = {"cpu": (nullcontext, 1e-10), "tiled": (lambda: plain("attention"), 1e-10), "cuda": (flash_on_cpu, 1e-5)}


@pytest.fixture(autouse=True)
def _few_rows_in_a_tile(monkeypatch):
    monkeypatch.setattr(tiled, "MIN_ROWS", 4)
    monkeypatch.setattr(tiled, "TILE_SCORES", {"cpu": 1})


def positions_of(lengths: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def inputs(behind: int, dtype: torch.dtype = torch.float64, batch: int = 2, length: int = 20, width: int = WIDTH):
    """q, k, v and, for each of `behind` single keys, k and v; values of `width` numbers."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, wide: int) -> torch.Tensor:
        x = torch.randn(batch, heads, length, wide, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    pairs = [x for _ in range(behind + 1) for x in (random(KV_HEADS, WIDTH), random(KV_HEADS, width))]
    return [random(HEADS, WIDTH), *pairs]


def rule_of(name: str) -> Rule:
    """With sinks that have a gradient."""
    rule = RULES[name]
    return rule if rule.sinks is None else replace(rule, sinks=SINKS.double().requires_grad_())


def ours(tensors, rule: Rule, lengths, behind: int) -> torch.Tensor:
    q, k, v, *rest = tensors
    positions, beside = positions_of(lengths), []
    for steps in range(behind):
        seen = rule.sees(positions, positions - steps) & (positions >= steps)
        beside.append(Beside(*rest[2 * steps : 2 * steps + 2], steps, seen))
    return chained_attention(q, k, v, documents_by_reach(lengths, behind)(rule), rule, beside)


def twin(tensors, rule: Rule, lengths, behind: int) -> torch.Tensor:
    """All scores at once: those of the row's tokens, of the single keys, of the sinks. In the inputs' dtype."""
    q, k, v, *rest = tensors
    groups, positions = HEADS // KV_HEADS, positions_of(lengths)
    document = (positions == 0).cumsum(1)
    there = torch.arange(q.shape[2])
    seen = (document[:, :, None] == document[:, None]) & (there[:, None] - behind >= there)
    seen = seen & rule.sees(positions[:, :, None], positions[:, None])

    def score(products: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = products * rule.scale
        scores = scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)
        return scores.masked_fill(~mask.unsqueeze(1), -math.inf)

    k, v, *rest = (x.repeat_interleave(groups, dim=1) for x in (k, v, *rest))
    columns, values = [score(q @ k.transpose(2, 3), seen)], []
    for steps in range(behind):
        own_k, own_v = (x.roll(steps, dims=2) for x in rest[2 * steps : 2 * steps + 2])
        near = rule.sees(positions, positions - steps) & (positions >= steps)
        columns.append(score((q * own_k).sum(-1, keepdim=True), near.unsqueeze(2)))
        values.append(own_v)
    if rule.sinks is not None:
        columns.append(rule.sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1).to(q.dtype))
    weights = torch.cat(columns, dim=-1).softmax(-1)
    out = weights[..., : q.shape[2]] @ v
    for steps, own_v in enumerate(values):
        out = out + weights[..., q.shape[2] + steps, None] * own_v
    return out


def with_gradients(function, tensors, rule: Rule, lengths, behind: int) -> list[torch.Tensor]:
    out = function(tensors, rule, lengths, behind)
    wanted = [*tensors, *(x for x in [rule.sinks] if x is not None)]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape)
    gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), wanted, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, wanted, strict=True))]


@pytest.mark.parametrize("lengths", [LENGTHS, [[20], [20]], [[1] * 20, [3] * 6 + [2]]], ids=["mixed", "one", "short"])
@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_outputs_and_all_gradients_are_those_of_one_softmax(way, name, behind, lengths):
    """Of grouped heads; with documents shorter than `behind`, and windows that end before it."""
    context, tolerance = WAYS[way]
    tensors, rule = inputs(behind), rule_of(name)
    with context() as calls:
        found = with_gradients(ours, tensors, rule, lengths, behind)
    for one, other in zip(found, with_gradients(twin, tensors, rule, lengths, behind), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    if way == "cuda":
        seen = documents_by_reach(lengths, behind)(rule).seeing
        assert len(calls) == (bool(seen) and rule.softcap is None)  # all documents in one call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("way", ["cpu", "tiled"])
def test_lower_precision_stays_near(way, name, dtype):
    tensors, rule, tolerance = inputs(2, dtype), rule_of(name), {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    with WAYS[way][0]():
        found = with_gradients(ours, tensors, rule, LENGTHS, 2)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    assert [x.dtype for x in found[: 1 + len(tensors)]] == [dtype] * (1 + len(tensors))
    for one, other in zip(found, with_gradients(twin, exact, rule, LENGTHS, 2), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_gpus_kernel_stays_near(behind, name):
    tensors, rule = [x.detach().cuda().requires_grad_() for x in inputs(behind, torch.bfloat16)], RULES[name]
    if rule.sinks is not None:
        rule = replace(rule, sinks=SINKS.cuda().requires_grad_())
    with torch.device("cuda"):
        found = with_gradients(ours, tensors, rule, LENGTHS, behind)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        expected = with_gradients(twin, exact, rule, LENGTHS, behind)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("way", WAYS)
def test_values_may_be_wider_than_keys(way):
    tensors, rule = inputs(2, width=2 * WIDTH), rule_of("plain")
    with WAYS[way][0]():
        found = with_gradients(ours, tensors, rule, LENGTHS, 2)
    for one, other in zip(found, with_gradients(twin, tensors, rule, LENGTHS, 2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradients_are_differences(name):
    tensors, rule = inputs(2, batch=1, length=5), rule_of(name)
    wanted = [*tensors, *(x for x in [rule.sinks] if x is not None)]
    assert torch.autograd.gradcheck(lambda *given: ours(given[: len(tensors)], rule, [[4, 1]], 2), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_query_that_sees_no_key_has_no_output_and_no_gradient(way):
    q, k, v, *_ = inputs(0)
    places = documents.Documents([documents.Piece(slice(None), 0, 20)], behind=3)
    with WAYS[way][0]():
        out = documents.document_attention(q, k, v, places, tiled.Scores(0.4))
        out.square().sum().backward()
    assert not out[:, :, :3].any()
    assert not q.grad[:, :, :3].any()
    assert out[:, :, 3:].any(-1).all()
    assert q.grad.isfinite().all()
    assert k.grad[:, :, :17].any(-1).all()
    assert not k.grad[:, :, 17:].any()


def kept_and_most(length: int, name: str, behind: int) -> tuple[int, int]:
    """Bytes that are kept for the backward pass, and the most that are alive in both."""
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x  # held: no address is used twice
        return x

    with Held() as held, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        tensors = inputs(behind, torch.float32, batch=1, length=length)
        out = ours(tensors, rule_of(name), [[length]], behind)
        stored = sum(size for size, _ in kept.values())
        out.square().sum().backward()
    return stored, held.most


@pytest.mark.parametrize(("name", "behind"), [("plain", 2), ("softcap", 0), ("window", 2), ("all", 0)])
@pytest.mark.parametrize("way", ["cpu", "tiled"])
def test_memory_grows_as_the_tokens_do(way, name, behind):
    with WAYS[way][0]():
        (stored, most), (twice_stored, twice_most) = (kept_and_most(length, name, behind) for length in (256, 512))
    assert twice_stored <= 2.01 * stored
    assert twice_most <= 2.01 * most
    whole = HEADS * 512 * 512 * 4  # one fp32 score for each pair
    assert twice_most < whole
