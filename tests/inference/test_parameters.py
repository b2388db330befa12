"""What a request asks for beside temperature, top-k and top-p: the answers of transformers' own processors, whatever is
drafted and whatever else the engine does. DESIGN sections 3.7, 3.9.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from transformers import LogitsProcessorList

from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, Output, RemotePrefill, SamplingParams, dynamic
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.sampling import DRAFT_MODES
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.requests.requests import Requests, params_of
from eagle_train.models.target import Target
from tests.support.graph_recorder import recorded
from tests.support.inside import inside, runner_of, scheduler_of
from tests.support.local_prefill import LocalPrefill
from tests.support.local_prefill import a_draft as draft_elsewhere
from tests.support.oracle import Oracle
from tests.support.penalties import Penalties
from tests.support.reference_answers import LENGTH, PROMPTS, TREES, answers, cut, guide, token_ids
from tests.support.tiny import (
    continued,
    random_tokens,
    shared_target,
    tiny_draft,
    tiny_target,
    tiny_tokenizer,
    trained_draft,
)

ENGINES = {
    "alone": {"max_batch_size": 1},
    "mixed": {"max_batch_size": 3},
    "overlap": {"max_batch_size": 3, "overlap": True},
    "tight": {"max_batch_size": 3, "kv_tokens": 3 * BLOCK, "overlap": True},
    "chunks": {"max_batch_size": 3, "prefill_tokens": 4, "prefix_cache": True},
}


def stop_of(row: int, family: str = "llama") -> int:
    """A token that comes early in the answer without parameters."""
    return answers(family)[row][2]


def asked(family: str = "llama") -> list[SamplingParams]:
    """Of PROMPTS, one each; the last but one has nothing but a length."""
    plain = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return [
        replace(plain, repetition_penalty=1.3),
        replace(plain, logit_bias={5: 2, answers(family)[1][0]: -100, 9: 1.5}, presence_penalty=2),
        replace(plain, stop_token_ids=(stop_of(2, family), 5), min_tokens=7),
        plain,
        replace(plain, presence_penalty=0.9, frequency_penalty=0.7, repetition_penalty=0.9),
    ]


@cache
def by_transformers(family: str = "llama") -> tuple[list[int], ...]:
    """The answers to `asked`, and a little more of those that end at a length."""
    target, found = shared_target(family), []
    for prompt, params in zip(PROMPTS, asked(family), strict=True):
        penalties = Penalties(len(prompt), params.presence_penalty, params.frequency_penalty)
        how = {"logits_processor": LogitsProcessorList([penalties])}
        if params.repetition_penalty != 1:
            how["repetition_penalty"] = params.repetition_penalty
        if params.logit_bias:
            how["sequence_bias"] = {(token,): number for token, number in params.logit_bias.items()}
        if params.stop_token_ids:
            how |= {"eos_token_id": list(params.stop_token_ids), "min_new_tokens": params.min_tokens}
        length = LENGTH if params.stop_token_ids else LENGTH + 10
        found.append(continued(target, prompt, length, **how))
    return tuple(found)


def truth() -> list[list[int]]:
    """As drafts are to be guided: longer than any answer."""
    return [tokens + [0] * (LENGTH + 10 - len(tokens)) for tokens in by_transformers()]


def preemptions(engine: Engine) -> list:
    """Filled with the requests that lose their blocks."""
    lost, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: lost.append(sequence) or preempt(sequence)
    return lost


def test_the_reference_is_worth_it():
    """Each parameter changes its answer, and the stop token would come too early."""
    for row, (ours, plain) in enumerate(zip(by_transformers(), answers("llama"), strict=True)):
        assert (ours[:LENGTH] == plain[:LENGTH]) == (row == 3), row
    assert 7 < len(by_transformers()[2]) <= LENGTH


# Each engine with each tree, for greedy answers or for drawn ones.
EACH = [(how, tree, (row + place) % 2) for row, how in enumerate(ENGINES) for place, tree in enumerate(TREES)]


@pytest.mark.parametrize(("how", "tree"), [(how, tree) for how, tree, is_drawn in EACH if not is_drawn])
def test_greedy_answers_are_those_of_transformers(how, tree):
    rng, rounds, lost = random.Random(0), [], []
    for depth_of in (lambda _: 3, lambda _: rng.randint(0, 3)):
        engine = Engine(shared_target(), tiny_draft(shared_target()), tree, **ENGINES[how])
        guide(engine, truth(), depth_of)
        lost.append(preemptions(engine))
        outputs = engine.generate(PROMPTS, asked())
        assert token_ids(outputs) == cut(by_transformers())
        rounds += [n for output in outputs for n in output.rounds]
    assert {1, 2, 3} <= set(rounds)
    assert any(lost) == (how == "tight")


def test_min_p_1_is_that_of_transformers():
    """With which all that is drawn is the most likely token, in transformers too."""
    how = {"do_sample": True, "min_p": 1.0, "repetition_penalty": 1.3, "top_k": 0}
    expected = [continued(shared_target(), prompt, LENGTH, **how) for prompt in PROMPTS]
    params = SamplingParams(temperature=1.0, min_p=1.0, repetition_penalty=1.3, max_tokens=LENGTH, ignore_eos=True)
    for tree in TREES:
        outputs = Engine(shared_target(), tiny_draft(shared_target()), tree).generate(PROMPTS, params)
        assert token_ids(outputs) == expected


# --- drawn answers


@cache
def a_draft() -> Draft:
    return trained_draft(shared_target("llama"), steps=60)


def drawn() -> list[SamplingParams]:
    return [
        replace(params, temperature=1.2, min_p=0.05 * (row % 2), seed=row, top_p=0.9 if row == 4 else 1.0)
        for row, params in enumerate(asked())
    ]


@cache
def plainly_drawn() -> list[list[int]]:
    """Without drafts, one by one."""
    return [Engine(shared_target()).generate([p], [own])[0].token_ids for p, own in zip(PROMPTS, drawn(), strict=True)]


@pytest.mark.parametrize(
    ("how", "tree"),
    [*((how, tree) for how, tree, is_drawn in EACH if is_drawn), *((how, dynamic(6, 3, 2)) for how in ENGINES)],
    ids=str,
)
def test_drawn_answers_are_those_of_plain_decoding(how, tree):
    engine = Engine(shared_target(), a_draft(), tree, **ENGINES[how])
    lost = preemptions(engine)
    outputs = engine.generate(PROMPTS, drawn())
    assert token_ids(outputs) == plainly_drawn()
    assert bool(lost) == (how == "tight")
    assert max(n for output in outputs for n in output.rounds) > 1


@pytest.mark.parametrize("drafting", DRAFT_MODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_recorded_rounds_give_the_same(drafting, overlap):
    """Rounds that are adjusted end unrecorded; others of the same engine, with min-p too, are recorded whole."""
    options = {"max_batch_size": 3, "drafting": drafting, "overlap": overlap}
    eager, replayed = (Engine(shared_target(), a_draft(), "d3_bf2", **options) for _ in range(2))
    recorded(replayed)
    parts = runner_of(replayed).graphs
    min_p = SamplingParams(temperature=1.5, min_p=0.3, max_tokens=LENGTH, ignore_eos=True)
    for params in (drawn(), [replace(each, logprobs=2) for each in asked()], [min_p] * len(PROMPTS)):
        wanted, before = eager.generate(PROMPTS, params), parts.ends.record.replays
        check_alike(replayed.generate(PROMPTS, params), wanted)
        ended = parts.ends.record.replays - before
        if params[0] is min_p:
            assert ended >= max(len(output.rounds) for output in wanted)
        else:
            assert ended < sum(len(output.rounds) for output in wanted) // 2
    least = SamplingParams(min_tokens=4, stop_token_ids=(3,), max_tokens=LENGTH)
    before = parts.ends.record.replays
    assert token_ids(replayed.generate(PROMPTS, least)) == token_ids(eager.generate(PROMPTS, least))
    assert parts.ends.record.replays > before, "once the least length is reached, rounds are recorded whole again"


def check_alike(found: list[Output], wanted: list[Output]) -> None:
    """All but the times, and log-probabilities up to rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.token_ids, one.finish_reason, one.rounds) == (other.token_ids, other.finish_reason, other.rounds)
        check_logprobs_alike(one, other)


