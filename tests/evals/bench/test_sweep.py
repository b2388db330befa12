"""Latency rows by hand, and which batches a breakdown is taken of."""

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Engine, Output, SamplingParams, Stats
from evals import latency
from evals.bench import statistics, sweep
from evals.bench.requests import PromptSource
from evals.bench.statistics import Answer
from evals.bench.sweep import PLAIN, TRANSFORMERS, Cell, rows_of
from tests.support.latency import latency_config, session_of
from tests.support.measuring import NO_QUESTION, timed_requests
from tests.support.tiny import random_tokens, shared_target


def timed_answer(token_ids: list[int], ttft: float, intervals: list[float], calls: int = 1) -> Answer:
    counts = {"calls": calls, "tokens": len(intervals), "ttft_s": ttft, "intervals_s": intervals}
    counts |= {"accepted_per_depth": [calls] * bool(calls), "drafted_per_depth": [calls] * bool(calls)}
    return Answer(NO_QUESTION, 1, [7], Output(token_ids, None, "length", Stats(**counts), []))


def test_a_breakdown_is_of_batches_with_rounds(monkeypatch):
    """The second one, since the first batch's answers end with their first tokens."""
    target, prompts = shared_target(), random_tokens(9, 12)
    first = Engine(target).generate(prompts[:1], SamplingParams(max_tokens=1))[0].token_ids
    batches = [timed_requests(prompt, max_tokens=6, stop_token_ids=tuple(first)) for prompt in prompts]
    session = session_of(target, latency_config(questions=None, context_lengths=[9]))
    prompts = PromptSource(session.requests, [], session.config.params)
    monkeypatch.setattr(prompts, "batches", lambda *_: batches)
    monkeypatch.setattr(statistics, "check_timing", lambda found: None)
    *_, found = sweep.sweep(session.config, prompts, latency.variants(session, longest=20))
    assert [each["decoding"] for each in found["breakdown"]] == ["plain", "chain3"]
    assert all(each["rounds"] > 0 for each in found["breakdown"])


def test_rows_by_hand():
    """Two batches of three tokens; the second one's times have another scale, which medians of ratios ignore."""
    answered = {
        PLAIN: [[timed_answer([1, 2, 3], 2.0, [2.0, 2.0], 2)], [timed_answer([1, 2, 3], 8.0, [6.0, 6.0], 2)]],
        "chain3": [[timed_answer([1, 2, 3], 2.0, [1.0, 1.0])], [timed_answer([1, 9, 3], 2.0, [4.0, 4.0])]],
        TRANSFORMERS: [[timed_answer([1, 2, 3], 3.0, [3.0, 3.0], 2)], [timed_answer([1, 2, 3], 10.0, [10.0, 10.0], 2)]],
    }
    batches = [timed_requests([7]), timed_requests([7])]
    plain, chain3, theirs = rows_of(latency_config(), Cell(1, 64), answered, batches)
    assert (chain3["batch_size"], chain3["context_length"], chain3["arrivals"]) == (1, 64, "together")
    assert plain["tokens_per_s"] == pytest.approx((3 / 6 + 3 / 20) / 2)
    assert chain3["tokens_per_s"] == pytest.approx((3 / 4 + 3 / 10) / 2)
    assert chain3["over"] == {PLAIN: pytest.approx(1.75), TRANSFORMERS: pytest.approx((9 / 4 + 3) / 2)}
    assert plain["over"][TRANSFORMERS] == pytest.approx((9 / 6 + 30 / 20) / 2)
    assert chain3["speedup"] == pytest.approx(4.0 / 2.5)
    assert chain3["speedup_interval"] is None  # both are of one question
    assert chain3["differing_answers"] == 1
    assert (chain3["tpc"], chain3["ttft_s"], theirs["ttit_s"]) == (2.0, 2.0, 6.5)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"temperature": 1.0}, [0, 1, None]),
        ({"temperature": 1.0, "engine": {"drafting": "multinomial"}}, [0, None, None]),
        ({"engine": {"drafting": "multinomial"}}, [0, 1, 0]),
    ],
)
def test_samples_with_greedy_drafts_are_compared_with_plain_decoding(changes, wanted):
    answered = {
        PLAIN: [[timed_answer([1, 2, 3], 2.0, [2.0, 2.0], 2)]],
        "chain3": [[timed_answer([1, 9, 3], 2.0, [2.0, 2.0])]],
        TRANSFORMERS: [[timed_answer([1, 2, 3], 3.0, [3.0, 3.0], 2)]],
    }
    rows = rows_of(latency_config(**changes), Cell(1, 64), answered, [timed_requests([7])])
    assert [row["differing_answers"] for row in rows] == wanted


def test_rows_without_decoding_are_one_clear_line():
    with pytest.raises(UserError, match="max_tokens=9: no answer has a second token"):
        rows_of(latency_config(), Cell(1, None), {PLAIN: [[timed_answer([1], 1.0, [], 0)]]}, [timed_requests([7])])


@pytest.mark.parametrize("size", [1, 2])
def test_a_speed_up_beyond_tpc_leaves_out_the_row_of_single_prompts(size):
    answered = {
        PLAIN: [[timed_answer([1, 2, 3], 1.0, [9.0, 9.0], 2)]],
        "chain3": [[timed_answer([1, 2, 3], 1.0, [1.0, 1.0])]],
    }
    cell = Cell(size, 64)
    rows = rows_of(latency_config(), cell, answered, [timed_requests([7])])
    found, wrong = sweep.checked(latency_config(), cell, rows)
    if size > 1:
        assert (found, wrong) == (rows, [])
    else:
        assert found == rows[:1]
        assert wrong[0].startswith("chain3, batch size 1, context 64: speed-up 9.000 exceeds 2.000 tokens per call")
