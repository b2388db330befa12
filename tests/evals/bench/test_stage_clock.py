"""Where a round's time goes, by hand, on a clock that only models advance."""

from dataclasses import replace

import pytest

from eagle_train.drafts import Draft, EagleDraft
from eagle_train.errors import UserError
from eagle_train.inference import Dispatcher, Engine, SimulatedAcceptance, chain
from eagle_train.inference.decode.stage_times import StageTimes
from eagle_train.models.target import LMHead, Target
from evals.bench.stage_clock import breakdown
from tests.support.clock import taking
from tests.support.measuring import simulated_engine, timed_requests
from tests.support.tiny import random_tokens, shared_target


def test_the_breakdown_by_hand(clock, monkeypatch):
    """Seconds: target 3, draft 2, LM head 1, verification 1. A round of chain3: 3 * (2 + 1), 3 + 1, and 1."""
    for owner, name, seconds in ((Target, "hidden_states", 3), (EagleDraft, "forward", 2), (LMHead, "__call__", 1)):
        taking(monkeypatch, clock, owner, name, seconds)
    taking(monkeypatch, clock, Dispatcher, "dispatch", 0.5)
    taking(monkeypatch, clock, SimulatedAcceptance, "__call__", 1)
    before = [Target.hidden_states, Draft.__call__, LMHead.__call__, StageTimes.stage]
    found = breakdown(
        simulated_engine("chain3", shares=[1, 1, 1]),
        [timed_requests(*random_tokens(5, 7), max_tokens=9, ignore_eos=True)],
    )
    assert found["rounds"] == 2
    assert found["round_ms"] == 14_500
    assert found["stages_ms"] == {"drafting": 9000, "validation": 4000, "sampling": 1000, "bookkeeping": 0, "rest": 500}
    assert found["forwards_ms"] == {"drafting": 9000, "validation": 4000}
    assert found["outside"] == pytest.approx(1.5 / 14.5)
    assert (found["prefill_ms"], found["draft_latency_ms"]) == (6000, 9000)
    assert [Target.hidden_states, Draft.__call__, LMHead.__call__, StageTimes.stage] == before


def test_the_breakdown_counts_the_rounds_that_were_launched(clock, monkeypatch):
    """With overlap a last step only waits for the last round. Seconds: target 3, LM head 0."""
    taking(monkeypatch, clock, Target, "hidden_states", 3)
    batch = timed_requests(*random_tokens(9), max_tokens=9, ignore_eos=True)
    for overlap in (False, True):
        found = breakdown(Engine(shared_target(), overlap=overlap), [batch])
        assert (found["rounds"], found["round_ms"], found["stages_ms"]["validation"]) == (8, 3000, 3000)


def test_the_breakdown_of_several_batches(clock, monkeypatch):
    """Rounds of all batches; rounds without drafts do not count in the draft's latency. Seconds:
    target 3, draft 2; two rows until the first is finished, then one, for which alone chain2 drafts."""
    for owner, name, seconds in ((Target, "hidden_states", 3), (EagleDraft, "forward", 2)):
        taking(monkeypatch, clock, owner, name, seconds)
    engine = simulated_engine({1: chain(2), 2: chain(0)}, rows=2, shares=[1, 1])
    pair = timed_requests(*random_tokens(5, 7), max_tokens=12, ignore_eos=True)
    pair[0] = replace(pair[0], params=replace(pair[0].params, max_tokens=3))
    alone = timed_requests(*random_tokens(6), max_tokens=7, ignore_eos=True)
    found = breakdown(engine, [pair, alone])
    # The pair: 2 plain rounds, then 9 tokens in 3 drafted ones; the one alone: 6 in 2.
    assert found["rounds"] == 2 + 3 + 2
    assert found["draft_latency_ms"] == 2 * 2000
    assert found["stages_ms"]["drafting"] == pytest.approx(5 * 4000 / 7)
    assert found["prefill_ms"] == pytest.approx((3 + 2) * 1000)


def test_a_batch_without_a_round_has_no_breakdown():
    with pytest.raises(UserError, match=r"^max_tokens=1: no answer has a second token"):
        breakdown(Engine(shared_target()), [timed_requests(*random_tokens(9), max_tokens=1)])