def check_logprobs_alike(one: Output, other: Output) -> None:
    """Up to rounding."""
    assert (one.logprobs is None) == (other.logprobs is None)
    for ours, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [number for _, number in ours.top] == pytest.approx([number for _, number in theirs.top], abs=1e-5)


@pytest.mark.parametrize("drafting", DRAFT_MODES)
def test_overlap_changes_nothing(drafting):
    """Rounds of requests whose tokens are counted wait for their results; a bias alone waits for nothing."""
    found = []
    for overlap in (False, True):
        engine = Engine(shared_target(), a_draft(), "n8", drafting=drafting, overlap=overlap, max_batch_size=3)
        outputs = engine.generate(PROMPTS, [replace(each, logprobs=1) for each in drawn()])
        found.append(outputs)
    check_alike(*found)


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"min_tokens": LENGTH, "stop_token_ids": (3,)}, True),
        ({"min_tokens": LENGTH, "ignore_eos": True}, False),  # there is no stop token
        ({"min_tokens": 1, "stop_token_ids": (3,), "logit_bias": {3: -100}}, False),  # reached
        ({"logit_bias": {3: 1}, "min_p": 0.1, "logprobs": 2, "temperature": 1.0}, False),
    ],
)
def test_who_waits_for_results(params, waits):
    engine, in_flight = Engine(shared_target(), a_draft(), overlap=True), []
    run = runner_of(engine).run
    runner_of(engine).run = lambda inputs: in_flight.append(inside(engine).in_flight is not None) or run(inputs)
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=LENGTH, **params))
    assert len(in_flight) > 3
    assert in_flight[1:] == [not waits] * (len(in_flight) - 1)


