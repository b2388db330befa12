"""Requests: where they end, which parameters are refused, and what is counted. DESIGN sections 3.8, 3.9."""

from copy import deepcopy
from dataclasses import replace

import pytest

from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.models.target import Target
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, answers, cut, guide, token_ids
from tests.support.tiny import continued, random_tokens, shared_target, tiny_draft, tiny_target, tiny_tokenizer


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_statistics(depth):
    target = shared_target()
    engine = Engine(target, tiny_draft(target), "chain3", max_batch_size=2)
    guide(engine, answers("llama"), lambda _: depth)
    for output in engine.generate(PROMPTS, GREEDY):
        stats, (calls, rest) = output.stats, divmod(LENGTH - 1, depth + 1)
        assert output.rounds == [depth + 1] * calls + [rest] * (rest > 0)
        assert (stats.tokens, stats.calls) == (LENGTH - 1, len(output.rounds))
        assert stats.tpc == stats.tokens / stats.calls
        assert stats.drafted_per_depth == [stats.calls] * 3
        assert stats.accepted_per_depth == [stats.calls * (d < depth) for d in range(3)]
        assert len(stats.intervals_s) == stats.tokens
        assert min(stats.intervals_s) > 0
        assert stats.ttft_s > 0
        assert stats.ttit_s == pytest.approx(sum(stats.intervals_s) / stats.tokens)
    assert set(engine.stage_times.seconds) == {"prefill", "drafting", "validation", "sampling", "bookkeeping"}


# --- what a request asks for


@pytest.mark.parametrize("depth", [0, 3])
def test_ends_at_a_stop_token(depth):
    """Also where it is accepted within a round; the tokens accepted behind it are dropped."""
    target, wanted = shared_target(), answers("llama")
    engine = Engine(target, tiny_draft(target))
    guide(engine, wanted, lambda _: depth)
    for place in (0, 1, 2, 5):
        stop = wanted[0][place]
        params = SamplingParams(max_tokens=LENGTH, stop_token_ids=(stop, 95), ignore_eos=place % 2 == 0)
        (output,) = engine.generate(PROMPTS[:1], params)
        length = min(wanted[0].index(stop), wanted[0].index(95) if 95 in wanted[0] else LENGTH) + 1
        assert (output.token_ids, output.finish_reason) == (wanted[0][:length], "stop")
        assert output.stats.tokens == length - 1 == sum(output.rounds) == len(output.stats.intervals_s)


def test_the_targets_own_stop_tokens():
    target = tiny_target("llama")
    token = answers("llama")[1][4]
    expected = answers("llama")[1][: answers("llama")[1].index(token) + 1]
    for eos in (token, [95, token]):
        target.model.generation_config.eos_token_id = eos
        (output,) = Engine(target).generate(PROMPTS[1:2], SamplingParams(max_tokens=LENGTH, stop_token_ids=None))
        assert (output.token_ids[-1], output.finish_reason) == (expected[-1], "stop")
        (output,) = Engine(target).generate(PROMPTS[1:2], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        assert (output.token_ids, output.finish_reason) == (answers("llama")[1][:LENGTH], "length")


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens(limit):
    target = shared_target()
    engine = Engine(target, tiny_draft(target), max_batch_size=2)
    guide(engine, answers("llama"), lambda _: 3)
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=limit, ignore_eos=True))
    assert token_ids(outputs) == cut(answers("llama"), limit)
    assert {output.finish_reason for output in outputs} == {"length"}
    assert all(output.stats.calls == -(-(limit - 1) // 4) for output in outputs)
    if limit == 1:
        assert outputs[0].stats.tpc is None


def test_context_limit():
    """Prompt and answer fill the context and do not exceed it, although the tree may reach beyond it."""
    target = tiny_target("llama", max_position_embeddings=32)
    (prompt,) = random_tokens(25)
    truth = continued(target, prompt, 14)
    engine = Engine(target, tiny_draft(target), "d3_bf2")
    guide(engine, [truth], lambda _: 2)
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == (truth[:7], "length")
    assert len(engine.generate([(prompt * 2)[:31]], GREEDY)[0].token_ids) == 1
    with pytest.raises(UserError, match="prompt 1 has 32 tokens: the context of tiny-llama holds 32"):
        engine.generate([prompt, (prompt * 2)[:32]], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "prompt 1 is empty"),
        ([[5, 96]], r"prompt 0 holds token \[96\]: the vocabulary has 96"),
        ([[-1]], "prompt 0 holds -1: must be"),
        (["text"], "has no tokenizer"),
        ([[{"role": "user", "content": "text"}]], "has no tokenizer"),
    ],
)
def test_prompts_that_are_refused(prompts, message):
    with pytest.raises(UserError, match=message):
        Engine(shared_target()).generate(prompts, GREEDY)


