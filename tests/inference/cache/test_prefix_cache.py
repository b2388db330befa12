"""Prefix caching: the longest common prefix is found, on the device or in host memory, and never a wrong one."""

import random
from functools import cache

import pytest
import torch

from eagle_train.errors import OptionError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache import prefix_cache
from eagle_train.inference.cache.block_memory import BlockMemory
from eagle_train.inference.cache.block_pool import BlockPool
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.cache.prefix_cache import HostKV, PrefixCache, block_hashes
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.inference.drafters.drafters import Drafters
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests.admission import seat
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.models.shapes import KVShape
from tests.support.cache_checks import check_cache, fresh, spoil
from tests.support.inside import active_in, add_as, drafter_of, pool_of, runner_of, scheduler_of
from tests.support.reference_answers import fail_at, guide
from tests.support.tiny import continued, random_tokens, shared_target, tiny_draft

LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
STEMS = random_tokens(37, 20, seed=1)
TAILS = random_tokens(1, 4, 11, seed=2)
PROMPTS = [stem + tail for stem in STEMS for tail in TAILS]


@cache
def answers(family: str) -> list[list[int]]:
    return [continued(shared_target(family), prompt, LENGTH + 10) for prompt in PROMPTS]


def engine_for(family: str, tree: str = "d3_bf2", alignment: str = "accepted", **settings) -> Engine:
    """With a random draft, whose tokens are accepted at times."""
    target, rng = shared_target(family), random.Random(4)
    drafter = Eagle(tiny_draft(target), target, alignment)
    engine = Engine(target, drafter, tree, prefix_cache=True, **settings)
    guide(engine, answers(family), lambda _: rng.randint(0, 3))
    return engine


def check_pool(engine: Engine) -> None:
    """No block is in use, and none is lost."""
    pool = pool_of(engine)
    assert sorted([*pool.free, *pool.idle]) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))
    assert not any(pool.users)
    assert set(pool.block_of.values()) == set(pool.hash_of) == set(pool.idle)


@pytest.mark.parametrize(("depth", "overlap", "kept"), [(15, False, 2), (7, True, 2)])
def test_an_answer_that_ends_early_in_its_first_round(depth, overlap, kept):
    """A short prompt, and a round that proposes far more tokens than are kept."""
    (prompt,), target = random_tokens(1, seed=3), shared_target("llama")
    truth = continued(target, prompt, 40)
    engine = Engine(target, tiny_draft(target), chain(depth), prefix_cache=True, overlap=overlap)
    guide(engine, [truth], lambda _: depth)
    params = SamplingParams(max_tokens=20, stop_token_ids=(truth[kept - 1],))
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == truth[:kept]
    check_pool(engine)


