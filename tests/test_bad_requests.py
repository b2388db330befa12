"""Whatever a request holds, it is answered or refused in one clear line, and the engine goes on."""

import os
import string
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import GREEDY, PROMPTS, answers, cut, token_ids
from tiny import shared_target, tiny_draft, tiny_target, tiny_tokenizer

from eagle_train.config import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.paged_kv import BLOCK, WASTE

COUNT = int(os.environ.get("BAD_REQUESTS", "60"))
KEYS = {each.name for each in fields(SamplingParams)}

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=3),
    st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
tokens = st.lists(st.integers(0, 95), min_size=1, max_size=40)
words = st.text(alphabet=string.ascii_letters + " <>/", min_size=1, max_size=12)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "alien"]), "content": words})
good = {
    "temperature": st.sampled_from([0.0, 1e-45, 0.5, 1.0, 300.0]),
    "top_p": st.sampled_from([1e-300, 1e-9, 0.5, 1.0]),
    "top_k": st.sampled_from([0, 1, 3, 10**9]),
    "max_tokens": st.integers(1, 5),
    "seed": st.integers(-5, 2**63 - 1),
    "stop": st.none() | words | st.lists(words, max_size=2),
    "stop_token_ids": st.none() | st.lists(st.integers(-2, 120), max_size=3),
    "ignore_eos": st.booleans(),
}
bad_prompts = st.one_of(
    anything,
    st.lists(st.integers(-3, 2**65), max_size=6),
    st.lists(st.integers(0, 95), min_size=120, max_size=140),
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), anything, max_size=3), max_size=3),
    st.text(alphabet=st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=3),
)
requests = st.tuples(
    st.one_of(tokens, words, st.lists(message, min_size=1, max_size=3), bad_prompts),
    st.tuples(
        st.fixed_dictionaries({}, optional=good), st.dictionaries(st.sampled_from(sorted(KEYS)), anything, max_size=2)
    ),
)


@pytest.fixture(scope="module")
def engine():
    target = tiny_target(tokenizer=tiny_tokenizer())
    return Engine(target, tiny_draft(target), "d3_bf2", max_batch_size=3, kv_tokens=12 * BLOCK, prefix_cache=True)


def test_a_request_is_answered_or_refused(engine):
    seen, told = {"answered": 0}, []

    @settings(max_examples=COUNT, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(requests, min_size=1, max_size=3))
    def ask(asked):
        for prompt, (right, wrong) in asked:
            try:
                engine.add(prompt, SamplingParams(**{**right, **wrong}))
                seen["answered"] += 1
            except UserError as error:
                told.append(str(error))
        outputs = []
        while engine.scheduler.unfinished:
            outputs += [update.output for update in engine.step() if update.output]
        for output in outputs:
            assert output.finish_reason in ("stop", "length")
            assert all(0 <= token < 96 for token in output.token_ids)
        pool = engine.scheduler.pool
        assert sorted([*pool.free, *pool.idle]) == list(range(WASTE + 1, WASTE + 1 + pool.total))

    ask()
    assert min(seen["answered"], len(told)) > COUNT // 5
    assert all(len(error.splitlines()) == 1 and len(error) < 400 for error in told)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": float("nan")}, "temperature=nan: must be 0 or more, and finite"),
        ({"temperature": "hot"}, "temperature='hot': must be 0 or more, and finite"),
        ({"temperature": float("inf")}, "temperature=inf: must be 0 or more, and finite"),
        ({"top_p": 0}, "top_p=0: must be above 0 and at most 1"),
        ({"top_k": 1.5}, r"top_k=1.5: must be 0 \(off\) or more, a whole number"),
        ({"top_k": 2**64}, r"top_k=18446744073709551616: must be 0 \(off\) or more, a whole number"),
        ({"max_tokens": True}, "max_tokens=True: must be at least 1, a whole number"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be a whole number of 64 bits, at most 9223372036854775807"),
        ({"stop": [1]}, r"stop=\[1\]: must be None, a text, or a list of texts"),
        ({"stop_token_ids": 3}, "stop_token_ids=3: must be None or a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
    ],
)
def test_parameters(params, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt 0 is None: must be a text, a list of token ids, or a list of chat messages"),
        ([], "prompt 0 is empty: give at least one token"),
        ([1, "2"], "prompt 0 holds '?2'?: must be a text, a list of token ids, or a list of chat messages"),
        ([1, -2], "prompt 0 holds -2: must be a text, a list of token ids, or a list of chat messages"),
        ([1, 96], r"prompt 0 holds token \[96\]: the vocabulary has 96"),
        ("a\ud800", "prompt 0 holds half of a surrogate pair: no text can be made of it"),
        ([{"role": "user"}], "prompt 0: the chat template refuses the conversation: .*content.*"),
        ([{"role": "user", "content": 3}], "prompt 0: the chat template refuses the conversation: .*int.*"),
    ],
)
def test_prompts(prompt, message):
    engine = Engine(tiny_target(tokenizer=tiny_tokenizer()))
    with pytest.raises(UserError, match=f"^{message}$"):
        engine.add(prompt)
    assert not engine.scheduler.unfinished


def test_a_chat_needs_a_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"^tiny-llama has no chat template: give prompts as texts$"):
        Engine(tiny_target(tokenizer=tokenizer)).add([{"role": "user", "content": "a"}])


def test_generate_that_was_interrupted_leaves_nothing_behind(monkeypatch):
    target = shared_target("llama")
    engine, sample = Engine(target, tiny_draft(target), max_batch_size=2), Engine.sample

    def interrupted(self, *arguments):
        if len(self.active[0].generated) > 4:
            raise KeyboardInterrupt
        return sample(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
    assert not engine.scheduler.unfinished
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.total
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
