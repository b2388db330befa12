"""Which requests have drafters: what drafts save against what reading prompts for them takes, and when to try again."""

import time
from contextlib import contextmanager

import pytest

from eagle_train.inference import Eagle, Engine, SamplingParams
from eagle_train.inference.decode.adaptive import Adaptive
from eagle_train.inference.decode.opening import Lengths, Opening
from eagle_train.inference.decode.round_costs import RoundCosts
from eagle_train.inference.drafters.ngram import Ngram
from eagle_train.inference.lookup.ngrams import NgramOptions
from eagle_train.inference.runner import Runner
from tests.support.inside import inside
from tests.support.reference_answers import PROMPTS
from tests.support.tiny import shared_target, tiny_draft


def opened(opening: Opening, requests: int, most: int = 100, rows: int = 1, may_try: bool = False) -> list[bool]:
    return [opening.opens("one", most, rows, may_try) for _ in range(requests)]


def of_prompts(drafted: float, tokens: int, answer: int | None = None) -> Opening:
    """A token takes 1 s, with drafts `drafted`; reading a token of a prompt takes 1 s too. `answer`: tokens."""
    opening = Opening(lambda rows: (1.0, drafted), lambda drafter, tokens: tokens)
    opening.lengths.read(tokens, 1)
    if answer is not None:
        for _ in range(1000):
            opening.lengths.answered(answer)
    return opening


@pytest.mark.parametrize(("tokens", "pays"), [(40, True), (48, True), (50, False), (60, False)])
def test_drafts_must_save_more_than_reading_the_prompt_takes(tokens, pays):
    """Of 100 s for what follows the first token they save 50, and must save 1 more than reading takes."""
    assert opened(of_prompts(0.5, tokens), 3, most=101) == [pays] * 3


def test_a_request_of_one_token_has_no_drafter():
    """It comes from the prompt, and says nothing of drafts."""
    opening = of_prompts(0.1, 0)
    assert opened(opening, 5, most=1, may_try=True) == [False] * 5
    assert opened(opening, 1, most=2) == [True]
    trying = Opening(lambda rows: (1.0, 1.5), lambda drafter, tokens: 0.0)
    assert opened(trying, 5, most=1, may_try=True) == [False] * 5
    assert opened(trying, 2, most=50, may_try=True) == [True, False]


def test_what_reading_takes_is_that_of_the_drafter_which_a_request_names():
    opening = Opening(lambda rows: (1.0, 0.9), lambda drafter, tokens: 50.0 if drafter == "reads" else 0.0)
    asked = ["reads", "lookup", "lookup", "reads"]
    assert [opening.opens(name, 100, 1, False) for name in asked] == [False, True, True, False]


def test_long_answers_pay_for_what_short_ones_do_not():
    assert opened(of_prompts(0.5, 40, answer=90), 2) == [True] * 2
    assert opened(of_prompts(0.5, 40, answer=70), 2) == [False] * 2
    assert opened(of_prompts(0.5, 40, answer=90), 2, most=70) == [False] * 2  # a request ends where it must


def test_drafts_that_come_back_must_save_more_than_those_that_stay():
    drafted = [1.0]
    opening = Opening(lambda rows: (1.0, drafted[0]), lambda drafter, tokens: 0.0)
    found = []
    for drafted[0] in (0.98, 1.0, 0.98, 0.96, 0.98, 1.0):
        found += opened(opening, 1)
    assert found == [True, False, False, True, True, False]


def test_what_is_saved_is_that_of_the_batch_sizes_that_come():
    """Drafts double the rate of one row, and make four slower: by how many tokens come of each."""
    for alone, pays in ((10, False), (90, True)):
        opening = Opening(lambda rows: (1.0, 0.5 if rows == 1 else 1.2), lambda drafter, tokens: 0.0)
        for place in range(100):
            opening.decoded(1 if place < alone else 4)
        assert opened(opening, 1, rows=4) == [pays]


@pytest.mark.parametrize(("drafted", "gap"), [(1.02, 8), (1.05, 10), (3.0, 16)])
def test_as_many_as_a_batch_try_again_the_later_the_more_it_loses(drafted, gap):
    rows = 4
    found = opened(
        Opening(lambda rows: (1.0, drafted), lambda drafter, tokens: 0.0), 2 * rows * (1 + gap), rows=rows, may_try=True
    )
    assert found == ([True] * rows + [False] * rows * gap) * 2