@pytest.mark.parametrize("name", ["eagle", "reader", "none"])
def test_a_drafter_that_reads_is_waited_for(name):
    """As long as a request has it; not one of the engine's that no request of the batch has."""
    drafters = {"eagle": Eagle(a_draft(), shared_target()), "reader": Oracle(answers("llama"))}
    engine, in_flight = Engine(shared_target(), drafters, overlap=True), []
    run = runner_of(engine).run
    runner_of(engine).run = lambda inputs: in_flight.append(inside(engine).in_flight is not None) or run(inputs)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, drafter=name)
    engine.generate(PROMPTS[:1], params)
    assert in_flight[1:] == [name != "reader"] * (len(in_flight) - 1)
    in_flight.clear()
    drafters["reader"].draft = lambda text, most: [-1] if len(text.answer) > 4 else []  # it loses its seat
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.generate(PROMPTS[:1], params)
    assert in_flight[-4:] == [True] * 4


# --- drafters of which each row has its own, or its own tree


def with_logprobs(params: list[SamplingParams], **more) -> list[SamplingParams]:
    return [replace(each, logprobs=(2, None, 0, 1, 3)[row], **more) for row, each in enumerate(params)]


@cache
def plainly(is_drawn: bool) -> list[Output]:
    """Without drafts, one by one."""
    params = with_logprobs(drawn() if is_drawn else asked())
    return [Engine(shared_target()).generate([p], [own])[0] for p, own in zip(PROMPTS, params, strict=True)]


def check_as_plain(outputs: list[Output], is_drawn: bool) -> None:
    assert token_ids(outputs) == token_ids(plainly(is_drawn))
    for ours, theirs in zip(outputs, plainly(is_drawn), strict=True):
        assert ours.finish_reason == theirs.finish_reason
        check_logprobs_alike(ours, theirs)


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("how", ENGINES)
def test_trees_that_differ_by_row(how, is_drawn):
    params = with_logprobs(drawn() if is_drawn else asked())
    # A wrong branch of a token of the answer is penalised, and one of a stop token is forbidden, where it does not lie.
    for wrong in (3, answers("llama")[0][1], stop_of(2)):
        drafter = Oracle(token_ids(plainly(is_drawn)), wrong)
        engine = Engine(shared_target(), drafter, "d2_bf2", **ENGINES[how])
        lost = preemptions(engine)
        outputs = engine.generate(PROMPTS, params)
        check_as_plain(outputs, is_drawn)
        # Drafts end with the answer, and every fifth is empty.
        assert all(max(output.rounds) >= 4 for output in outputs if len(output.token_ids) == LENGTH)
        assert bool(lost) == (how == "tight")


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_with_drafters_of_their_own(overlap, is_drawn):
    """Two drafters and none in one batch: each request has the answer of plain decoding, in the rounds that it has
    alone with its drafter."""
    params, truth = with_logprobs(drawn() if is_drawn else asked()), token_ids(plainly(is_drawn))
    for names in (("eagle", "oracle", "none", None, "oracle"), ("oracle", "none", "eagle", "oracle", "eagle")):
        drafters = {"eagle": Eagle(a_draft(), shared_target()), "oracle": Oracle(truth)}
        engine = Engine(shared_target(), drafters, "d2_bf2", overlap=overlap, max_batch_size=4)
        own = [replace(each, drafter=name) for each, name in zip(params, names, strict=True)]
        outputs = engine.generate(PROMPTS, own)
        check_as_plain(outputs, is_drawn)
        for row, name in enumerate(names):
            drafter = None if name == "none" else Oracle(truth) if name == "oracle" else a_draft()
            (alone,) = Engine(shared_target(), drafter, "d2_bf2").generate([PROMPTS[row]], [params[row]])
            assert outputs[row].rounds == alone.rounds


