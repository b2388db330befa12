"""Blocks and rows: whatever the store's size, and wherever a sequence's blocks are, the tokens are the target's."""

import random

import pytest
import torch

from eagle_train.errors import UserError, within
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.block_memory import BlockMemory
from eagle_train.inference.cache.block_pool import BlockPool, blocks_for
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.requests import admission
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.requests.sequence import Sequence
from tests.support.inside import drafter_of, pool_of
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, TREES, answers, cut, guide, token_ids
from tests.support.tiny import continued, random_tokens, shared_target, tiny_draft


@pytest.fixture
def preempted(monkeypatch) -> list[int]:
    """The preempted sequences, in order."""
    seen, preempt = [], Scheduler.preempt

    def counting(self, sequence):
        seen.append(sequence.index)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "preempt", counting)
    return seen


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_who_there_is_no_memory_for_is_refused_and_the_others_go_on(error, monkeypatch):
    """Whichever of the stores does not fit."""
    target = shared_target()
    engine, grown = Engine(target, tiny_draft(target), "chain3"), PagedKV.grown

    def short(self, blocks):
        if self is drafter_of(engine).cache and blocks > 9:  # less than the long request needs
            raise error
        return grown(self, blocks)

    monkeypatch.setattr(PagedKV, "grown", short)
    first = engine.add(PROMPTS[0], GREEDY)
    engine.step()
    wanted = r"^kv_tokens=None: no memory for the keys and values of \d+ tokens, \d+\.\d KiB; give a smaller"
    typed = r"^engine.kv_tokens=None: .* give a smaller max_tokens or engine.kv_tokens: "
    for match, group in ((wanted, ""), (typed, "engine")):
        with pytest.raises(UserError, match=match), within(group):
            engine.add(PROMPTS[1], SamplingParams(max_tokens=50 * BLOCK))
    others = [engine.add(prompt, GREEDY) for prompt in PROMPTS[1:3]]
    while engine.has_unfinished:
        engine.step()
    assert [request.generated for request in (first, *others)] == cut(answers("llama"))[:3]


def test_a_request_is_sized_once_however_many_wait(monkeypatch):
    """Many thousands may."""
    sized, engine = [], Engine(shared_target(), max_batch_size=1)
    monkeypatch.setattr(admission, "blocks_for", lambda slots: sized.append(slots) or blocks_for(slots))
    long = engine.add(PROMPTS[1], GREEDY)
    requests = [long] + [engine.add(prompt, SamplingParams(max_tokens=1)) for prompt in PROMPTS[:1] * 20]
    assert len(sized) == len(requests)
    assert pool_of(engine).region == long.most_blocks > requests[-1].most_blocks > 0
    while engine.has_unfinished:
        engine.step()
    assert all(request.finish_reason == "length" for request in requests)


def test_where_memory_is_short_they_wait_for_each_other(preempted, monkeypatch):
    """As many blocks as there is memory for, and never fewer than one sequence needs."""
    target = shared_target()
    needs = [blocks_for(len(prompt) + GREEDY.max_tokens + 4) for prompt in PROMPTS]
    for affordable in (1, 6):
        monkeypatch.setattr(BlockMemory, "affordable", lambda _, affordable=affordable: affordable)
        engine = Engine(target, tiny_draft(target), "chain3", max_batch_size=4)
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
        assert pool_of(engine).total == max(affordable, *needs)
        requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]  # none of whom needs more than there is
        assert pool_of(engine).total == max(affordable, *needs)
        while engine.has_unfinished:
            engine.step()
        assert [request.generated for request in requests] == cut(answers("llama"))
    assert preempted


def test_where_free_memory_lies_in_pieces_they_wait_too(monkeypatch):
    target, grown = shared_target(), PagedKV.grown
    engine = Engine(target, tiny_draft(target), "chain3", max_batch_size=4)
    engine.generate(PROMPTS[:1], GREEDY)
    monkeypatch.setattr(PagedKV, "grown", lambda *_: torch.zeros(2**62))
    before = pool_of(engine).total
    assert token_ids(engine.generate(PROMPTS[:1] * 4, GREEDY)) == cut(answers("llama"))[:1] * 4
    assert pool_of(engine).total == before
    with pytest.raises(UserError, match="no memory"):
        engine.generate(PROMPTS, SamplingParams(max_tokens=50 * BLOCK))
    monkeypatch.setattr(PagedKV, "grown", grown)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


