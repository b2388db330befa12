"""Statistics against numbers worked out by hand."""

import json
from dataclasses import replace

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Stats
from evals.bench import statistics
from evals.bench.report import warnings
from evals.bench.statistics import tpc_gain, tpc_interval
from tests.support.measuring import answer


def test_tpc_is_summed_before_it_is_divided():
    assert statistics.tpc([answer(calls=1, tokens=4), answer(calls=9, tokens=9)]) == 13 / 10
    assert statistics.tpc([answer()]) is None


def test_acceptance_is_summed_depth_by_depth():
    deep = answer(accepted_per_depth=[3, 1], drafted_per_depth=[4, 4])
    flat = answer(accepted_per_depth=[1], drafted_per_depth=[2])
    assert statistics.acceptance([deep, flat]) == [4 / 6, 1 / 4]
    assert statistics.conditional([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, None]


def test_repeated_ngrams():
    assert statistics.repeated_ngrams([[1, 2, 1, 2, 1]], n=2) == 2 / 4
    assert statistics.repeated_ngrams([list(range(8)) * 2, range(10), range(7)]) == 1 / (9 + 3)
    assert statistics.repeated_ngrams([range(7)]) == 0


@pytest.mark.parametrize(
    ("text", "is_loop"),
    [
        ([7] * 16, True),
        ([7] * 15, False),  # too short to tell
        ([*range(8), *[1, 2] * 4], True),  # the last half alone
        ([*range(9), *[1, 2] * 3, 1], False),  # less than half
        ([*range(9), *range(9), *range(9)], False),  # half of it is no two times nine
        ([*range(10), *range(5), *range(5)], True),
        ([*[1, 2] * 8, 3], False),  # it got out
        (range(200), False),
        ([], False),
    ],
)
def test_texts_that_end_in_a_loop(text, is_loop):
    """The last half is the same again and again, at least twice."""
    assert statistics.looping([text]) == is_loop
    assert statistics.looping([text, range(20)]) == is_loop / 2
    assert statistics.looping([]) == 0


def test_latency():
    batches = [
        [
            answer(ttft_s=0.5, intervals_s=[1.0, 2.0], calls=2),
            answer(ttft_s=1.5, intervals_s=[3.0] * 7, calls=7),
        ],
        [answer(ttft_s=1.0, intervals_s=[104.0], calls=1)],
    ]
    found = statistics.latency(batches)
    assert (found["ttft_s"], found["ttft_p50_s"]) == (1.0, 1.0)
    assert (found["ttit_s"], found["ttit_p50_s"]) == (12.8, 3.0)
    assert found["ttit_p99_s"] == pytest.approx(3.0 + 0.91 * 101)  # between the 9th and the 10th of ten
    assert found["rounds"] == 8  # a batch's rounds are its longest answer's
    seconds = {"prefill": 3.0, "drafting": 0.4, "validation": 1.6}
    found = statistics.stages(seconds, {"prefill": 2, "drafting": 5, "validation": 8}, batches=2)
    assert found["stage_ms_per_round"] == pytest.approx({"drafting": 50.0, "validation": 200.0})
    assert (found["prefill_ms_per_batch"], found["draft_latency_ms"]) == (1500, 80)
    assert "draft_latency_ms" not in statistics.stages(
        {"prefill": 1.0, "validation": 1.0}, {"validation": 1}, batches=1
    )


def test_speed_up_over_everything_and_the_median_batch():
    plain = [[answer([1, 2], intervals_s=[2.0] * 4)], [answer([3], intervals_s=[2.0])], [answer([3], intervals_s=[9])]]
    fast = [[answer([1, 2], intervals_s=[1.0] * 4)], [answer([4], intervals_s=[0.5])], [answer([3], intervals_s=[3])]]
    found = statistics.compare(plain, fast, 9)
    assert found["speedup"] == pytest.approx((19 / 6) / (7.5 / 6))
    assert found["speedup_batch_median"] == 3.0
    assert found["differing_answers"] == 1
    with pytest.raises(UserError, match=r"^max_tokens=1: no answer has a second token, so no decoding was measured"):
        statistics.compare([[answer([1])]], [[answer([1])]], 1)


@pytest.mark.usefixtures("few")
def test_a_speed_ups_interval_is_over_the_questions():
    """By tokens: of the first question a second each and a half, of the second, asked twice, two seconds and four."""
    plain = [[answer(line=1, intervals_s=[1.0] * 4)], [answer(line=2, intervals_s=[2.0])], [answer(line=2)]]
    other = [[answer(line=1, intervals_s=[0.5] * 8)], [answer(line=2, intervals_s=[4.0])], [answer(line=2)]]
    assert statistics.speedup_interval(plain, other) == pytest.approx((0.5, 2.0))
    assert statistics.speedup_interval(plain[1:], other[1:]) is None


@pytest.mark.usefixtures("few")
def test_a_speed_ups_interval_is_over_batches_of_several():
    """Each of two batches has a question that is twice as fast and one that is half as fast. Together they are as fast
    in one as in the other; asked again they tell no more, and one batch alone tells nothing."""
    plain = [[answer(line=line + place, intervals_s=[2.0] * 4) for place in (0, 1)] for line in (1, 3)]
    other = [
        [answer(line=line + place, intervals_s=[seconds] * 4) for place, seconds in enumerate((1.0, 4.0))]
        for line in (1, 3)
    ]
    assert statistics.speedup_interval(plain, other) == pytest.approx((0.8, 0.8))
    assert statistics.speedup_interval(plain[:1] * 2, other[:1] * 2) is None
    by_category = [[replace(each, question=replace(each.question, category="a")) for each in batch] for batch in other]
    assert statistics.groups(by_category, plain)[-1]["speedup_interval"] == pytest.approx((0.8, 0.8))


def test_of_five_questions_there_is_no_interval():
    """A bootstrap over so few has far less than 95 %: each kind of interval has the same least number."""
    counts = [[10 + line, 5] for line in range(6)]
    plain = [[answer(line=line, calls=2, tokens=2, intervals_s=[2.0] * 2)] for line in range(6)]
    other = [[answer(line=line, calls=1, tokens=2, intervals_s=[1.0] * (2 + line))] for line in range(6)]
    assert statistics.question_interval(counts[1:]) is statistics.speedup_interval(plain[1:], other[1:]) is None
    assert tpc_gain([counts[1:]], [counts[1:]], same_drafts=True) == {"tpc": 0, "low": None, "high": None}
    assert statistics.interval_of(tpc_interval([counts[1:]])) is None
    assert statistics.question_interval(counts) == statistics.interval_of(tpc_interval([counts]))
    assert statistics.speedup_interval(plain, other) == (2, 2)


def test_a_change_is_paired_by_question():
    """Each question has half as many calls again: its own TPC differs much from the others', and the change does not.
    What one side did not decode tells nothing."""
    counts = [[10 * line, 4] for line in range(1, 8)]
    more = [[tokens, calls * 3 // 2] for tokens, calls in counts]
    assert statistics.change_interval(more, counts) == pytest.approx((-1 / 3, -1 / 3))
    assert statistics.change_interval(more[:5], counts[:5]) is None
    assert statistics.change_interval([*more[:5], [0, 0], [0, 0]], counts) is None


def test_counts_and_groups():
    answers = [
        answer([1] * 5, "maths", 1, 1, "stop", calls=1, tokens=4),
        answer([1] * 6, "maths", 2, 1, "length", calls=4, tokens=5),
        answer([1] * 10, "art", 1, 2, "length", calls=3, tokens=9),
    ]
    found = statistics.counts(answers, max_tokens=10)
    assert found == {
        "questions": 2,
        "prompts": 3,
        "tokens": 18,
        "calls": 8,
        "mean_answer_tokens": 7,
        "finish_reasons": {"stop": 1, "context": 1, "length": 1},
    }
    tpc = {(group["category"], group["turn"]): group["tpc"] for group in statistics.groups([answers], [answers])}
    assert tpc == {
        ("art", 1): 3,
        ("art", 2): None,
        ("art", None): 3,
        ("maths", 1): 4,
        ("maths", 2): 5 / 4,
        ("maths", None): 9 / 5,
        (None, 1): 13 / 4,
        (None, 2): 5 / 4,
        (None, None): 18 / 8,
    }


@pytest.mark.usefixtures("few")
def test_a_group_has_intervals_over_its_own_questions():
    """Of one question there is none; plain decoding takes 2 s a token, drafts 1 s and 0.5 s."""
    own = [
        answer([1] * 5, "maths", 1, line, calls=calls, tokens=4, intervals_s=[seconds] * 4)
        for line, calls, seconds in ((1, 1, 0.5), (2, 4, 1.0))
    ] + [answer([1] * 5, "art", 1, 3, calls=2, tokens=4, intervals_s=[1.0] * 4)]
    plain = [
        replace(each, output=replace(each.output, stats=Stats(calls=4, tokens=4, intervals_s=[2.0] * 4)))
        for each in own
    ]
    found = {
        (group["category"], group["turn"]): group
        for group in statistics.groups([[each] for each in own], [[each] for each in plain])
    }
    maths, art = found["maths", None], found["art", None]
    assert (maths["tpc"], maths["tpc_interval"]) == (8 / 5, (1, 4))
    assert maths["speedup"] == pytest.approx(2 / 0.75)
    assert maths["speedup_interval"] == pytest.approx((2, 4))
    assert (art["tpc"], art["tpc_interval"], art["speedup"], art["speedup_interval"]) == (2, None, 2, None)
    low, high = found[None, None]["tpc_interval"]
    assert low < 12 / 7 < high


def test_ttit_over_time_is_of_the_tokens_that_came_then():
    """Two requests, the second a second later; two batches are pooled; nothing comes in the third window."""
    batch = [
        answer(ttft_s=0.5, intervals_s=[0.1, 0.3]),
        answer(ttft_s=0.5, intervals_s=[0.2, 2.0]),
    ]  # at 0.6, 0.9; 1.7, 3.7
    found = statistics.ttit_over_time([batch, [answer(ttft_s=0.0, intervals_s=[0.8])]], [[0.0, 1.0], [0.0]], 1.0)
    assert found == [pytest.approx((0.1 + 0.3 + 0.8) / 3), 0.2, None, 2.0]
    assert statistics.ttit_over_time([[answer()]], [[0.0]], 1.0) == []


def test_a_speed_up_beyond_tpc_is_an_error():
    with pytest.raises(UserError, match=r"2\.400 exceeds 2\.200 .* timing cannot be right"):
        statistics.check_timing({"tpc": 2.2, "speedup": 2.4, "speedup_batch_median": 1.0})
    statistics.check_timing({"tpc": 2.2, "speedup": 2.2, "speedup_batch_median": 2.3})


def test_a_speed_up_beyond_tpc_by_chance_is_none():
    """By no more than its interval, or where it has none by no more than 5 %."""
    statistics.check_timing({"tpc": 1.0, "speedup": 1.005, "speedup_interval": (0.98, 1.03)})
    statistics.check_timing({"tpc": 1.0, "speedup": 1.04, "speedup_interval": None})
    for wrong in ({"speedup": 1.03, "speedup_interval": (1.01, 1.05)}, {"speedup": 1.06, "speedup_interval": None}):
        with pytest.raises(UserError, match="timing cannot be right"):
            statistics.check_timing({"tpc": 1.0, **wrong})


@pytest.mark.parametrize(
    "found",
    [
        {"tree": "auto", "tpc": 1.0, "speedup": 1.005, "batch_size": 1, "acceptance_per_depth": [0.1]},
        {"rows": [{"decoding": "auto", "tpc": 1, "speedup": 1.1, "batch_size": 1, "acceptance_per_depth": [0.1]}]},
        {"speedups": {"auto": {"chain3": {"tpc": 1, "speedup": 1.1}, "chain1": None}}},
    ],
)
def test_a_speed_up_beyond_tpc_is_written_with_a_caution(found):
    (said,) = warnings(found)
    assert "more than tokens per call, which no draft can bring, is the speed-up of auto" in said
    assert warnings(json.loads(json.dumps(found).replace("1.005", "1.0").replace("1.1", "1"))) == []


@pytest.mark.usefixtures("few")
def test_a_gain_is_over_all_answers_and_its_interval_over_the_questions():
    base = {"answers": [[30, 15], [10, 10]]}  # 40 tokens in 25 calls
    better = {"answers": [[30, 12], [10, 8]]}
    found = tpc_gain([better["answers"]], [base["answers"]], same_drafts=False)
    assert found["tpc"] == pytest.approx(40 / 20 - 40 / 25)
    assert (found["low"], found["high"]) == pytest.approx((10 / 8 - 1, 30 / 12 - 30 / 15))  # one question, twice
    assert tpc_gain([base["answers"]], [base["answers"]], False) == {"tpc": 0.0, "low": 0.0, "high": 0.0}
    both = tpc_gain([better["answers"], base["answers"]], [base["answers"]] * 2, same_drafts=False)
    assert both["tpc"] == pytest.approx(80 / 45 - 80 / 50)


def test_intervals_are_over_seeds_too(monkeypatch):
    """Of one question, so that nothing but the seeds can differ; other seeds stand on either side of a gain."""
    monkeypatch.setattr(statistics, "FEWEST", 1)
    worse, better = [[10, 10]], [[20, 10]]
    assert tpc_interval([worse, better]) == {"tpc": 1.5, "low": 1.0, "high": 2.0}
    assert tpc_gain([worse, better], [worse, better], same_drafts=False) == {"tpc": 0.0, "low": -1.0, "high": 1.0}
    halved = [[[10, 5]], [[20, 5]]]  # of the same two drafts, with a better tree
    assert tpc_gain([worse, better], [worse, better], same_drafts=True) == {"tpc": 0.0, "low": 0.0, "high": 0.0}
    assert tpc_gain(halved, [worse, better], same_drafts=True) == {"tpc": 1.5, "low": 1.0, "high": 2.0}
    assert tpc_interval([worse, worse]) == {"tpc": 1.0, "low": 1.0, "high": 1.0}