def test_each_of_n_answers_has_the_drafter():
    oracle = Oracle(answers("llama"))
    engine = Engine(shared_target(), {"eagle": Eagle(a_draft(), shared_target()), "oracle": oracle}, "chain3")
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, n=3, drafter="oracle")
    outputs = engine.generate(PROMPTS[:2], params)
    assert token_ids(outputs) == [answers("llama")[row][:LENGTH] for row in (0, 0, 0, 1, 1, 1)]
    assert len({key for key, _ in oracle.seen}) == 6
    assert all(max(output.rounds) > 2 for output in outputs)


def test_a_prefix_that_is_found_counts():
    """The tokens of a prompt that is not prefilled are penalised as any."""
    stem, *tails = random_tokens(2 * BLOCK + 3, 4, 1, vocabulary=20)
    params = SamplingParams(repetition_penalty=1.5, max_tokens=LENGTH, ignore_eos=True)
    engine = Engine(shared_target(), tiny_draft(shared_target()), prefix_cache=True)
    for tail in tails:
        (output,) = engine.generate([stem + tail], params)
        expected = continued(shared_target(), stem + tail, LENGTH, repetition_penalty=1.5)
        assert output.token_ids == expected
    assert output.stats.cached_tokens == 2 * BLOCK


def test_with_grammars():
    """A row's grammar holds whatever its bias says, a least length gives way where it must; the others are as ever."""
    target = tiny_target("llama", tiny_tokenizer())
    (a,) = target.tokenizer("a")["input_ids"]
    grammar = {"regex": "[a-c]{2,9}"}
    params = [
        SamplingParams(max_tokens=LENGTH, grammar=grammar, logit_bias={a: -100}, min_tokens=5),
        SamplingParams(max_tokens=LENGTH, grammar={"regex": "a{2,4}"}, min_tokens=9),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    ]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[3]]
    found = []
    for tree, overlap in product(["chain3", "n8"], (False, True)):
        engine = Engine(target, a_draft(), tree, overlap=overlap, max_batch_size=4)
        outputs = engine.generate(prompts, params)
        found.append(token_ids(outputs))
        assert set(outputs[0].text) <= {"b", "c"}
        assert 5 <= len(outputs[0].text) <= 9
        assert (outputs[1].text, outputs[1].finish_reason) == ("aaaa", "stop")
    assert found[0][2:] == [by_transformers()[0][:LENGTH], answers("llama")[3][:LENGTH]]
    assert all(each == found[0] for each in found)


def elsewhere(params: list[SamplingParams], **options) -> tuple[list[Output], list[Output]]:
    """What an engine answers with a prefill process, and what it does alone."""
    line = LocalPrefill(**options)
    line.open.set()
    target, settings = shared_target("gemma2"), {"max_batch_size": 3, **options}
    decoder = Engine(target, draft_elsewhere(), prefill=RemotePrefill([line]), **settings)
    alone = Engine(target, draft_elsewhere(), **settings)
    return decoder.generate(PROMPTS, params), alone.generate(PROMPTS, params)


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 5 * BLOCK}])
def test_prompts_that_are_prefilled_elsewhere(options):
    """First tokens are adjusted there, and their log-probabilities come along."""
    stops = tuple(dict.fromkeys(answers("gemma2")[row][0] for row in range(5)))
    params = [replace(each, logprobs=row) for row, each in enumerate(asked("gemma2"))]
    params[0] = replace(params[0], stop_token_ids=stops, min_tokens=3, seed=None)
    params[1] = replace(params[1], logit_bias={answers("gemma2")[1][0]: -100})
    found, expected = elsewhere(params, **options)
    check_alike(found, expected)
    assert all([each.token_id for each in one.logprobs] == one.token_ids for one in found)