def test_where_a_whole_batch_has_no_memory_from_the_start_they_wait_for_each_other(monkeypatch):
    """On a CPU nothing is known of free memory before it is asked for."""
    target, grown = shared_target(), PagedKV.grown
    least = max(blocks_for(len(prompt) + GREEDY.max_tokens + 4) for prompt in PROMPTS)
    engine = Engine(target, tiny_draft(target), "chain3", max_batch_size=4)

    def short(self, blocks):
        if blocks > 2 * least:
            raise RuntimeError("can't allocate memory")
        return grown(self, blocks)

    monkeypatch.setattr(PagedKV, "grown", short)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    assert least <= pool_of(engine).total <= 2 * least


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_store_too_small_for_all(family, tree, preempted):
    """Room for one whole sequence and a block: the others wait, and some are preempted."""
    target, rng = shared_target(family), random.Random(5)
    engine = Engine(target, tiny_draft(target), tree, max_batch_size=4, kv_tokens=4 * BLOCK)
    guide(engine, answers(family), lambda _: rng.randint(0, 3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers(family))
    assert preempted
    pool = pool_of(engine)
    assert sorted(pool.free) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))
    for output in outputs:
        assert output.stats.tokens == LENGTH - 1 == sum(output.rounds)
        assert output.stats.ttft_s > 0


def test_sampled_tokens_do_not_depend_on_the_store(preempted):
    target = shared_target("llama")
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=7, ignore_eos=True)
    draft = tiny_draft(target)
    roomy = Engine(target, draft, "d3_bf2", max_batch_size=4).generate(PROMPTS, params)
    assert not preempted
    tight = Engine(target, draft, "d3_bf2", max_batch_size=4, kv_tokens=4 * BLOCK).generate(PROMPTS, params)
    assert preempted
    assert token_ids(tight) == token_ids(roomy)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", TREES)
def test_blocks_anywhere(tree, rows, monkeypatch):
    monkeypatch.setattr(BlockPool, "_next", lambda self, *_: random.Random(len(self.free)).choice(self.free))
    target, rng = shared_target("gemma2"), random.Random(6)
    engine = Engine(target, tiny_draft(target), tree, max_batch_size=rows)
    guide(engine, answers("gemma2"), lambda _: rng.randint(0, 3))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("gemma2"))


@pytest.mark.parametrize(
    ("kv_tokens", "message"),
    [
        (0, r"^kv_tokens=0: must be at least 1, a whole number, or None$"),
        (2 * BLOCK, r"^kv_tokens=32: prompt 1 and its answer need 48$"),
        (2**63 - 1, r"^kv_tokens=9223372036854775807: no memory for the keys and values of "),
    ],
)
def test_a_store_too_small_for_one(kv_tokens, message):
    with pytest.raises(UserError, match=message):
        Engine(shared_target("llama"), kv_tokens=kv_tokens).generate(PROMPTS[:2], GREEDY)


def test_the_pool_hands_out_the_block_that_follows_or_the_lowest():
    pool, first, second = BlockPool(5), [], []
    assert pool.extend(first, BLOCK + 1)
    assert pool.extend(second, BLOCK)
    assert (first, second) == ([2, 3], [4])
    assert pool.extend(first, 2 * BLOCK)
    assert first == [2, 3]
    assert not pool.extend(second, 5 * BLOCK)
    assert second == [4]
    pool.release(first)
    assert first == []
    assert pool.extend(second, 3 * BLOCK)
    assert second == [4, 5, 6]
    assert pool.extend(first, 2 * BLOCK)
    assert first == [2, 3]
    assert [blocks_for(slots) for slots in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]


def new(index: int, prompt: int) -> Sequence:
    return Sequence(index, [1] * prompt, GREEDY, frozenset())


