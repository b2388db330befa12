"""Requests arrive, finish and are cancelled at any time, with chunked prefill: each gets the target's tokens."""

import random
from collections import Counter

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams, batch
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.cache.prefix_cache import HostKV
from eagle_train.inference.drafters.drafter import Pending
from tests.support.cache_checks import check_cache, fresh, spoil
from tests.support.inside import active_in, drafter_of, inside, pool_of, runner_of, scheduler_of
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, answers, cut, fail_at, guide, token_ids
from tests.support.tiny import continued, random_tokens, shared_target, tiny_draft

TWICE = [*PROMPTS, *PROMPTS]


def run(engine: Engine, seed: int, cancelling: bool) -> tuple[list, dict]:
    """TWICE, added at random between steps, some of them cancelled. Returns the requests, and the updates of each."""
    rng, told, requests = random.Random(seed), {}, []
    while len(requests) < len(TWICE) or engine.has_unfinished:
        for prompt in TWICE[len(requests) :][: rng.randint(0, 2)]:
            requests.append(engine.add(prompt, GREEDY))
        if cancelling and requests and rng.random() < 0.3:
            engine.cancel(rng.choice(requests))
        for update in engine.step():
            tokens, finished = told.setdefault(update.request, ([], []))
            assert update.token_ids
            assert not finished
            tokens += update.token_ids
            finished += [update.output] if update.output else []
    return requests, told


@pytest.mark.parametrize("cancelling", [False, True], ids=["kept", "cancelled"])
@pytest.mark.parametrize("kv_tokens", [None, 5 * BLOCK], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    ("family", "prefill_tokens"), [("llama", 1), ("llama", None), ("gemma2", 5)], ids=["1", "whole", "gemma2-5"]
)
def test_each_gets_its_tokens_whatever_else_goes_on(family, prefill_tokens, kv_tokens, cancelling):
    target, rng, reasons = shared_target(family), random.Random(4), Counter()
    truth = answers(family) * 2
    for seed in range(2):
        draft = tiny_draft(target)
        engine = Engine(target, draft, "d3_bf2", max_batch_size=3, kv_tokens=kv_tokens, prefill_tokens=prefill_tokens)
        guide(engine, truth, lambda _: rng.randint(0, 3))
        requests, told = run(engine, seed, cancelling)
        pool = pool_of(engine)
        assert sorted(pool.free) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))
        for request, whole in zip(requests, cut(truth), strict=True):
            tokens, outputs = told.get(request, ([], []))
            reasons[request.finish_reason] += 1
            assert request.generated == tokens
            if request.finish_reason == "cancelled":
                assert tokens == whole[: len(tokens)]
                assert not outputs
                assert engine.output(request).token_ids == tokens
            else:
                assert tokens == whole == outputs[0].token_ids
    assert reasons["length"] > 4
    assert (reasons["cancelled"] > 2) == cancelling


@pytest.mark.parametrize("prefill_tokens", [1, 3, 7])
@pytest.mark.parametrize("first_token", ["self_fusion", "skip"])
def test_caches_of_prompts_prefilled_in_chunks(first_token, prefill_tokens):
    """At the start of every round they are those of a fresh prefill; unwritten slots are not read."""
    target, checked = shared_target("llama"), []
    draft = tiny_draft(target, first_token=first_token)
    engine = Engine(target, draft, "chain3", max_batch_size=3, prefill_tokens=prefill_tokens)
    grow = drafter_of(engine).grow

    def checking(plan, root_hidden, *rest):
        for sequence in active_in(engine):
            tokens = sequence.prompt + sequence.generated
            check_cache(drafter_of(engine).cache, sequence, fresh(target, draft, tokens)[3])
            check_cache(runner_of(engine).cache, sequence, fresh(target, draft, tokens[:-1])[2])
            checked.append(sequence.index)
        return grow(plan, root_hidden, *rest)

    drafter_of(engine).grow = checking
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
        spoil(engine)
    assert [request.generated for request in requests] == cut(answers("llama"))
    assert set(checked) == set(range(len(PROMPTS)))


def test_who_decodes_does_not_wait_for_a_long_prompt():
    target = shared_target("llama")
    engine = Engine(target, max_batch_size=2, prefill_tokens=8)
    short, long = engine.add([1], GREEDY), engine.add(random_tokens(30)[0], GREEDY)
    told = [[(update.request, len(update.token_ids)) for update in engine.step()] for _ in range(6)]
    assert told[:4] == [[(short, 1)]] * 4  # the prompt's 30 tokens take four chunks; a first token waits for no round
    assert told[4:] == [[(long, 1)], [(short, 1), (long, 1)]]


def test_sampled_tokens_do_not_depend_on_company():
    target = shared_target("llama")
    draft = tiny_draft(target)
    params = [SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=seed, ignore_eos=True) for seed in range(5)]
    alone = []
    for prompt, own in zip(PROMPTS, params, strict=True):
        alone += Engine(target, draft, "d3_bf2").generate([prompt], [own])
    engine, requests = Engine(target, draft, "d3_bf2", max_batch_size=3, prefill_tokens=4), []
    for prompt, own in zip(PROMPTS, params, strict=True):
        requests.append(engine.add(prompt, own))
        engine.step()
    while engine.has_unfinished:
        engine.step()
    assert [request.generated for request in requests] == token_ids(alone)


