"""Drafters of every kind give the target's own tokens, whatever a request asks for and whatever else the engine does.

The kinds are those of tests/support/drafters.py. That tokens have the target's distribution is in test_lossless.py.
DESIGN sections 3.5, 3.7.
"""

import gc
import json
import weakref
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
from transformers import LogitsProcessorList

from eagle_train.inference import Engine, Output, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.requests import requests
from eagle_train.models.loading import TargetConfig, load_target
from tests.support.drafters import (
    FAMILIES,
    KINDS,
    LENGTH,
    PROMPTS,
    TOGETHER,
    answers,
    drawing,
    target_of,
    texts_of,
    with_several,
)
from tests.support.drafters_job import OF_ITS_OWN, outcomes
from tests.support.inside import pool_of, runner_of, scheduler_of
from tests.support.penalties import Penalties
from tests.support.processes import start_ranks
from tests.support.reference_answers import cut, token_ids
from tests.support.tiny import continued

GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
TIGHT = {"kv_tokens": 5 * BLOCK, "prefill_tokens": 7, "prefix_cache": True, "host_kv_tokens": 30 * BLOCK}
EVERYTHING = TIGHT | {"overlap": True}
SPELT = {"regex": r"(ab|cd){20}"}


def counts_of(outputs: list[Output]) -> list[int]:
    return list(chain.from_iterable(output.rounds for output in outputs))


def preemptions(engine: Engine) -> list:
    """Filled with the requests that lose their blocks."""
    lost, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: lost.append(sequence) or preempt(sequence)
    return lost


def check_left(engine: Engine) -> None:
    """No block and no request is left."""
    assert pool_of(engine).available == pool_of(engine).total
    assert not engine.has_unfinished


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_an_engines_memory_goes_with_its_last_name(kind):
    """Without a look for circles, which Python takes when it likes: a GPU has no room for two engines."""
    options = {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK}
    target, texts = target_of("llama"), texts_of("llama")
    gc.collect()
    gc.disable()
    try:
        engine = Engine(target, **options) if kind is None else KINDS[kind].engine(target, texts, **options)
        engine.generate(PROMPTS, GREEDY)
        memory = [weakref.ref(cache) for cache in runner_of(engine).stores]
        assert all(each() is not None for each in memory)
        del engine
        assert [each() for each in memory] == [None] * len(memory)
    finally:
        gc.enable()


GATE = "engine.gate"  # which has plans as tree=auto has
ALONE = [
    *((kind, "llama") for kind in KINDS),
    *((kind, family) for family in FAMILIES[1:] for kind in KINDS if kind not in (*TOGETHER, GATE)),
]


@pytest.mark.parametrize(("kind", "family"), ALONE)
def test_greedy_answers_are_those_of_transformers(kind, family):
    """Alone with others, and where requests are preempted, found again, read in parts and launched ahead; and each has
    the same rounds then."""
    given = KINDS[kind]
    calm = given.engine(target_of(family), texts_of(family)).generate(PROMPTS, GREEDY)
    assert token_ids(calm) == cut(answers(family), LENGTH)
    engine = given.engine(target_of(family), texts_of(family), **EVERYTHING)
    lost = preemptions(engine)
    for _ in range(2):  # kept beginnings are found by the second
        outputs = engine.generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers(family), LENGTH)
        assert given.remembers or [output.rounds for output in outputs] == [output.rounds for output in calm]
    assert max(counts_of(outputs)) > 1, "some drafts must be accepted"
    assert lost or len(counts_of(outputs)) < len(PROMPTS) * LENGTH / 2, "else answers end before memory is short"
    assert any(output.stats.cached_tokens for output in outputs)
    check_left(engine)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_greedy_answers_of_a_family_with_every_drafter(family):
    """As above, in one engine, each drafter with every other prompt; each is right at times."""
    pairs = [(row, name) for place, name in enumerate(TOGETHER) for row in range(place % 2, len(PROMPTS), 2)]
    own = [replace(GREEDY, drafter=name) for _, name in pairs]
    target, texts = target_of(family), texts_of(family)
    calm, engine = (with_several(target, texts, **options) for options in ({}, EVERYTHING | {"kv_tokens": 5 * BLOCK}))
    lost, rounds = preemptions(engine), []
    for each in (calm, engine):
        outputs = each.generate([PROMPTS[row] for row, _ in pairs], own)
        for (row, name), output in zip(pairs, outputs, strict=True):
            assert output.token_ids == answers(family)[row][:LENGTH], name
        rounds.append([output.rounds for output in outputs])
        check_left(each)
    for (_, name), ours, theirs in zip(pairs, *rounds, strict=True):
        assert KINDS[name].remembers or ours == theirs, name
    accepting = {name for (_, name), counts in zip(pairs, rounds[0], strict=True) if max(counts) > 1}
    assert accepting == set(TOGETHER)
    assert lost
    assert any(output.stats.cached_tokens for output in outputs)