def admitted(scheduler: Scheduler) -> list[Sequence]:
    """The sequences admitted now; their prompts are prefilled at once."""
    scheduler.admit()
    new = [sequence for sequence, _ in scheduler.chunks(None)]
    scheduler.activate(new)
    return new


def test_first_come_first_served():
    """The newest is preempted, waits at the front, and is admitted when there is a spare block for each sequence."""
    scheduler = Scheduler(BlockPool(6), rows=2, ahead=4)
    first, second, third = new(0, 20), new(1, 20), new(2, 1)
    scheduler.waiting.extend([first, second, third])
    assert admitted(scheduler) == [first, second]  # two blocks each, and one for the first beside
    assert admitted(scheduler) == []  # no row is free
    first.generated = [1] * 57  # 76 committed ones, and 4: five blocks
    scheduler.make_room()
    assert (scheduler.active, list(scheduler.waiting)) == ([first], [second, third])
    assert (len(first.blocks), second.blocks) == (5, [])
    assert admitted(scheduler) == []  # one block is free, and the second needs two
    first.finish_reason = "stop"
    scheduler.leave()
    assert admitted(scheduler) == [second, third]


def test_a_block_for_everyone_stays_free():
    scheduler = Scheduler(BlockPool(4), rows=2, ahead=4)
    scheduler.waiting.extend([new(0, 20), new(1, 20)])
    assert len(admitted(scheduler)) == 1  # the second would fit, but the first could not grow beside it


def test_sequences_in_prefill_are_preempted_first():
    scheduler = Scheduler(BlockPool(5), rows=2, ahead=4)
    first, second = new(0, 20), new(1, 20)
    scheduler.waiting.extend([first, second])
    scheduler.admit()
    scheduler.activate([first])
    second.num_computed = 16
    first.generated = [1] * 30  # four blocks
    scheduler.make_room()
    assert (scheduler.active, scheduler.prefilling, list(scheduler.waiting)) == ([first], [], [second])
    assert second.num_computed == 0


def test_who_came_last_gives_way_in_whatever_row():
    """And waits behind those that arrived earlier."""
    scheduler = Scheduler(BlockPool(8), rows=2, ahead=4)
    first, second, third = new(0, 20), new(1, 20), new(2, 20)
    scheduler.waiting.extend([first, second, third])
    scheduler.admit()
    scheduler.activate([second])  # a shorter text was read sooner
    scheduler.activate([first])
    first.generated = second.generated = [1] * 45  # 64 committed ones, and 4: five blocks
    scheduler.make_room()
    assert (scheduler.active, list(scheduler.waiting)) == ([first], [second, third])


def test_the_rows_that_stay_are_those_of_who_came_first(preempted):
    """A long prompt, prefilled after a newer short one, keeps its blocks when the short one is preempted; no tokens
    change."""
    long, short = random_tokens(40, 5)
    engine = Engine(shared_target(), max_batch_size=3, kv_tokens=7 * BLOCK)
    requests = [engine.add(prompt, SamplingParams(max_tokens=50, ignore_eos=True)) for prompt in (long, short)]
    while engine.has_unfinished:
        engine.step()
    assert preempted == [1]
    assert [each.generated for each in requests] == [continued(shared_target(), each.prompt, 50) for each in requests]


def test_prompts_are_prefilled_in_chunks():
    scheduler = Scheduler(BlockPool(20), rows=3, ahead=4)
    first, second, third = new(0, 20), new(1, 7), new(2, 9)
    scheduler.waiting.extend([first, second, third])
    scheduler.admit()
    assert scheduler.chunks(None) == [(first, 20), (second, 7), (third, 9)]
    assert scheduler.chunks(16) == [(first, 16)]
    first.num_computed = 16
    assert scheduler.chunks(16) == [(first, 4), (second, 7), (third, 5)]


def test_a_pool_that_grows_keeps_what_was_handed_out():
    pool, blocks = BlockPool(2), []
    assert pool.extend(blocks, 2 * BLOCK)
    assert not pool.extend(blocks, 3 * BLOCK)
    pool.grow(4)
    assert pool.extend(blocks, 4 * BLOCK)
    assert sorted(blocks) == list(range(SCRATCH + 1, SCRATCH + 5))
    assert pool.store_size == SCRATCH + 5
