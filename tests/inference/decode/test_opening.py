"""Which requests have drafters: what drafts save against what reading prompts for them takes, and when to try again."""

import pytest

from eagle_train.inference import Eagle, Engine, SamplingParams
from eagle_train.inference.decode.adaptive import Adaptive
from eagle_train.inference.decode.opening import Lengths, Opening
from eagle_train.inference.drafters.ngram import Ngram
from eagle_train.inference.lookup.ngrams import NgramOptions
from tests.support.inside import inside
from tests.support.reference_answers import PROMPTS
from tests.support.tiny import shared_target, tiny_draft


def opened(opening: Opening, requests: int, most: int = 100, rows: int = 1, may_try: bool = False) -> list[bool]:
    return [opening.opens(most, rows, may_try) for _ in range(requests)]


def of_prompts(drafted: float, tokens: int, answer: int | None = None) -> Opening:
    """A token takes 1 s, with drafts `drafted`; reading a token of a prompt takes 1 s too."""
    opening = Opening(lambda rows: (1.0, drafted), lambda read: read)
    opening.lengths.read(tokens, 1)
    if answer is not None:
        for _ in range(1000):
            opening.lengths.answered(answer)
    return opening


@pytest.mark.parametrize(("tokens", "pays"), [(40, True), (48, True), (50, False), (60, False)])
def test_drafts_must_save_more_than_reading_the_prompt_takes(tokens, pays):
    """Of 100 s they save 50, and must save 1 more than reading takes."""
    assert opened(of_prompts(0.5, tokens), 3) == [pays] * 3


def test_long_answers_pay_for_what_short_ones_do_not():
    assert opened(of_prompts(0.5, 40, answer=90), 2) == [True] * 2
    assert opened(of_prompts(0.5, 40, answer=70), 2) == [False] * 2
    assert opened(of_prompts(0.5, 40, answer=90), 2, most=70) == [False] * 2  # a request ends where it must


def test_drafts_that_come_back_must_save_more_than_those_that_stay():
    drafted = [1.0]
    opening = Opening(lambda rows: (1.0, drafted[0]), lambda read: 0.0)
    found = []
    for drafted[0] in (0.98, 1.0, 0.98, 0.96, 0.98, 1.0):
        found += opened(opening, 1)
    assert found == [True, False, False, True, True, False]


def test_what_is_saved_is_that_of_the_batch_sizes_that_come():
    """Drafts double the rate of one row, and make four slower: by how many tokens come of each."""
    for alone, pays in ((10, False), (90, True)):
        opening = Opening(lambda rows: (1.0, 0.5 if rows == 1 else 1.2), lambda read: 0.0)
        for place in range(100):
            opening.decoded(1 if place < alone else 4)
        assert opened(opening, 1, rows=4) == [pays]


@pytest.mark.parametrize(("drafted", "gap"), [(1.02, 8), (1.05, 10), (3.0, 16)])
def test_as_many_as_a_batch_try_again_the_later_the_more_it_loses(drafted, gap):
    rows = 4
    found = opened(
        Opening(lambda rows: (1.0, drafted), lambda read: 0.0), 2 * rows * (1 + gap), rows=rows, may_try=True
    )
    assert found == ([True] * rows + [False] * rows * gap) * 2


def test_nothing_is_tried_before_its_time():
    opening = Opening(lambda rows: (1.0, 1.5), lambda read: 0.0)
    assert opened(opening, 1000, rows=2) == [False] * 1000
    assert opened(opening, 1, rows=2, may_try=True) == [True]
    assert opened(opening, 2, rows=2) == [True, False]  # a batch that began is made whole


def test_lengths_are_means_of_the_last_requests():
    lengths = Lengths()
    assert (lengths.prompt, lengths.answer(70)) == (0.0, 70)
    for _ in range(1000):
        lengths.read(30, 0)
        lengths.read(20, 1)  # a prompt in two pieces
        lengths.answered(40)
    assert lengths.prompt == pytest.approx(50, rel=0.02)
    assert lengths.answer(1000) == pytest.approx(40, abs=16)
    assert lengths.answer(10) == 10


# --- in an engine


def made(**options) -> Engine:
    target = shared_target("llama")
    return Engine(target, Eagle(tiny_draft(target), target), "chain2", gate=True, max_batch_size=2, **options)


def test_a_request_is_decided_on_when_it_is_admitted(monkeypatch):
    """Not when it arrives: what the first ones teach counts for those that wait."""
    asked = []
    monkeypatch.setattr(Adaptive, "opens", lambda self, most, rows: asked.append((most, rows)) or len(asked) < 3)
    engine = made()
    requests = [engine.add(prompt, SamplingParams(max_tokens=4 + place)) for place, prompt in enumerate(PROMPTS[:4])]
    assert asked == []
    engine.step()
    assert asked == [(4, 2), (5, 2)]
    while engine.has_unfinished:
        engine.step()
    assert [most for most, _ in asked] == [4, 5, 6, 7]
    assert [request.drafter for request in requests] == ["eagle", "eagle", None, None]


def test_what_requests_read_and_write_is_noted():
    engine = made()
    prompt = PROMPTS[0]
    engine.generate([prompt] * 6, SamplingParams(max_tokens=5, ignore_eos=True))
    lengths = inside(engine).adaptive.opening.lengths
    assert lengths.prompt == pytest.approx(len(prompt))
    assert lengths.answer(5) == pytest.approx(5)
    assert lengths.answer(1000) < 200


def test_requests_that_are_cancelled_while_they_wait_are_no_short_answers(monkeypatch):
    engine = made()
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS[:4], SamplingParams(max_tokens=5))
    assert not engine.has_unfinished
    assert inside(engine).adaptive.opening.lengths.answer(1000) == 1000


def test_a_prompt_that_is_timed_fits_the_context(monkeypatch):
    read, target = [], shared_target("llama")
    own = Eagle.prefill
    monkeypatch.setattr(Eagle, "prefill", lambda self, *given: read.append(given[2].max().item()) or own(self, *given))
    made()
    assert sorted(set(read)) == [target.max_positions // 16 - 1, target.max_positions - 1]


def test_a_cached_prompt_is_not_read():
    engine = made(prefix_cache=True)
    long = [3 + place % 50 for place in range(100)]
    for _ in range(40):
        engine.generate([long], SamplingParams(max_tokens=2, ignore_eos=True))
    assert inside(engine).adaptive.opening.lengths.prompt < 50


def test_reading_a_prompt_is_timed_for_drafters_with_caches_alone():
    engine = made()
    read = inside(engine).adaptive.opening._read_seconds
    assert 0 < read(16) <= read(256)
    assert read(0) == 0
    ngrams = Engine(shared_target("llama"), Ngram(NgramOptions(3, 3)), "chain2", gate=True)
    assert inside(ngrams).adaptive.opening._read_seconds(256) == 0