# --- several answers, and seeds


def test_n_answers_one_after_the_other():
    engine = Engine(shared_target(), tiny_draft(shared_target()), max_batch_size=4)
    params = SamplingParams(temperature=1.0, max_tokens=6, n=3, seed=5, ignore_eos=True)
    outputs = engine.generate(PROMPTS[:2], params)
    seeds = [
        engine.generate([PROMPTS[place // 3]], replace(params, n=1, seed=5 + place))[0].token_ids for place in range(6)
    ]
    assert token_ids(outputs) == seeds
    listed = engine.generate(PROMPTS[:2], [replace(params, n=2), replace(params, n=1, seed=9)])
    assert token_ids(listed) == [*seeds[:2], engine.generate(PROMPTS[1:2], replace(params, n=1, seed=9))[0].token_ids]


def test_errors_name_the_prompt_not_the_answer():
    with pytest.raises(UserError, match=r"^prompt 1 is empty"):
        Engine(shared_target()).generate([[5], []], SamplingParams(n=3))
    with pytest.raises(UserError, match=r"^kv_tokens=32: prompt 1 and its answer need"):
        Engine(shared_target(), kv_tokens=32).generate([[5], [5] * 90], SamplingParams(n=3, max_tokens=2))


def test_no_seed_is_another_one_each_time():
    engine = Engine(shared_target())
    params = SamplingParams(temperature=1.0, seed=None, max_tokens=LENGTH, ignore_eos=True)
    outputs = engine.generate([PROMPTS[0]] * 2, replace(params, n=2)) + engine.generate([PROMPTS[0]], params)
    assert len({tuple(output.token_ids) for output in outputs}) == 5
    assert {each.seed for row in params_of(params, 3) for each in row} == {None}
    assert Requests(shared_target()).sequence(0, [5], params).params.seed is not None


# --- what a text ends with, and what it is made of


TALKER = 2  # of PROMPTS: each token of its answer is a character


@pytest.fixture(scope="module")
def talking() -> Target:
    return tiny_target("llama", tiny_tokenizer())


def with_stop(engine: Engine, params: SamplingParams) -> tuple[Output, str, list[int]]:
    """A request's output, and what its updates make up."""
    request, texts, tokens, outputs = engine.add(PROMPTS[TALKER], params), [], [], []
    while engine.has_unfinished:
        for update in engine.step():
            assert update.request is request
            texts.append(update.text)
            tokens += update.token_ids
            outputs += [update.output] if update.output else []
    return outputs[0], "".join(texts), tokens


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("include_stop", [False, True])
def test_where_a_text_ends(talking, depth, include_stop):
    text = talking.tokenizer.decode(answers("llama")[TALKER][:LENGTH])
    engine = Engine(talking, tiny_draft(talking), "chain3")
    guide(engine, [answers("llama")[TALKER]] * 99, lambda _: depth)
    for start, length in product((0, 3, 8), (1, 2, 4)):
        stop = text[start : start + length]
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=(stop, "~~~~"), include_stop=include_stop)
        output, told, tokens = with_stop(engine, params)
        place = text.index(stop)
        assert output.text == told == text[: place + (len(stop) if include_stop else 0)]
        assert output.token_ids == tokens == answers("llama")[TALKER][: place + length]
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 3])
def test_no_stop_string_ends_an_answer_before_its_least_length(talking, depth):
    """A stop string that was complete before is text; so is what was held back as its beginning."""
    text = talking.tokenizer.decode(answers("llama")[TALKER])
    engine = Engine(talking, tiny_draft(talking), "chain3")
    guide(engine, [answers("llama")[TALKER]] * 99, lambda _: depth)
    for start, length, least in product((0, 2, 5), (1, 2, 3), (1, 3, 6, 9, LENGTH)):
        stop = text[start : start + length]
        ends = [n + length for n in range(LENGTH) if text.startswith(stop, n) and least < n + length <= LENGTH]
        params = SamplingParams(max_tokens=LENGTH, min_tokens=least, ignore_eos=True, stop=stop)
        output, told, tokens = with_stop(engine, params)
        end = min(ends, default=None)
        assert output.finish_reason == ("length" if end is None else "stop")
        assert output.text == told == (text[:LENGTH] if end is None else text[: end - length])
        assert tokens == output.token_ids == answers("llama")[TALKER][: LENGTH if end is None else end]


