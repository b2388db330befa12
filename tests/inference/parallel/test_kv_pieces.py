"""Answers of prefill processes come piece by piece, and may end, fail, or be wrong at each."""

import pytest
import torch

from eagle_train.inference import Engine, RemotePrefill
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.parallel.kv_pieces import BLOCKS, HIDDEN, layout, units_of, unpack
from tests.support.inside import inside, pool_of, scheduler_of
from tests.support.local_prefill import LocalPrefill, a_draft
from tests.support.reference_answers import GREEDY, token_ids
from tests.support.tiny import continued, random_tokens, shared_target

pytestmark = pytest.mark.filterwarnings("error:prefill process")  # none is dropped unless a test says so
STEM, *TAILS = random_tokens(2 * BLOCK + 3, 4, 6)
TEXTS = [STEM + tail for tail in TAILS]
PARTS = {False: 12, True: 14}  # of an answer to one of TEXTS, in two chunks, without and with a prefix cache


def a_line(other: int = 1, **options) -> LocalPrefill:
    line = LocalPrefill(other, prefill_tokens=24, **options)
    line.open.set()
    return line


def a_decoder(*lines: LocalPrefill, **options) -> Engine:
    return Engine(shared_target("gemma2"), a_draft(), prefill=RemotePrefill(list(lines)), **options)


def truth(text: list[int]) -> list[int]:
    return continued(shared_target("gemma2"), text, GREEDY.max_tokens)


def check_free(pool) -> None:
    assert sorted([*pool.free, *pool.idle]) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))
    assert not any(pool.users)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_only_what_follows_a_prefix_is_sent(prefix_cache):
    """Also what the prefill process has in its own cache, and does not compute again. In chunks that end in blocks."""
    server, (text,) = LocalPrefill(prefix_cache=prefix_cache, prefill_tokens=24).server, random_tokens(3 * BLOCK + 2)
    runner, sent = server._parts.runner, []
    units = list(units_of(runner.stores).values())
    for start in (0, BLOCK + 5):
        request = {
            "target": shared_target("gemma2").identity.fingerprint,
            "dtype": "torch.float32",
            "layout": layout(runner.stores, runner.width),
            "texts": [text],
            "starts": [start],
            "params": [{}],
        }
        parts = []
        server.prefill(request, lambda *part: parts.append(part))  # noqa: B023
        answer = [torch.full((4 - start // BLOCK, *x.shape[1:]), torch.nan) for unit in units for x in unit]
        places = iter(range(len(answer)))
        by_unit = [[answer[next(places)] for _ in unit] for unit in units]
        for what, body in parts:
            if what == BLOCKS:
                blocks = body
                assert int(blocks.min()) >= 0
            elif what >= 0:
                unpack(by_unit[what], blocks, body)
        sent.append([*answer, parts[-1][1].unsqueeze(0)])
        assert parts[-1][0] == HIDDEN
    assert not server._parts.scheduler.has_unfinished, "a prefilled request leaves the server"
    for whole, rest in zip(*sent, strict=True):
        torch.testing.assert_close(whole[1:] if len(whole) > 1 else whole, rest)


@pytest.mark.parametrize(("prefix_cache", "part"), [(cached, part) for cached, n in PARTS.items() for part in range(n)])
@pytest.mark.parametrize("fault", ["fails_at", "breaks_at"])
def test_a_fault_at_each_part(fault, prefix_cache, part):
    """The prompt is read here, and what was read before and after it is right."""
    line, other = (a_line(number, prefix_cache=prefix_cache) for number in (1, 2))
    setattr(line, fault, part)
    engine = a_decoder(line, other, prefix_cache=prefix_cache)
    if fault == "breaks_at":
        with pytest.warns(UserWarning, match="^prefill process 1 is dropped: Connection closed by peer$"):
            found = engine.generate(TEXTS[:1], GREEDY)
    else:
        found = engine.generate(TEXTS[:1], GREEDY)
    found += engine.generate(TEXTS[1:], GREEDY)
    assert token_ids(found) == [truth(text) for text in TEXTS]
    assert len(inside(engine).prefiller._tasks) == (2 if fault == "fails_at" else 1)
    check_free(pool_of(engine))
    check_free(line.server._parts.scheduler.pool)


@pytest.mark.parametrize("prefix_cache", PARTS)
def test_how_many_parts_an_answer_has(prefix_cache):
    line = a_line(prefix_cache=prefix_cache)
    a_decoder(line, prefix_cache=prefix_cache).generate(TEXTS[:1], GREEDY)
    assert line.received == PARTS[prefix_cache]


@pytest.mark.parametrize("part", range(1, PARTS[True]))
def test_what_comes_late_lands_nowhere(part):
    """A request is cancelled while its answer comes, and another has its blocks when the rest does."""
    line, other = (a_line(number, prefix_cache=True) for number in (1, 2))
    line.waits_at = part
    engine = a_decoder(line, other, prefix_cache=True, kv_tokens=6 * BLOCK)
    first = engine.add(TEXTS[0], GREEDY)
    while line.received < part:
        engine.step()
    blocks = set(first.blocks)
    engine.cancel(first)
    second = engine.add(TEXTS[1], GREEDY)
    while not second.generated:
        engine.step()
    assert set(second.blocks) & blocks
    assert second.stats.cached_tokens == 0, "what had not arrived whole must not be found"
    line.go_on.set()
    while engine.has_unfinished or inside(engine).prefiller._tasks[line] is not None:
        engine.step()
    assert (first.generated, second.generated) == ([], truth(TEXTS[1]))
    check_free(pool_of(engine))


def test_a_text_that_has_grown_beside_one_that_is_awaited():
    """The first one of an answer is preempted, read by another process, and longer when the answer comes."""
    line, other, texts = a_line(1), a_line(2), random_tokens(5, 14, 20)
    for each in (line, other):
        each.open.clear()
    engine = a_decoder(line, other)
    first, second, third = requests = [engine.add(text, GREEDY) for text in texts]
    engine.step()
    assert third.remote_task is first.remote_task is not second.remote_task
    scheduler_of(engine).preempt(first)
    other.open.set()
    while len(first.generated) < BLOCK - 2:
        engine.step()
    line.open.set()
    while engine.has_unfinished:
        engine.step()
    assert [request.generated for request in requests] == [truth(text) for text in texts]


def other_number(header, body):
    return header._replace(number=-1), body


def longer(header, body):
    body = torch.cat([body, body[:1]]) if header.what == 1 else body
    return header._replace(length=len(body)), body


def other_unit(header, body):
    return (header._replace(what=99) if header.what == 1 else header), body


def other_blocks(header, body):
    return header, body + 1 if header.what == BLOCKS else body


def without_states(header, body):
    return (header._replace(what=BLOCKS, length=1), torch.zeros(1)) if header.what == HIDDEN else (header, body)


def with_a_piece_less(header, body):
    return (header._replace(what=1), body) if header.what == 0 else (header, body)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (other_number, "to another request"),
        (longer, "of another length"),
        (other_unit, "in other units"),
        (other_blocks, "of other blocks"),
        (without_states, "incomplete"),
        (with_a_piece_less, "incomplete"),
    ],
)
def test_a_wrong_answer_is_refused(change, fault):
    line = a_line()
    line.changed = change
    engine = a_decoder(line)
    with pytest.warns(UserWarning, match=f"^prefill process 1 is dropped: its answer is {fault}$"):
        assert token_ids(engine.generate(TEXTS, GREEDY)) == [truth(text) for text in TEXTS]
    assert inside(engine).prefiller._tasks == {}
    assert line.closed, "who was not asked for this must not wait to send the rest"