def test_what_was_prefilled_before_a_preemption_was_not_found():
    """A new prompt has no cached tokens, although its own blocks are found again after its preemption."""
    long, short = random_tokens(100, 5)
    engine = Engine(shared_target(), kv_tokens=9 * BLOCK, prefix_cache=True, prefill_tokens=2)
    engine.add(short, SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    late, read, preempt = (
        engine.add(long, SamplingParams(max_tokens=4, ignore_eos=True)),
        [],
        scheduler_of(engine).preempt,
    )
    scheduler_of(engine).preempt = lambda sequence: read.append(sequence.num_computed) or preempt(sequence)
    while engine.has_unfinished:
        engine.step()
    assert max(read) >= BLOCK
    assert late.stats.cached_tokens == 0


def shared_blocks(tokens: list[int], earlier: list[list[int]]) -> int:
    """The number of full blocks in the longest prefix of `tokens` that is also one of an earlier text."""
    agree = [sum(1 for _ in zip_while(tokens, other)) for other in earlier]
    return max(agree, default=0) // BLOCK


def zip_while(first: list[int], second: list[int]):
    for pair in zip(first, second, strict=False):
        if pair[0] != pair[1]:
            return
        yield pair


@pytest.mark.parametrize("alignment", ["accepted", "last"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4"])
def test_what_is_found_is_what_was_prefilled(family, alignment):
    """The longest prefix that is in both models' caches, and never a whole prompt."""
    engine, earlier = engine_for(family, alignment=alignment, kv_tokens=60 * BLOCK), []
    for index in [0, 1, 2, 0, 3, 4, 5, 2]:
        request = add_as(engine, index, PROMPTS[index], GREEDY)
        while engine.has_unfinished:
            engine.step()
            spoil(engine)
        assert request.generated == answers(family)[index][:LENGTH]
        found = shared_blocks(PROMPTS[index][:-1], earlier)
        assert request.stats.cached_tokens == found * BLOCK
        earlier.append((request.prompt + request.generated)[: request.num_computed])
    check_pool(engine)


@pytest.mark.parametrize("host_kv_tokens", [0, 40 * BLOCK])
@pytest.mark.parametrize("first_token", ["self_fusion", "skip"])
def test_both_caches_are_those_of_a_fresh_prefill(first_token, host_kv_tokens, monkeypatch):
    """Also where blocks come back from host memory: the draft's next slot is paired with the right hidden state."""
    target, rng = shared_target("llama"), random.Random(4)
    draft, checked, brought, get = tiny_draft(target, first_token=first_token), [], [], HostKV.get
    monkeypatch.setattr(HostKV, "get", lambda self, names, blocks: (brought.extend(blocks), get(self, names, blocks)))
    engine = Engine(target, draft, "chain3", kv_tokens=6 * BLOCK, prefix_cache=True, host_kv_tokens=host_kv_tokens)
    guide(engine, answers("llama") * 2, lambda _: rng.randint(0, 3))
    grow = drafter_of(engine).grow

    def checking(plan, root_hidden, *rest):
        for sequence in active_in(engine):
            tokens = sequence.prompt + sequence.generated
            check_cache(drafter_of(engine).cache, sequence, fresh(target, draft, tokens)[3])
            check_cache(runner_of(engine).cache, sequence, fresh(target, draft, tokens[:-1])[2])
            checked.append(sequence.stats.cached_tokens)
        return grow(plan, root_hidden, *rest)

    drafter_of(engine).grow = checking
    outputs = engine.generate(PROMPTS * 2, GREEDY)
    assert [output.token_ids for output in outputs] == [answer[:LENGTH] for answer in answers("llama") * 2]
    assert len(set(checked)) > 1
    second = [output.stats.cached_tokens for output in outputs[len(PROMPTS) :]]
    if host_kv_tokens:
        assert second == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert bool(brought) == bool(host_kv_tokens)
    check_pool(engine)


@pytest.mark.parametrize("host_kv_tokens", [0, 7 * BLOCK, 100 * BLOCK])
@pytest.mark.parametrize(("family", "kv_tokens"), [("llama", None), ("llama", 8 * BLOCK), ("gemma2", 8 * BLOCK)])
def test_requests_come_and_go(family, kv_tokens, host_kv_tokens):
    """Common prefixes, a small store, chunked prefill, cancellation: the target's tokens, and no block is lost."""
    found = 0
    for seed in range(2):
        rng = random.Random(seed)
        settings = {
            "kv_tokens": kv_tokens,
            "host_kv_tokens": host_kv_tokens,
            "prefill_tokens": rng.choice([3, 20, None]),
        }
        engine = engine_for(family, max_batch_size=3, **settings)
        requests, cancelled = [], set()
        while len(requests) < 16 or engine.has_unfinished:
            if len(requests) < 16 and rng.random() < 0.5:
                index = rng.randrange(len(PROMPTS))
                request = add_as(engine, index, PROMPTS[index], GREEDY)
                requests.append(request)
            if requests and rng.random() < 0.1:
                victim = rng.choice(requests)
                cancelled |= {victim} if not victim.finish_reason else set()
                engine.cancel(victim)
            engine.step()
            spoil(engine)
        for request in requests:
            truth = answers(family)[request.index][:LENGTH]
            assert request.generated == (truth[: len(request.generated)] if request in cancelled else truth)
            found += request.stats.cached_tokens
        assert cancelled
        check_pool(engine)
    assert found > 0


def test_sampled_tokens_do_not_depend_on_what_was_found():
    target = shared_target("llama")
    draft, params = tiny_draft(target), SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=3, ignore_eos=True)
    plain = Engine(target, draft, "d3_bf2").generate(PROMPTS, params)
    engine = Engine(target, draft, "d3_bf2", kv_tokens=10 * BLOCK, prefix_cache=True, host_kv_tokens=40 * BLOCK)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(output.stats.cached_tokens for output in outputs) > 0


def test_who_was_preempted_goes_on_from_what_is_left():
    engine, again = engine_for("llama", kv_tokens=9 * BLOCK, max_batch_size=4, host_kv_tokens=40 * BLOCK), []
    preempt, give = scheduler_of(engine).preempt, scheduler_of(engine).give_blocks
    left: dict[Sequence, int] = {}

    def preempting(sequence):
        left[sequence] = min(sequence.num_computed, len(sequence.to_prefill) - 1) // BLOCK * BLOCK
        preempt(sequence)

    def giving(sequence, slots):
        give(sequence, slots)
        if sequence in left:
            again.append((sequence.num_computed, left.pop(sequence)))

    scheduler_of(engine).preempt, scheduler_of(engine).give_blocks = preempting, giving
    engine.generate(PROMPTS, GREEDY)
    assert again
    assert all(found == read > 0 for found, read in again)


def test_names_tell_blocks_by_all_tokens_before_them():
    text = random_tokens(5 * BLOCK + 3)[0]
    names = block_hashes(text, [])
    assert len(set(names)) == 5
    assert block_hashes(text[: 3 * BLOCK - 1], []) == names[:2]
    assert block_hashes(text, names[:2]) == names
    for place in range(5 * BLOCK):
        other = block_hashes([*text[:place], text[place] + 1, *text[place + 1 :]], [])
        assert [a == b for a, b in zip(names, other, strict=True)] == [i < place // BLOCK for i in range(5)]
    assert block_hashes(text[BLOCK:], [])[0] != names[1]


def test_the_pool_empties_the_least_recently_used_end_of_a_text_first():
    told: list[tuple[list[int], list[bytes]]] = []
    pool, first, second = BlockPool(5, lambda *blocks: told.append(blocks)), [], []
    pool.extend(first, 3 * BLOCK)
    pool.extend(second, 2 * BLOCK)
    for block in (2, 3, 5):
        pool.register(block, bytes([block]))
    pool.register(6, bytes([5]))  # holds what block 5 holds
    pool.retain(2)  # a third one begins as the first
    third = [2]
    pool.release(first)
    pool.release(second)
    assert (sorted(pool.free), list(pool.idle), pool.available) == ([4, 6], [3, 5], 4)
    assert pool.extend(third, 5 * BLOCK)
    assert third == [2, 3, 4, 5, 6]
    assert told == [([3, 5], [b"\3", b"\5"])]
    assert not pool.extend(third, 6 * BLOCK)
    pool.release(third)
    assert (sorted(pool.free), list(pool.idle)) == ([3, 4, 5, 6], [2])


def memory_of(store: PagedKV, pool: BlockPool) -> BlockMemory:
    return BlockMemory([store], pool, Ranks(), None)


def test_host_memory_keeps_the_most_recently_used():
    store = PagedKV(dict.fromkeys(range(2), KVShape(1, 4, 4)), 6, torch.float32, "cpu")
    (memory,) = store.memory
    memory[0::2] = torch.arange(6 * BLOCK).view(1, -1, 1, 1)
    memory[1::2] = -memory[0::2]
    host = HostKV(memory_of(store, BlockPool(4)), 3 * BLOCK)
    host.put([1, 2], [b"1", b"2"])
    assert host.touch(b"1")
    host.put([3, 1, 4], [b"3", b"1", b"4"])  # 1 is there already: 2 makes room
    assert list(host.place) == [b"1", b"3", b"4"]
    before = memory.clone()
    memory.zero_()
    host.get([b"4", b"1"], [0, 5])
    blocks = store.by_block[0]
    assert torch.equal(blocks[:, [0, 5]], before.unflatten(1, (6, BLOCK))[:, [4, 1]])
    assert not blocks[:, 1:5].any()
    host.put([1, 2, 3, 4], [b"a", b"b", b"c", b"d"])
    assert list(host.place) == [b"b", b"c", b"d"]
    assert sorted(host.place.values()) == [0, 1, 2]


def test_what_was_copied_to_the_host_in_part_is_not_found(monkeypatch):
    """And the next copy of the same blocks is whole."""
    stores = [PagedKV({0: KVShape(1, 4, 4)}, 6, torch.float32, "cpu") for _ in range(2)]
    for store in stores:
        store.by_block[0][:] = torch.arange(6.0).view(1, 6, 1, 1, 1)
    host = HostKV(BlockMemory(stores, BlockPool(4), Ranks(), None), 2 * BLOCK)
    host.put([1, 2], [b"1", b"2"])
    fail_at(monkeypatch, prefix_cache, "to_device", 2)
    with pytest.raises(MemoryError):
        host.put([3], [b"3"])
    assert list(host.place) == [b"2"]
    host.put([3], [b"3"])
    host.get([b"2", b"3"], [4, 5])
    assert [store.by_block[0][0, 4:].flatten(1).unique(dim=1).tolist() for store in stores] == [[[2], [3]]] * 2


@pytest.mark.parametrize("tokens", [10**15, 2**62])
def test_host_memory_that_is_not_there_is_told(tokens):
    said = rf"^host_kv_tokens={tokens}: the host has no memory for their keys and values, [\d,]+\.\d GiB; give fewer: "
    with pytest.raises(OptionError, match=said):
        Engine(shared_target(), prefix_cache=True, host_kv_tokens=tokens)


class Caching(Drafter):
    """Has a cache, and drafts nothing."""

    def __init__(self, store: PagedKV):
        self.caches = [store]


def test_who_lost_its_drafter_leaves_no_blocks_in_its_name():
    """Neither those that it fills after that, nor those that it fills again after a preemption."""
    store, pool = PagedKV({0: KVShape(1, 4, 4)}, 10, torch.float32, "cpu"), BlockPool(8)
    prefixes, drafters = PrefixCache(memory_of(store, pool), 0), Drafters({"own": Caching(store)}, Ranks(), 32)
    (text,) = random_tokens(4 * BLOCK + 1)
    lost, other, plain = (Sequence(index, text, GREEDY, frozenset()) for index in range(3))
    seat(other, "own", drafters)
    seat(lost, "own", drafters)

    def fill(blocks: int) -> None:
        lost.num_computed = blocks * BLOCK
        prefixes.register(lost)

    prefixes.attach(lost)
    assert pool.extend(lost.blocks, len(text))
    fill(2)
    seat(lost, None, drafters)
    fill(4)
    assert prefixes.cached_blocks(other) == lost.blocks[:2]
    pool.release(lost.blocks)
    lost.drop_cache()
    taken: list[int] = []
    assert pool.extend(taken, 8 * BLOCK)
    pool.release(taken)
    prefixes.attach(lost)
    assert pool.extend(lost.blocks, len(text))
    fill(4)
    assert prefixes.cached_blocks(other) == []
    assert prefixes.cached_blocks(plain) == lost.blocks[:4]


def test_a_gap_ends_what_is_found():
    pool, store, text = (
        BlockPool(8),
        PagedKV({0: KVShape(1, 4, 4)}, 10, torch.float32, "cpu"),
        random_tokens(5 * BLOCK)[0],
    )
    prefixes, names = PrefixCache(memory_of(store, pool), 4 * BLOCK), block_hashes(text, [])
    prefixes.host.put([2, 3, 5], [names[0], names[1], names[3]])
    sequence = Sequence(0, text, GREEDY, frozenset())
    prefixes.attach(sequence)
    pool.extend(sequence.blocks, len(text))
    prefixes.load(sequence)
    assert sequence.num_computed == 2 * BLOCK
    assert pool.block_of == {names[0]: sequence.blocks[0], names[1]: sequence.blocks[1]}
