"""Parts of an LM head and of a draft, each rank in a thread of its own; test_tensor_parallel.py has the processes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle_train.errors import OptionError
from eagle_train.inference import EngineConfig, full, parts
from eagle_train.inference.drafters.chained import Chained
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.inference.parallel.cost import Speeds, measured_speeds, pays
from eagle_train.inference.parallel.divided_draft import collectives, divided_bytes, reason_against
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.parallel.vocabulary import DividedHead
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.head import LMHead, QuantisedLMHead
from eagle_train.ops import head_argmax
from eagle_train.ops.attention import packed_attention
from tests.support.tiny import shared_target, tiny_draft, tiny_eagle3, tiny_medusa, tiny_mtp, tiny_peagle, tiny_target


class Threads(Ranks):
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, divided: bool, barrier: threading.Barrier, slots: list[Any]):
        self.group, self.device, self.divided, self.divided_head = "threads", "cpu", divided, None
        self.rank, self.size, self.barrier, self.slots = rank, size, barrier, slots

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.slots[self.rank] = x.clone()
        self.barrier.wait(30)
        everyone = torch.stack(self.slots)
        self.barrier.wait(30)
        return everyone

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x)[:, self.rank]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x).sum(0)


def on_ranks(size: int, work: Callable[[Ranks], Any], divided: bool = True) -> list[Any]:
    """What `work` returns on each rank."""
    barrier, slots, found = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        with torch.inference_mode():
            found[rank] = work(Threads(rank, size, divided, barrier, slots))

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    return found


def head_of(vocab: int, seed: int = 0) -> LMHead:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(vocab, 8, generator=generator), torch.randn(vocab, generator=generator)
    return LMHead(weight, bias, scale=0.5, softcap=3.0)


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(("size", "vocab"), [(1, 7), (2, 20), (3, 20), (4, 13), (4, 5)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_parts_make_up_the_head(rows, size, vocab, divided):
    """Also where the vocabulary cannot be divided evenly, or a rank has none of it."""
    head, hidden = head_of(vocab), torch.randn(rows, 2, 8, generator=torch.Generator().manual_seed(1))
    whole = head(hidden)

    def work(ranks: Ranks) -> None:
        part = DividedHead(head, ranks)
        torch.testing.assert_close(part(hidden), whole)
        torch.testing.assert_close(part.of_own_rows(hidden), ranks.own(whole))
        assert torch.equal(part.most_likely(hidden, 1), head.most_likely(hidden, 1))
        assert torch.equal(part.most_likely(hidden, 3), head.most_likely(hidden, 3))
        ranks.divided_head = part
        assert torch.equal(ranks.logits(head, hidden), part.of_own_rows(hidden))
        return True

    assert on_ranks(size, work, divided) == [True] * size


def test_the_first_of_equal_logits_is_the_most_likely():
    head = LMHead(torch.ones(12, 8))
    found = on_ranks(3, lambda ranks: DividedHead(head, ranks).most_likely(torch.ones(2, 8), 1).tolist())
    assert found == [[[0], [0]]] * 3


@pytest.mark.parametrize(("size", "vocab"), [(2, 20), (3, 20), (4, 13), (4, 5)])
def test_the_most_likely_of_all_parts_is_found_by_the_kernels_of_each(monkeypatch, size, vocab):
    """Also where a rank has no tokens and so no kernel. Triton's interpreter is no thread's alone: its twin runs."""
    calls = []

    def twin(hidden, weight, bias, scale, softcap):
        calls.append(len(weight))
        value, token = LMHead(weight, bias, scale, softcap)(hidden.to(weight.dtype)).max(-1, keepdim=True)
        return value.float(), token

    head, hidden = head_of(vocab), torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))
    head = LMHead(head.weight.half(), None if head.bias is None else head.bias.half(), head.scale, head.softcap)
    wanted = head.most_likely(hidden, 1)
    monkeypatch.setattr(head_argmax, "_runs_on", lambda device: True)
    monkeypatch.setattr(head_argmax, "pays", lambda hidden, weight, _: head_argmax.supports(hidden, weight))
    monkeypatch.setattr(head_argmax, "head_argmax", twin)
    found = on_ranks(size, lambda ranks: DividedHead(head, ranks).most_likely(hidden, 1))
    assert sum(calls) == vocab
    assert min(calls) > 0
    assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.parametrize("biases", [False, True])
def test_parts_make_up_a_draft(biases):
    target = shared_target("llama")
    named = dict.fromkeys(("fc_bias", "qkv_bias", "o_bias", "mlp_bias"), biases)
    draft = tiny_draft(target, **named, norms="full")
    whole = Eagle(draft, target)
    tokens, positions = torch.randint(0, 90, (2, 5)), torch.arange(5).expand(2, -1)
    hidden = torch.randn(2, 5, target.embedding.shape[1])

    def forward(eagle: Eagle) -> torch.Tensor:
        return eagle.forward(tokens, hidden, positions, packed_attention([[5], [5]]))

    wanted = forward(whole)

    def work(ranks: Ranks) -> torch.Tensor:
        eagle = Eagle(draft, target)
        eagle.divide(ranks)
        (keys, _), (whole_keys, _) = eagle.cache.layers[0], whole.cache.layers[0]
        assert keys.shape[1] * ranks.size == whole_keys.shape[1]
        return forward(eagle)

    for found in on_ranks(2, work):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(forward(Eagle(draft, target)), wanted)  # the given draft was left alone


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (tiny_eagle3, {}),
        (tiny_eagle3, {"num_layers": 2, "norm_output": True}),
        (tiny_mtp, {}),
        (tiny_mtp, {"window": 3, "sink": True}),
        (tiny_mtp, {"modules": 2}),
        (tiny_peagle, {}),
    ],
    ids=["eagle3", "eagle3, two layers", "mtp", "mtp, window, sink", "mtp, chained", "peagle"],
)
def test_parts_make_up_a_draft_of_another_kind(made, kind):
    target = shared_target("llama")
    draft = made(target, **kind)
    tokens, positions = torch.randint(0, 90, (2, 5)), torch.arange(5).expand(2, -1)
    states = torch.randn(2, 5, (1 + len(draft.config.target_layers)) * target.embedding.shape[1])

    def logits(ranks: Ranks | None) -> torch.Tensor:
        eagle = drafter_of(draft, target)
        if ranks is not None:
            eagle.divide(ranks)
            fused = [each for name, each in eagle.draft.named_modules() if name.endswith("fc")]
            assert all(each.weight.shape[1] * ranks.size == draft.config.fc_inputs for each in fused)
        forward = eagle.forward_of(1) if isinstance(eagle, Chained) else eagle.forward
        found = forward(tokens, eagle.draft.fuse(states), positions, packed_attention([[5], [5]]))
        return eagle.head.lm_head(eagle.readable(found))

    wanted = logits(None)
    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_medusa_heads_are_whole_and_their_lm_heads_are_divided(own):
    target = shared_target("llama")
    draft, hidden = tiny_medusa(target, own_head=own), torch.randn(3, 1, target.embedding.shape[1])
    assert reason_against(draft, 3) is None

    def best(ranks: Ranks | None) -> torch.Tensor:
        drafter = drafter_of(draft, target)
        if ranks is not None:
            parts.divide(ranks, target, drafter, EngineConfig(divide_draft=True, divide_lm_head=False))
            assert all(isinstance(head.lm_head, DividedHead) for head in drafter.heads)
        return drafter._by_rank(
            full(5, 2), torch.zeros(3, 1, dtype=torch.long), drafter.run_levels(hidden, None)
        ).tokens

    wanted = best(None)
    assert wanted.shape == (3, 63)
    assert all(torch.equal(found, wanted) for found in on_ranks(3, best))


def test_the_part_of_a_head_in_few_bits_is_in_few_bits():
    target = shared_target("llama")
    draft, hidden = tiny_draft(target), torch.randn(3, 1, target.embedding.shape[1])

    def logits(ranks: Ranks | None) -> torch.Tensor:
        eagle = Eagle(draft, target)
        eagle.use_lm_head("fp8")
        if ranks is not None:
            eagle.divide(ranks)
            assert isinstance(eagle.head.lm_head.part, QuantisedLMHead)
        return eagle.head.lm_head(hidden)

    with pytest.warns(UserWarning, match="no FP8 products"):
        wanted, found = logits(None), on_ranks(2, logits)
    assert not torch.allclose(wanted, target.lm_head(hidden), rtol=1e-3)
    for each in found:
        torch.testing.assert_close(each, wanted)


def test_what_cannot_be_divided_is_refused():
    target = shared_target("llama")
    draft = tiny_draft(target)
    assert [reason_against(draft, size) for size in (1, 2)] == [None, None]
    assert reason_against(draft, 3) == "it has 2 key/value heads"
    assert reason_against(tiny_draft(target, ffn="moe", num_experts=2), 2) == "it has experts"
    wide = tiny_draft(target, intermediate_size=128)
    assert reason_against(quantise_draft(wide, Quant("fp8")), 2) == "its weights are quantised"
    message = "divide_draft=True: the draft cannot be divided over 3 ranks: it has 2 key/value heads; must be False"
    ranks = Threads(0, 3, True, threading.Barrier(1), [None])
    with pytest.raises(OptionError, match=f"^{message}$"):
        parts.divide(ranks, target, Eagle(draft, target), EngineConfig(divide_draft=True, divide_lm_head=False))


@pytest.mark.parametrize(
    ("wanted", "seconds", "expected"),
    [(None, 1e-12, True), (None, 1.0, False), (True, 1.0, True), (False, 1e-12, False)],
)
def test_null_is_what_the_measured_speeds_say(wanted, seconds, expected, monkeypatch):
    target = shared_target("llama")
    monkeypatch.setattr(parts, "measured_speeds", lambda *_: Speeds(bytes_per_s=1e9, collective_s=seconds))
    eagle, ranks = Eagle(tiny_draft(target), target), Threads(0, 2, True, threading.Barrier(1), [None])
    parts.divide(ranks, target, eagle, EngineConfig(divide_draft=wanted, divide_lm_head=wanted))
    assert (ranks.divided_head is not None) == expected
    assert isinstance(eagle.head.lm_head, DividedHead) == expected


def test_a_draft_is_divided_by_what_it_reads_of_its_copy_of_the_lm_head(monkeypatch):
    """Where the sums take as long as half of the draft with the target's LM head, and longer than with one in INT4."""
    target = tiny_target("llama", hidden_size=128)
    draft = tiny_draft(target)
    whole = target.lm_head.num_bytes + divided_bytes(draft)
    speeds = Speeds(bytes_per_s=1.0, collective_s=0.499 * whole / (1 + collectives(draft)))
    monkeypatch.setattr(parts, "measured_speeds", lambda *_: speeds)
    for kind in ("target", "int4"):
        eagle, ranks = Eagle(draft, target), Threads(0, 2, True, threading.Barrier(1), [None])
        eagle.use_lm_head(kind)
        parts.divide(ranks, target, eagle, EngineConfig(draft_lm_head=kind))
        assert isinstance(eagle.head.lm_head, DividedHead) == (kind == "target")


def test_dividing_pays_where_reading_takes_longer_than_talking():
    speeds = Speeds(bytes_per_s=1e9, collective_s=1e-3)
    assert pays(8_000_001, 4, 2, speeds)
    assert not pays(8_000_000, 4, 2, speeds)
    assert pays(4_571_429, 4, 8, speeds)
    assert not pays(4_571_428, 4, 8, speeds)
    assert not pays(10**12, 1, 1, speeds)
    draft = tiny_draft(shared_target("llama"))
    assert collectives(draft) == 1 + 2 * draft.config.num_layers


def test_speeds_are_measured():
    found = measured_speeds(Ranks(), 64, torch.float32)
    assert 1e8 < found.bytes_per_s < 1e13
    assert 0 < found.collective_s < 1e-2