def test_an_engine_is_used_again_with_longer_requests():
    """Its store grows and keeps its contents."""
    target = shared_target("llama")
    engine = Engine(target, tiny_draft(target), max_batch_size=2)
    short = engine.add(PROMPTS[3], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    engine.step()
    before = pool_of(engine).total
    rest = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
    assert pool_of(engine).total > before
    while engine.has_unfinished:
        engine.step()
    truth = cut(answers("llama"))
    assert [short.generated, *(request.generated for request in rest)] == [truth[3], *truth[:3]]
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == truth


def test_generate_refuses_while_requests_are_unfinished():
    engine = Engine(shared_target("llama"))
    engine.add(PROMPTS[0], GREEDY)
    with pytest.raises(UserError, match=r"^prompts: other requests are unfinished; call step until they are done$"):
        engine.generate(PROMPTS, GREEDY)
    assert len(scheduler_of(engine).unfinished) == 1


def test_what_begins_a_text_is_prefilled_apart_from_what_goes_on(monkeypatch):
    """Of prompts of 12 tokens, 28 at a time: the third one's rest is no batch with the one that begins then."""
    target, batches = shared_target("llama"), []
    engine = Engine(target, max_batch_size=4, prefill_tokens=28)
    prefill = runner_of(engine).prefill

    def noted(prefix, texts, *others):
        batches.append((prefix.lengths.tolist(), [len(text) for text in texts]))
        return prefill(prefix, texts, *others)

    monkeypatch.setattr(runner_of(engine), "prefill", noted)
    prompts = random_tokens(12, 12, 12, 12)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    found = token_ids(engine.generate(prompts, params))
    assert batches == [([0], [4]), ([0, 0], [12, 12]), ([0], [12]), ([4], [8])]
    assert found == [token_ids(Engine(target).generate([prompt], params))[0] for prompt in prompts]


def test_prompts_of_similar_length_are_prefilled_together(monkeypatch):
    """All in one step, with less padding than tokens."""
    target, shapes = shared_target("llama"), []
    own = target.hidden_states
    monkeypatch.setattr(
        target, "hidden_states", lambda tokens, *given: (shapes.append(tokens.shape), own(tokens, *given))[1]
    )
    prompts = random_tokens(60, 5, 30, 7, 4, 1, 33)
    engine = Engine(target, prefill_tokens=None)
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    assert {update.request for update in engine.step()} == set(requests)
    assert sorted(map(tuple, shapes)) == [(1, 1), (1, 30), (2, 60), (3, 7)]
    shapes.clear()
    while engine.has_unfinished:
        engine.step()
    assert [request.generated for request in requests] == [continued(target, prompt, LENGTH) for prompt in prompts]


@pytest.mark.parametrize(
    ("part", "method", "call"),
    [
        ("runner", "prefill", 2),
        ("runner", "first_tokens", 1),
        ("batch", "add", 1),
        ("runner", "draft", 2),
        ("runner", "validate", 2),
        ("runner", "sample", 2),
        ("runner", "commit", 2),
    ],
)
def test_a_step_that_failed_loses_nobody(monkeypatch, part, method, call):
    """Short and long prompts are separate batches: the short ones were prefilled when the long ones' batch failed."""
    prompts = random_tokens(5, 40, 6, 45)
    target, params = shared_target(), SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = token_ids(Engine(target, max_batch_size=4).generate(prompts, params))
    engine = Engine(target, tiny_draft(target), "d3_bf2", max_batch_size=4)
    guide(engine, [tokens + [0] * 4 for tokens in wanted], lambda _: 2)
    fail_at(monkeypatch, runner_of(engine) if part == "runner" else inside(engine).batch, method, call)
    requests = [engine.add(prompt, params) for prompt in prompts]
    told = {request: [] for request in requests}

    def go_on() -> None:
        while engine.has_unfinished:
            for update in engine.step():
                told[update.request] += update.token_ids

    with pytest.raises(MemoryError):
        go_on()
    go_on()
    assert [request.generated for request in requests] == list(told.values()) == wanted
    assert len(pool_of(engine).free) == pool_of(engine).total


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        *((Pending, "rows", call) for call in (1, 2, 3, 4)),
        *((batch, "sampling_of", call) for call in (2, 3)),
        (HostKV, "put", 1),
        (HostKV, "put", 3),
        (HostKV, "get", 1),
    ],
)
def test_a_step_that_failed_between_its_stages_loses_nobody(monkeypatch, owner, name, call):
    """Where rows are dropped, of finished or preempted requests, and where blocks are copied to the host or back."""
    target, told, failed = shared_target(), {}, 0
    long = random_tokens(40, 41, 42)
    prompts = [*long, long[0]]
    params = [SamplingParams(max_tokens=12, temperature=i % 2, seed=i, ignore_eos=True) for i in range(len(prompts))]
    wanted = token_ids(Engine(target, max_batch_size=4).generate(prompts, params))
    fail_at(monkeypatch, owner, name, call)
    engine = Engine(target, max_batch_size=2, kv_tokens=7 * BLOCK, prefix_cache=True, host_kv_tokens=20 * BLOCK)
    requests = [engine.add(*each) for each in zip(prompts, params, strict=True)]
    for _ in range(50):
        try:
            updates = engine.step()
        except MemoryError:
            failed += 1
            continue
        for update in updates:
            told[update.request] = told.get(update.request, []) + update.token_ids
    assert (failed, engine.has_unfinished) == (1, False)
    assert [request.generated for request in requests] == [told[request] for request in requests] == wanted
    pool = pool_of(engine)
    assert sorted([*pool.free, *pool.idle]) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))
    assert set(pool.block_of.values()) == set(pool.hash_of) == set(pool.idle)
