"""How requests come to an engine: figures by hand on a clock that only models move."""

from dataclasses import replace

import pytest

from eagle_train.inference import Engine
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.models.target import Target
from evals.contenders import serve
from evals.loads import serve_in_turn, serve_latecomer
from evals.sides import tell_after_round
from tests.support.clock import taking
from tests.support.eval_inputs import asked
from tests.support.tiny import random_tokens, shared_target, tiny_draft


@pytest.fixture
def seconds(clock, monkeypatch) -> None:
    """A target call takes a second."""
    taking(monkeypatch, clock, Target, "hidden_states", 1.0)


def test_who_comes_joins_or_waits(seconds):
    """The second request comes while the first is read, the third while it decodes, the last when all are done."""
    requests = asked(*random_tokens(5, 6, 7, 4), arrivals=[0.0, 0.5, 1.5, 50.0], max_tokens=3, ignore_eos=True)
    target = shared_target()
    joined, waited = (answering(Engine(target, max_batch_size=4), requests) for answering in (serve, serve_in_turn))
    assert [output.token_ids for output in joined] == [output.token_ids for output in waited]
    # The first is read in one second and decodes for two. After the first of these both others join, or after both.
    assert [output.stats.ttft_s for output in joined] == [1.0, 3 - 0.5, 3 - 1.5, 1.0]
    assert [output.stats.ttft_s for output in waited] == [1.0, 4 - 0.5, 4 - 1.5, 1.0]
    # Joining costs the first a second: that of their reading.
    assert [output.stats.intervals_s for output in (joined[0], waited[0])] == [[1.0, 2.0], [1.0, 1.0]]


def test_first_tokens_that_are_told_together_have_one_time(seconds):
    """Short and long prompts are read apart, a second each, and told by one step."""
    prompts = random_tokens(5, 40)
    outputs = serve(Engine(shared_target(), max_batch_size=2), asked(*prompts, max_tokens=3, ignore_eos=True))
    assert [output.stats.ttft_s for output in outputs] == [2.0, 2.0]
    assert [output.stats.intervals_s for output in outputs] == [[1.0, 1.0]] * 2


def test_nobody_takes_a_row_before_all_are_done(seconds):
    first, second, third = asked(*random_tokens(5, 6, 7), max_tokens=4, ignore_eos=True)
    first = replace(first, params=replace(first.params, max_tokens=2))
    outputs = serve_in_turn(Engine(shared_target(), max_batch_size=2), [first, second, third])
    assert [output.stats.ttft_s for output in outputs] == [1.0, 1.0, 5.0]


def test_the_latecomer_comes_to_those_who_decode(monkeypatch):
    """Its text is read in chunks between the others' rounds."""
    engine = Engine(shared_target(), max_batch_size=3, prefill_tokens=8)
    requests = asked(*random_tokens(5, 6, 30), max_tokens=12, ignore_eos=True)
    read, chunks = [], engine.scheduler.chunks

    def noted(budget):
        found = chunks(budget)
        read.append([(one.index, count) for one, count in found])
        return found

    monkeypatch.setattr(engine.scheduler, "chunks", noted)
    outputs = serve_latecomer(engine, requests)
    assert read[:2] == [[(0, 5), (1, 3)], [(1, 3)]]
    assert [each for each in read if each][2:] == [[(2, 8)], [(2, 8)], [(2, 8)], [(2, 6)]]
    assert [len(output.token_ids) for output in outputs] == [12, 12, 12]
    alone = Engine(shared_target()).generate([requests[2].prompt], requests[2].params)[0]
    assert outputs[2].token_ids == alone.token_ids


def test_a_first_token_that_is_told_late(seconds):
    target = shared_target()
    requests = asked(*random_tokens(5, 6), max_tokens=5, ignore_eos=True)
    engines = [Engine(target, Eagle(tiny_draft(target), target), "chain1", max_batch_size=2) for _ in range(2)]
    tell_after_round(engines[1])
    early, late = (serve(engine, requests) for engine in engines)
    assert [output.token_ids for output in early] == [output.token_ids for output in late]
    for before, after in zip(early, late, strict=True):
        first = before.rounds[0]
        assert (before.stats.ttft_s, after.stats.ttft_s) == (1.0, 2.0)
        assert before.stats.intervals_s[:first] == [1 / first] * first
        assert after.stats.intervals_s == [0.0] * first + before.stats.intervals_s[first:]
