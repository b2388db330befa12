"""How requests arrive at an engine: times by hand, on a clock that only models advance."""

from dataclasses import replace

import pytest

from eagle_train.inference import Eagle, Engine
from eagle_train.models.target import Target
from evals.bench.answering import serve
from evals.bench.variants import serve_reporting_late
from evals.bench.workloads import serve_latecomer, serve_static
from tests.support.clock import taking
from tests.support.measuring import timed_requests
from tests.support.tiny import random_tokens, shared_target, tiny_draft


@pytest.fixture
def seconds(clock, monkeypatch) -> None:
    """A target call takes a second."""
    taking(monkeypatch, clock, Target, "hidden_states", 1.0)


def test_new_requests_join_or_wait(seconds):
    """The second request arrives while the first is read, the third while it decodes, the last when all have ended."""
    requests = timed_requests(*random_tokens(5, 6, 7, 4), arrivals=[0.0, 0.5, 1.5, 50.0], max_tokens=3, ignore_eos=True)
    target = shared_target()
    joined, waited = (answering(Engine(target, max_batch_size=4), requests) for answering in (serve, serve_static))
    assert [output.token_ids for output in joined] == [output.token_ids for output in waited]
    # The first is read in one second and decodes for two. After the first of these both others join, or after both.
    assert [output.stats.ttft_s for output in joined] == [1.0, 3 - 0.5, 3 - 1.5, 1.0]
    assert [output.stats.ttft_s for output in waited] == [1.0, 4 - 0.5, 4 - 1.5, 1.0]
    # Joining costs the first a second: that of their reading.
    assert [output.stats.intervals_s for output in (joined[0], waited[0])] == [[1.0, 2.0], [1.0, 1.0]]


def test_first_tokens_of_one_step_have_one_time(seconds):
    """Short and long prompts are prefilled in two calls, a second each, and reported by one step."""
    prompts = random_tokens(5, 40)
    outputs = serve(Engine(shared_target(), max_batch_size=2), timed_requests(*prompts, max_tokens=3, ignore_eos=True))
    assert [output.stats.ttft_s for output in outputs] == [2.0, 2.0]
    assert [output.stats.intervals_s for output in outputs] == [[1.0, 1.0]] * 2


def test_static_batching_gives_no_row_before_all_are_finished(seconds):
    first, second, third = timed_requests(*random_tokens(5, 6, 7), max_tokens=4, ignore_eos=True)
    first = replace(first, params=replace(first.params, max_tokens=2))
    outputs = serve_static(Engine(shared_target(), max_batch_size=2), [first, second, third])
    assert [output.stats.ttft_s for output in outputs] == [1.0, 1.0, 5.0]


def test_the_latecomer_arrives_while_others_decode(monkeypatch):
    """Its prompt is read in chunks between the others' rounds."""
    engine = Engine(shared_target(), max_batch_size=3, prefill_tokens=8)
    requests = timed_requests(*random_tokens(5, 6, 30), max_tokens=12, ignore_eos=True)
    read, forward = [], Target.hidden_states

    def noted(target, tokens, *given):
        read.append(tuple(tokens.shape))
        return forward(target, tokens, *given)

    monkeypatch.setattr(Target, "hidden_states", noted)
    outputs = serve_latecomer(engine, requests)
    late = read.index((1, 8))
    assert sorted(shape for shape in read[:late] if shape[1] > 1) == [(1, 3), (1, 3), (1, 5)]
    assert read[late : late + 8] == [(1, 8), (2, 1), (1, 8), (2, 1), (1, 8), (2, 1), (1, 6), (3, 1)]
    assert [len(output.token_ids) for output in outputs] == [12, 12, 12]
    alone = Engine(shared_target()).generate([requests[2].prompt], requests[2].params)[0]
    assert outputs[2].token_ids == alone.token_ids


def test_a_first_token_that_is_reported_late(seconds):
    target = shared_target()
    requests = timed_requests(*random_tokens(5, 6), max_tokens=5, ignore_eos=True)
    engines = [Engine(target, Eagle(tiny_draft(target), target), "chain1", max_batch_size=2) for _ in range(2)]
    early, late = (
        answer(engine, requests) for answer, engine in zip((serve, serve_reporting_late), engines, strict=True)
    )
    assert [output.token_ids for output in early] == [output.token_ids for output in late]
    for before, after in zip(early, late, strict=True):
        first = before.rounds[0]
        assert (before.stats.ttft_s, after.stats.ttft_s) == (1.0, 2.0)
        assert before.stats.intervals_s[:first] == [1 / first] * first
        assert after.stats.intervals_s == [0.0] * first + before.stats.intervals_s[first:]
