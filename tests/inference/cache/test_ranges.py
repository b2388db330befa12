"""Rows whose blocks follow one another: they get such blocks, and are attended without a copy. DESIGN section 3.6."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache import paged_kv
from eagle_train.inference.cache.block_pool import BlockPool, blocks_for
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, ZEROS, PagedPrefix, Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.tree import full
from eagle_train.models.shapes import KVShape
from eagle_train.ops import threads
from eagle_train.ops.rule import Rule
from tests.support.inside import active_in, pool_of
from tests.support.reference_answers import token_ids
from tests.support.tiny import shared_target, tiny_draft

CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch) -> list[int]:
    """The slots of each copy that is made of keys and values; ranges of any size are read where they lie."""
    made: list[int] = []
    gather = PagedKV._gathered_blocks
    monkeypatch.setattr(
        PagedKV, "_gathered_blocks", lambda self, *given: (made.append(given[2]), gather(self, *given))[1]
    )
    monkeypatch.setattr(paged_kv, "_LEAST_IN_PLACE", 0)
    return made


def attend(lengths: list[int], blocks: list[list[int]], nodes: int, rule: Rule, is_tree: bool) -> torch.Tensor:
    """Attention of new tokens or of a tree's nodes, where every slot that no row may read is NaN."""
    generator = torch.Generator().manual_seed(1)
    shapes = {0: KVShape(2, 8, 8), 1: KVShape(2, 8, 8)}
    cache = PagedKV(shapes, max(map(max, blocks)) + 1, torch.float32, CPU)
    for row, length in zip(blocks, lengths, strict=True):
        for slot in range(length):
            for x in cache.memory:
                x[:, row[slot // BLOCK] * BLOCK + slot % BLOCK] = torch.randn(4, 2, 8, generator=generator)
    held = {b * BLOCK + i for row, n in zip(blocks, lengths, strict=True) for j, b in enumerate(row)
            for i in range(BLOCK) if j * BLOCK + i < n}  # fmt: skip
    stale = [slot for slot in range(cache.slots) if slot not in held and slot // BLOCK != ZEROS]
    for x in cache.memory:
        x[:, stale] = torch.nan
    prefix, tree = Prefix.of(lengths, blocks, CPU), full(2, 2)
    count = tree.num_nodes if is_tree else nodes
    q, k, v = (torch.randn(len(lengths), heads, count, 8, generator=generator) for heads in (4, 2, 2))
    if is_tree:
        positions = prefix.lengths.unsqueeze(1) + tree.depth
        return cache.tree(prefix, Suffix(), positions, tree.ancestors)(1, q, k, v, rule)
    return cache.extend(prefix, prefix.positions(count))(1, q, k, v, rule)


LENGTHS = {"equal": [40, 40, 40], "full blocks": [48, 48, 48], "unequal": [33, 40, 64], "a block's end": [32, 48, 33]}
PLACES = {"equal distances": [2, 8, 14], "two calls": [2, 8, 20], "any order": [20, 2, 9]}


@pytest.mark.parametrize("skip_first", [0, 1, 3])
@pytest.mark.parametrize("nodes", [1, 4, None], ids=["token", "chain", "tree"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_are_attended_where_they_lie(lengths, places, nodes, skip_first, copies, monkeypatch):
    rule = Rule(scale=0.4, skip_first=skip_first)
    blocks = [list(range(first, first + 5)) for first in PLACES[places]]
    given = (LENGTHS[lengths], blocks, nodes or 0, rule, nodes is None)
    found = attend(*given)
    unequal = len(set(LENGTHS[lengths])) > 1
    shared = (min(LENGTHS[lengths]) - 1) // BLOCK * BLOCK
    assert copies == ([max(LENGTHS[lengths]) + (nodes or 0) - shared] if unequal else [])
    monkeypatch.setattr(paged_kv, "_LEAST_IN_PLACE", 2**60)
    wanted = attend(*given)
    assert len(copies) == unequal + 1
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("rule", "slots"), [(Rule(scale=0.4, window=9), 10), (Rule(scale=0.4, chunk=16), 42)], ids=["window", "chunk"]
)
def test_rules_that_are_local_read_a_copy(rule, slots, copies):
    """Of a window, none of the blocks that all queries have behind it."""
    given = [40, 40], [list(range(2, 6)), list(range(6, 10))], 2, rule, False
    assert attend(*given).isfinite().all()
    assert copies == [slots]


@pytest.mark.parametrize("skip_first", [0, 1, 3])
@pytest.mark.parametrize("nodes", [1, 4, None], ids=["token", "chain", "tree"])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 31, 33, 34, 100])
@pytest.mark.parametrize("lengths", [[33], [40, 40], [33, 64, 48], [1, 50], [32]], ids=str)
def test_a_window_is_the_end_of_what_is_there(lengths, window, nodes, skip_first, copies, monkeypatch):
    """Against all slots, under a mask."""
    blocks, rule = [list(range(2 + 6 * row, 7 + 6 * row)) for row in range(len(lengths))], Rule(0.4, window)
    given = lengths, blocks, nodes or 0, replace(rule, skip_first=skip_first), nodes is None
    found = attend(*given)
    is_copied, last = len(lengths) > 1, max(lengths) + (nodes or 0)
    assert not is_copied or copies[-1] < window + BLOCK + last - min(lengths)
    monkeypatch.setattr(paged_kv, "_unseen_slots", lambda prefix, slots, rule: 0)
    torch.testing.assert_close(found, attend(*given))
    assert not is_copied or copies[-1] == last


def test_ranges_are_found_in_any_order():
    rng = random.Random(0)
    for _ in range(300):
        firsts = rng.sample(range(2, 40), rng.randint(1, 6))
        blocks = [[first, first + 1, 90 if rng.random() < 0.1 else first + 2] for first in firsts]
        prefix = Prefix.of([33] * len(blocks), blocks, CPU)
        if not isinstance(prefix, PagedPrefix):
            continue
        ranges = prefix.ranges(3 * BLOCK)
        assert bool(ranges) == all(row[2] == row[0] + 2 for row in blocks)
        found = [(r.first + i * r.spacing) // BLOCK for r in ranges for i in range(r.rows.stop - r.rows.start)]
        assert found == (firsts if ranges else [])
        assert all(r.spacing > 0 for r in ranges if r.rows.stop - r.rows.start > 1)
        assert all(a.rows.stop == b.rows.start for a, b in pairwise(ranges))
        steps = [b - a for a, b in pairwise(firsts)]
        if len(set(steps)) == 1 and steps[0] > 0 and ranges:
            assert len(ranges) == 1
        assert len(prefix.ranges(2 * BLOCK)) > 0  # the third block is not among them


def test_sequences_get_blocks_that_follow_one_another():
    pool = BlockPool(13)
    pool.region = 4
    rows: list[list[int]] = [[], [], [], []]
    for row in rows:
        assert pool.extend(row, BLOCK, begins=True)
    assert rows == [[2], [6], [10], [14]]  # the last one has no room for a region
    for slots in (2 * BLOCK, 4 * BLOCK):
        for row in rows[:3]:
            assert pool.extend(row, slots)
    assert rows[:3] == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
    pool.release(rows[1])
    assert pool.extend(rows[3], 2 * BLOCK)
    assert rows[3] == [14, 6]
    assert pool.extend(rows[3], 3 * BLOCK)
    assert rows[3] == [14, 6, 7]
    new: list[int] = []
    assert pool.extend(new, BLOCK, begins=True)
    assert new == [8]


def test_regions_of_others_are_used_when_nothing_else_is_free():
    pool, first, second = BlockPool(6), [], []
    pool.region = 5
    assert pool.extend(first, BLOCK, begins=True)
    assert pool.extend(second, 3 * BLOCK, begins=True)
    assert first == [2]
    assert second == [7, 3, 4]
    assert pool.extend(first, 3 * BLOCK)
    assert first == [2, 5, 6]
    assert not pool.extend(first, 4 * BLOCK)
    for blocks in (first, second):
        pool.release(blocks)
    assert sorted(pool.free) == list(range(SCRATCH + 1, SCRATCH + 7))
    assert pool.extend(first, 5 * BLOCK, begins=True)
    assert first == [2, 3, 4, 5, 6]


def test_a_sequence_that_shares_anothers_first_blocks_has_its_own_region():
    pool, first, second, third = BlockPool(12), [], [2], [2]
    pool.region = 4
    assert pool.extend(first, BLOCK, begins=True)
    pool.register(2, b"2")
    for blocks in (second, third):
        pool.retain(2)
        assert pool.extend(blocks, 2 * BLOCK, begins=True)
    assert (first, second, third) == ([2], [2, 6], [2, 10])
    for blocks in (third, second, first):
        assert pool.extend(blocks, 3 * BLOCK)
    assert (first, second, third) == ([2, 3, 4], [2, 6, 7], [2, 10, 11])
    pool.release(second)
    fourth: list[int] = []
    assert pool.extend(fourth, BLOCK, begins=True)
    assert fourth == [6]
    assert pool.extend(first, 4 * BLOCK)
    assert first == [2, 3, 4, 5]


def test_random_requests_leave_the_pool_whole():
    rng, pool = random.Random(4), BlockPool(60)
    rows: list[list[int]] = []
    for step in range(2000):
        pool.region = rng.choice([0, 3, 7])
        if rows and rng.random() < 0.3:
            pool.release(rows.pop(rng.randrange(len(rows))))
        elif rng.random() < 0.5:
            rows.append([])
            pool.extend(rows[-1], rng.randint(1, 5 * BLOCK), begins=True)
        elif rows:
            row = rng.choice(rows)
            pool.extend(row, len(row) * BLOCK + 1)
        used = [block for row in rows for block in row]
        assert sorted([*used, *pool.free]) == list(range(SCRATCH + 1, SCRATCH + 61)), step
        assert pool.free == sorted(pool.free, reverse=True)
    for row in rows:
        pool.release(row)
    assert not pool._regions


@pytest.mark.parametrize("tree", ["chain3", "d2_bf2"])
def test_an_engine_reads_its_rows_where_they_lie(tree, copies):
    """Each round copies what is behind the shortest row's last block alone, and answers are those of a copy."""
    target = shared_target("llama")
    prompts = [[(7 * i + row) % 90 for i in range(40 + 3 * row)] for row in range(3)]
    params = [SamplingParams(max_tokens=40 + 9 * row, ignore_eos=True) for row in range(3)]
    plain = Engine(target, max_batch_size=1).generate(prompts, params)
    engine, places = Engine(target, tiny_draft(target), tree, max_batch_size=3), []
    copies.clear()
    requests = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    while engine.has_unfinished:
        engine.step()
        places += [(row.index, *row.blocks) for row in active_in(engine)]
    assert [engine.output(each).token_ids for each in requests] == token_ids(plain)
    region = blocks_for(46 + 58 + 4)
    assert pool_of(engine).region >= region
    assert all(blocks == list(range(blocks[0], blocks[0] + len(blocks))) for _, *blocks in places)
    assert copies
    assert max(copies) < 4 * BLOCK


def test_many_keys_get_all_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for outside in (False, True):
            with threads.threads_for(1, 1) if outside else threads.num_threads(2):
                for elements, wanted in ((threads.LEAST_KEYS - 1, 1), (threads.LEAST_KEYS, 3)):
                    with threads.threads_for_keys(elements):
                        assert torch.get_num_threads() == (wanted if outside else 2)
                assert torch.get_num_threads() == (1 if outside else 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