def test_arguments_that_are_refused():
    target = shared_target()
    with pytest.raises(UserError, match="tree is 'chain_99'"):
        Engine(target, tiny_draft(target), tree="chain_99")
    with pytest.raises(UserError, match="tree has the keys"):  # a digit, and no number
        Engine(target, tiny_draft(target), tree={"\N{SUPERSCRIPT TWO}": "chain1"})
    with pytest.raises(UserError, match="batch sizes"):
        Engine(target, tiny_draft(target), tree={0: "chain3"})
    with pytest.raises(UserError, match="2 given for 3 prompts"):
        Engine(target).generate(PROMPTS[:3], [GREEDY] * 2)
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        Engine(target).generate(PROMPTS[:1], SamplingParams(stop="x"))
    for values in ({"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 0}):
        with pytest.raises(UserError, match=next(iter(values))):
            SamplingParams(**values)


def test_an_output_stays_as_it_is_when_the_request_goes_on():
    engine = Engine(shared_target(), tiny_draft(shared_target()))
    request = engine.add(PROMPTS[0], replace(GREEDY, logprobs=1))
    for _ in range(3):
        engine.step()
    output = engine.output(request)
    before = deepcopy(output)
    assert (output.finish_reason, len(output.rounds) > 0) == (None, True)
    while engine.has_unfinished:
        engine.step()
    assert output == before
    engine.output(request).token_ids.clear()
    assert len(engine.output(request).token_ids) == LENGTH


def test_no_prompts():
    assert Engine(shared_target()).generate([]) == []


# --- text


@pytest.fixture(scope="module")
def talking() -> Target:
    return tiny_target("llama", tiny_tokenizer())


def test_text_and_chat_prompts(talking):
    """A text is tokenised as it is; a chat is rendered by the template."""
    engine, tokenizer = Engine(talking), talking.tokenizer
    prompts = [
        "Hello!",
        [{"role": "user", "content": "Hi"}],
        tokenizer("Hello!")["input_ids"],
        tokenizer("u:Hi;a:")["input_ids"],
    ]
    text, chat, text_ids, chat_ids = engine.generate(prompts, GREEDY)
    assert text.token_ids == text_ids.token_ids
    assert chat.token_ids == chat_ids.token_ids
    assert text.text == tokenizer.decode(text.token_ids, skip_special_tokens=True)
    assert Engine(shared_target()).generate([[5]], GREEDY)[0].text is None


@pytest.mark.parametrize("depth", [0, 3])
def test_ends_at_a_stop_string(depth, talking):
    """The text ends before the string, the tokens with the one that completes it."""
    truth = [continued(talking, PROMPTS[0], LENGTH + 10)]
    whole = talking.tokenizer.decode(truth[0][:LENGTH], skip_special_tokens=True)
    engine = Engine(talking, tiny_draft(talking))
    guide(engine, truth, lambda _: depth)
    for start, end in ((0, 1), (2, 4), (3, 7)):
        stop = whole[start:end]
        (output,) = engine.generate(
            PROMPTS[:1], SamplingParams(max_tokens=LENGTH, stop=("absent", stop), ignore_eos=True)
        )
        place = whole.index(stop)
        assert output.text == whole[:place]
        assert output.token_ids == truth[0][: place + len(stop)]
        assert output.finish_reason == "stop"
        assert output.stats.tokens == len(output.token_ids) - 1 == sum(output.rounds) == len(output.stats.intervals_s)
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=LENGTH, stop="absent", ignore_eos=True))
    assert (output.text, output.finish_reason) == (whole, "length")


def test_time_between_tokens_is_all_of_the_time():
    """A round's time is spread over the tokens that were kept, also where a stop string cut some off."""
    for keep in (None, 2, 3):
        sequence = Sequence(0, [1], SamplingParams(), frozenset())
        sequence.start(5, now=1.0)
        sequence.advance([6, 7, 8], num_accepted=2, max_depth=3, now=4.0)
        if keep is not None:
            sequence.cut(keep)
        assert sum(sequence.stats.intervals_s) == pytest.approx(3.0)
        assert len(sequence.stats.intervals_s) == sequence.stats.tokens