def test_nothing_is_tried_before_its_time():
    opening = Opening(lambda rows: (1.0, 1.5), lambda drafter, tokens: 0.0)
    assert opened(opening, 1000, rows=2) == [False] * 1000
    assert opened(opening, 1, rows=2, may_try=True) == [True]
    assert opened(opening, 2, rows=2) == [True, False]  # a batch that began is made whole


def test_lengths_are_means_of_the_last_requests():
    lengths = Lengths()
    assert (lengths.prompt, lengths.decoded(70)) == (0.0, 69)
    for _ in range(1000):
        lengths.read(30, 0)
        lengths.read(20, 1)  # a prompt in two pieces
        lengths.answered(40)
    assert lengths.prompt == pytest.approx(50, rel=0.02)
    assert lengths.decoded(1000) == pytest.approx(39, abs=16)
    assert lengths.decoded(10) == 9


# --- in an engine


def made(**options) -> Engine:
    target = shared_target("llama")
    return Engine(target, Eagle(tiny_draft(target), target), "chain2", gate=True, max_batch_size=2, **options)


def test_a_request_is_decided_on_when_it_is_admitted(monkeypatch):
    """Not when it arrives: what the first ones teach counts for those that wait."""
    asked = []
    monkeypatch.setattr(
        Adaptive, "opens", lambda self, drafter, most, rows: asked.append((most, rows)) or len(asked) < 3
    )
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
    assert lengths.decoded(5) == pytest.approx(4)
    assert lengths.decoded(1000) < 200


def test_requests_that_are_cancelled_while_they_wait_are_no_short_answers(monkeypatch):
    engine = made()
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS[:4], SamplingParams(max_tokens=5))
    assert not engine.has_unfinished
    assert inside(engine).adaptive.opening.lengths.decoded(1000) == 999


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
    target = shared_target("llama")
    drafters = {"ngram": Ngram(NgramOptions(3, 3)), "eagle": Eagle(tiny_draft(target), target)}
    read = inside(Engine(target, drafters, "chain2", gate=True)).adaptive.opening._read_seconds
    assert 0 < read("eagle", 16) <= read("eagle", 256)
    assert read("eagle", 0) == 0
    assert read("ngram", 256) == 0


def test_prompts_are_timed_with_the_kernels_and_threads_of_service(monkeypatch):
    asked, own, read = [], Runner.resources, Eagle.prefill

    @contextmanager
    def resources(self, rows):
        with own(self, rows):
            asked.append(rows)
            yield
            asked.append(None)

    def prefill(self, *given):
        assert asked[-1] == given[1].numel()
        return read(self, *given)

    monkeypatch.setattr(Runner, "resources", resources)
    monkeypatch.setattr(Eagle, "prefill", prefill)
    made()
    assert len([rows for rows in asked if rows is not None and rows > 8]) == 3


def test_rounds_without_any_drafter_are_timed_as_plain_ones(monkeypatch):
    seen, own = [], RoundCosts.observe
    monkeypatch.setattr(RoundCosts, "observe", lambda self, plan, *given: seen.append(plan) or own(self, plan, *given))
    engine = made()
    engine.generate(PROMPTS[:2], SamplingParams(max_tokens=20, ignore_eos=True, drafter="none"))
    assert len(seen) >= 15
    assert all(plan is inside(engine).adaptive.plain for plan in seen)


def test_what_a_caller_does_between_steps_is_no_part_of_a_round(monkeypatch):
    """With a round in flight it would be."""
    took, own = [], Adaptive.observe
    monkeypatch.setattr(Adaptive, "observe", lambda self, *given: took.append(given[-1]) or own(self, *given))
    engine = made(overlap=True)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, drafter="none"))
    for place in range(30):
        if place >= 10:
            time.sleep(0.2)
        engine.step()
    assert [each is None for each in took[-15:]] == [True] * 15
    assert any(each is not None for each in took[:10])
    assert all(each < 0.2 for each in took if each is not None)


def test_a_request_without_a_drafter_finds_the_targets_part_of_a_drafters_blocks(monkeypatch):
    monkeypatch.setattr(Adaptive, "opens", lambda self, drafter, most, rows: most == 7)
    engine, prompt = made(prefix_cache=True), [3 + place % 50 for place in range(100)]
    alone = Engine(shared_target("llama")).generate([prompt], SamplingParams(max_tokens=7, ignore_eos=True))[0]
    for most, drafter, cached in ((7, "eagle", 0), (6, None, 96), (6, None, 96)):
        request = engine.add(prompt, SamplingParams(max_tokens=most, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
        assert (request.drafter, request.stats.cached_tokens) == (drafter, cached)
        assert request.generated == alone.token_ids[:most]