# --- what requests may ask


def asked() -> list[SamplingParams]:
    """Of PROMPTS, one each. The last one's stop token comes as soon as it may: within a round's tokens, if these reach
    beyond the least length."""
    common, rare, last = answers("llama")[1][0], answers("llama")[2][2], answers("llama")[5]
    end = next(place for place in range(6, LENGTH) if last[place] not in last[:place])
    return [
        replace(GREEDY, repetition_penalty=1.3, logprobs=2),
        replace(GREEDY, logit_bias={5: 2, common: -100, 9: 1.5}, presence_penalty=2, logprobs=0),
        replace(GREEDY, stop_token_ids=(rare, 5), min_tokens=7, top_k=-1),
        replace(GREEDY, logprobs=1),
        replace(GREEDY, presence_penalty=0.9, frequency_penalty=0.7, repetition_penalty=0.9),
        replace(GREEDY, stop_token_ids=(last[end],), min_tokens=end, logprobs=3),
    ]


@cache
def by_transformers() -> list[list[int]]:
    """The answers to `asked`."""
    found = []
    for prompt, params in zip(PROMPTS, asked(), strict=True):
        own = Penalties(len(prompt), params.presence_penalty, params.frequency_penalty)
        how = {"logits_processor": LogitsProcessorList([own]), "repetition_penalty": params.repetition_penalty}
        if params.logit_bias:
            how["sequence_bias"] = {(token,): number for token, number in params.logit_bias.items()}
        if params.stop_token_ids:
            how |= {"eos_token_id": list(params.stop_token_ids), "min_new_tokens": params.min_tokens}
        found.append(continued(target_of("llama"), prompt, LENGTH, **how))
    return found


def drawn() -> list[SamplingParams]:
    """The same above temperature 0, with `min_p`, `top_k` and `top_p`, and several answers of two prompts."""
    return [
        replace(
            each,
            temperature=0.8,
            seed=row,
            min_p=0.03 * (row % 2),
            top_p=0.9 if row == 4 else 1.0,
            top_k=12 if row == 3 else each.top_k,
            n=2 if row in (0, 3) else 1,
        )
        for row, each in enumerate(asked())
    ]


@cache
def plainly(is_drawn: bool) -> list[Output]:
    """Without drafts, one by one."""
    params, engine = drawn() if is_drawn else asked(), Engine(target_of("llama"), max_batch_size=1)
    return [output for prompt, own in zip(PROMPTS, params, strict=True) for output in engine.generate([prompt], [own])]


def check_as_plain(outputs: list[Output], is_drawn: bool) -> None:
    """Tokens, ends, and log-probabilities up to rounding."""
    for ours, theirs in zip(outputs, plainly(is_drawn), strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for own, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert own.token_id == other.token_id
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in own.top] == [token for token, _ in other.top]