@pytest.mark.parametrize("least", [0, 3])
def test_the_name_of_a_special_token_ends_an_answer_at_that_token(talking, least):
    """Beside other stops. As a stop token it does not come before the least length."""
    engine = Engine(talking, tiny_draft(talking), "chain3")
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logit_bias={1: 100})
    output, told, _ = with_stop(engine, replace(params, stop=("~~~~", "<s>"), min_tokens=least))
    assert len(output.token_ids) == least + 1
    assert output.token_ids[-1] == 1
    assert output.finish_reason == "stop"
    assert output.text == told == talking.tokenizer.decode(output.token_ids[:-1])
    assert with_stop(engine, params)[0].finish_reason == "length"
    for stops in ({"stop_token_ids": (1,), "stop": "</s>"}, {"stop_token_ids": (9,), "stop": "<s>"}):
        assert with_stop(engine, replace(params, **stops))[0].token_ids == [1]
    spelled = SamplingParams(max_tokens=LENGTH, ignore_eos=True, grammar={"regex": "a<s>b"}, stop="<s>")
    assert with_stop(engine, spelled)[0].text == "a", "ordinary tokens may spell it too"


def test_a_requests_own_template_variables():
    """Over those of the target, and for this request alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mood }}{{ tone }}:{{ messages[0]['content'] }}"
    target = Target(shared_target().model, tokenizer, name="moody", template_kwargs={"mood": "a", "tone": "b"})
    requests, chat = Requests(target), [{"role": "user", "content": "x"}]

    def text_of(variables: dict | None) -> str:
        sequence = requests.sequence(0, chat, SamplingParams(chat_template_kwargs=variables))
        return tokenizer.decode(sequence.prompt)

    assert [text_of(each) for each in (None, {"mood": "c"}, {}, {"tone": 5})] == ["ab:x", "cb:x", "ab:x", "a5:x"]
    (output,) = Engine(target).generate([chat], SamplingParams(chat_template_kwargs={"mood": "d"}, max_tokens=3))
    assert output.token_ids == continued(target, tokenizer("db:x")["input_ids"], 3)
    with pytest.raises(UserError) as error:
        text_of({"mood": "c", "mod": "c"})
    said = "the chat template of moody reads no such variable; it reads mood, tone"
    assert str(error.value) == f"chat_template_kwargs.mod: {said}"
    misspelt = Target(shared_target().model, tokenizer, name="moody", template_kwargs={"mod": "a"})
    with pytest.raises(UserError) as error:
        Requests(misspelt).tokens_of(chat, "it")
    assert str(error.value) == f"template_kwargs.mod: {said}"


def test_a_context_that_is_too_short_for_the_least_length():
    """The answer ends with the context, as without a least length."""
    target = tiny_target("llama", max_position_embeddings=32)
    (prompt,) = random_tokens(25)
    (output,) = Engine(target).generate([prompt], SamplingParams(min_tokens=20, max_tokens=20))
    assert len(output.token_ids) == 7


def test_what_a_round_costs_without(monkeypatch):
    """Nothing is counted or copied for requests without parameters."""
    engine, given = Engine(shared_target(), tiny_draft(shared_target())), []
    run: Callable = runner_of(engine).run
    monkeypatch.setattr(runner_of(engine), "run", lambda inputs: given.append(inputs) or run(inputs))
    engine.generate(PROMPTS, SamplingParams(max_tokens=LENGTH, temperature=1.0))
    assert all(inputs.has_plain_end and inputs.adjustments is None and inputs.logprobs is None for inputs in given)
    assert torch.is_tensor(given[0].sampling.min_p)