def test_the_reference_is_transformers_own():
    """And each parameter changes its answer."""
    assert token_ids(plainly(False)) == by_transformers()
    for row, (ours, plain) in enumerate(zip(by_transformers(), answers("llama"), strict=True)):
        assert (ours[:LENGTH] == plain[:LENGTH]) == (row == 3), row


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_requests_ask_they_get_plain_decodings_answers(kind):
    """Each parameter in one batch, in an engine with everything else; what is drawn finds the beginnings that were kept
    before."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, by_transformers(), strict=True)]
    engine = KINDS[kind].engine(target_of("llama"), texts, **EVERYTHING)
    for is_drawn in (False, True):
        outputs = engine.generate(PROMPTS, drawn() if is_drawn else asked())
        check_as_plain(outputs, is_drawn)
        by_chance = is_drawn and kind == "own, of texts"  # what stood in a text of drawn tokens seldom comes again
        assert by_chance or max(counts_of(outputs)) > 1, "some drafts must be accepted"
    assert any(output.stats.cached_tokens for output in outputs)
    check_left(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_where_texts_end_and_without_a_seed(kind, monkeypatch):
    """Stop strings that end within a round's tokens, and the seed that a request was given: always the same one, as of
    very many some draw a number so near to the border of two tokens that rounding decides."""
    monkeypatch.setattr(requests.secrets, "token_bytes", lambda size: bytes(range(size)))
    target = target_of("llama")
    row = next(row for row, answer in enumerate(answers("llama")) if min(answer[:LENGTH]) > 2)
    text = target.tokenizer.decode(answers("llama")[row][:LENGTH])
    engine = KINDS[kind].engine(target, texts_of("llama"))
    engine.generate(PROMPTS[row : row + 1], GREEDY)  # which some remember
    stops = [(text[start : start + 3], start in (0, 7)) for start in (0, 3, 7, 9)]
    params = [replace(GREEDY, stop=(stop, "~~~~~"), include_stop=is_included) for stop, is_included in stops]
    for (stop, is_included), output in zip(stops, engine.generate([PROMPTS[row]] * 4, params), strict=True):
        place = text.index(stop)
        assert output.text == text[: place + 3 * is_included]
        assert output.token_ids == answers("llama")[row][: place + 3]
    request = engine.add(PROMPTS[0], replace(GREEDY, temperature=1.0, seed=None))
    while engine.has_unfinished:
        engine.step()
    assert request.generated == seeded(request.params.seed)


@cache
def seeded(seed: int) -> list[int]:
    """Without drafts."""
    (plain,) = Engine(target_of("llama")).generate([PROMPTS[0]], replace(GREEDY, temperature=1.0, seed=seed))
    return plain.token_ids


# --- grammars


def spelt(temperature: float) -> list[SamplingParams]:
    """Of PROMPTS, one each: all but one with a grammar, and one with a penalty."""
    params = [
        replace(GREEDY, temperature=temperature, seed=row, grammar=None if row == 3 else SPELT)
        for row in range(len(PROMPTS))
    ]
    params[1] = replace(params[1], presence_penalty=1.5, logprobs=1)
    return params


@cache
def spelt_plainly(temperature: float) -> list[Output]:
    """Without drafts."""
    return Engine(target_of("llama")).generate(PROMPTS, spelt(temperature))


@pytest.mark.parametrize("kind", KINDS)
def test_grammars_hold_and_answers_are_plain_decodings(kind):
    """Beside requests that have none, and with a penalty and a preemption; what is drawn finds the beginnings that were
    kept before."""
    texts = [
        prompt + output.token_ids
        for temperature in (0.0, 1.0)
        for prompt, output in zip(PROMPTS, spelt_plainly(temperature), strict=True)
    ]
    engine = KINDS[kind].engine(target_of("llama"), texts, **EVERYTHING)
    for temperature in (0.0, 1.0):
        outputs = engine.generate(PROMPTS, spelt(temperature))
        assert token_ids(outputs) == token_ids(spelt_plainly(temperature))
        assert all(set(output.text) <= set("abcd") for row, output in enumerate(outputs) if row != 3)
        assert max(counts_of(outputs)) > 1, "some drafts must be accepted"


@pytest.mark.parametrize(("kind", "drafting"), drawing(KINDS))
def test_drawn_drafts_keep_to_a_grammar(kind, drafting):
    params = [replace(GREEDY, temperature=1.0, seed=row, grammar=SPELT) for row in range(len(PROMPTS))]
    outputs = KINDS[kind].engine(target_of("llama"), texts_of("llama"), drafting=drafting).generate(PROMPTS, params)
    assert all(set(output.text) <= set("abcd") and len(output.text) == LENGTH for output in outputs)
    assert len(counts_of(outputs)) < 0.8 * len(PROMPTS) * LENGTH


def test_grammars_guide_drafts_beside_other_drafters_too():
    """A request has the rounds that it has where its drafter is the only one."""
    target, texts, names = target_of("llama"), texts_of("llama"), ["eagle", "medusa", "layer_skip"]
    params = replace(GREEDY, grammar=SPELT)
    together = with_several(target, texts, names).generate(
        PROMPTS[:3], [replace(params, drafter=name) for name in names]
    )
    for row, (name, output) in enumerate(zip(names, together, strict=True)):
        (alone,) = KINDS[name].engine(target, texts).generate([PROMPTS[row]], params)
        assert (output.token_ids, output.rounds) == (alone.token_ids, alone.rounds), name
        assert max(output.rounds) > 1, name


# --- drafts that are drawn


NEIGHBOURS = [
    replace(GREEDY, temperature=0.9, seed=1),
    replace(GREEDY, temperature=0.9, seed=2, drafter="none"),
    GREEDY,
    replace(GREEDY, temperature=1.2, seed=3, grammar=SPELT),
    replace(GREEDY, temperature=0.7, seed=4, top_p=0.8, presence_penalty=0.5),
    replace(GREEDY, grammar=SPELT),
]


@pytest.mark.parametrize(("kind", "drafting"), [pair for pair in drawing(KINDS) if not KINDS[pair[0]].is_moody])
def test_a_seed_stands_for_the_same_tokens_beside_any_neighbours(kind, drafting):
    """One without a drafter, one at temperature 0, one with a grammar; each has its rounds too, and at temperature 0
    those of greedy drafting."""
    target, texts, given = target_of("llama"), texts_of("llama"), KINDS[kind]
    engine = given.engine(target, texts, drafting=drafting, max_batch_size=len(PROMPTS))
    alone = [engine.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, NEIGHBOURS, strict=True)]
    for rows in ([0, 1, 2, 3, 4, 5], [2, 0], [1, 3], [5, 4, 2]):
        outputs = engine.generate([PROMPTS[row] for row in rows], [NEIGHBOURS[row] for row in rows])
        for row, output in zip(rows, outputs, strict=True):
            assert (output.token_ids, output.rounds) == (alone[row].token_ids, alone[row].rounds), (rows, row)
    rows = (1, 2, 5)
    greedy = given.engine(target, texts).generate([PROMPTS[row] for row in rows], [NEIGHBOURS[row] for row in rows])
    for row, output in zip(rows, greedy, strict=True):
        assert (output.token_ids, output.rounds) == (alone[row].token_ids, alone[row].rounds)
    assert max(counts_of([alone[0], alone[3], alone[4]])) > 1, "some drafts must be accepted"


# --- drafters by request, ranks, compiled forwards


@pytest.mark.parametrize("options", [{}, EVERYTHING | {"kv_tokens": 9 * BLOCK}], ids=["calm", "everything"])
def test_requests_of_one_engine_with_every_drafter(options):
    """Parameters and drafters differ by request; rounds are those of an engine with that drafter alone."""
    target, names = target_of("llama"), TOGETHER
    engine = with_several(target, texts_of("llama"), **options)
    for is_drawn in (False, True):
        params = drawn() if is_drawn else asked()
        params = [replace(each, n=1) for each in params]
        plain = Engine(target).generate(PROMPTS, params)
        pairs = [(row, name) for row in range(len(PROMPTS)) for name in [*names, None, "none"][row % 2 :: 2]]
        own = [replace(params[row], drafter=name) for row, name in pairs]
        outputs = engine.generate([PROMPTS[row] for row, _ in pairs], own)
        for (row, name), output in zip(pairs, outputs, strict=True):
            assert output.token_ids == plain[row].token_ids, name
            assert name != "none" or set(output.rounds) == {1}
        accepting = {name for (_, name), output in zip(pairs, outputs, strict=True) if max(output.rounds) > 1}
        assert len(accepting) > len(names) / 2
    check_left(engine)


@pytest.mark.ranks
def test_two_ranks_answer_as_one_process_does(tmp_path):
    """That divide the target, or hold it each, with each kind of drafter."""
    target_of("llama").model.save_pretrained(tmp_path)
    target_of("llama").tokenizer.save_pretrained(tmp_path)
    whole = load_target(TargetConfig(str(tmp_path)), "cpu")
    alone = {"replicated": outcomes(whole, OF_ITS_OWN), "tensor": outcomes(whole)}
    start_ranks(2, "drafters_job", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["tensor"].keys() == KINDS.keys()
        for placement, outcome in found.items():
            assert outcome.keys() == alone[placement].keys()
            for kind, answer in outcome.items():
                assert answer == alone[placement][kind], (placement, kind, rank)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != GATE])
def test_compiled_forwards_give_the_same(kind, traced):
    """At temperature 0 and beside it."""
    target, given = target_of("llama"), KINDS[kind]
    params = [GREEDY if row % 2 else replace(each, n=1) for row, each in enumerate(drawn())]
    calm, compiled = (given.engine(target, texts_of("llama"), compile=is_on) for is_on in (False, True))
    assert target.compiled_forwards
    ours, theirs = compiled.generate(PROMPTS, params), calm.generate(PROMPTS, params)
    assert token_ids(ours) == token_ids(theirs)
    assert [output.rounds for output in ours] == [output.rounds for output in theirs]
