"""Whatever a request holds, it is answered or refused in one clear line, and the engine keeps working."""

import json
import os
import string
from collections import Counter
from dataclasses import fields
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_train.errors import HALF, UserError
from eagle_train.inference import Engine, Requests, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK, SCRATCH
from eagle_train.inference.grammar.json_schema import OF_TYPE
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests import requests as requests_module
from tests.support.inside import active_in, inside, pool_of, runner_of
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import shared_target, tiny_draft, tiny_target, tiny_tokenizer

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
    "top_k": st.sampled_from([-1, 0, 1, 3, 10**9]),
    "min_p": st.sampled_from([0.0, 1e-300, 0.1, 1.0]),
    "max_tokens": st.integers(1, 5),
    "min_tokens": st.integers(0, 3),
    "seed": st.none() | st.integers(-5, 2**63 - 1),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, 97), st.floats(-100, 100), max_size=3),
    "repetition_penalty": st.sampled_from([0.01, 1, 1.3, 100]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logprobs": st.none() | st.integers(0, 97),
    "include_stop": st.booleans(),
    "stop": st.none() | words | st.lists(words, max_size=2),
    "stop_token_ids": st.none() | st.lists(st.integers(-2, 120), max_size=3),
    "ignore_eos": st.booleans(),
}
KINDS = st.sampled_from(["json_schema", "regex", "choice", "ebnf", "xml"])
TYPES = st.sampled_from(["string", "integer", "number", "array", "object", "boolean", "null", "date"])
PATTERNS = st.text(alphabet="ab()[]{}|*+?.^$\\09,-dwsxu:\0\n\ud800é", max_size=16)
RULES = st.text(alphabet='ab"()[]{}|*+? \\09,-:=rot\n\0\ud800é', max_size=24)
numbers = st.integers(-2, 5) | st.sampled_from([2**31, 2**32 + 1, 10**400, 1e-9, 1e300, float("nan"), 0.5])
plain = st.none() | st.booleans() | numbers | words | st.text(alphabet="a\ud800\0", max_size=2)


def schemas(inner):
    named = st.dictionaries(st.sampled_from(["a", "b", "\n", "\0"]), inner, max_size=2)
    keywords = {
        "type": TYPES | st.lists(TYPES, max_size=2),
        "properties": named,
        "$defs": named,
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": st.lists(inner, max_size=2),
        "anyOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=2),
        "required": st.lists(st.sampled_from(["a", "b"]), max_size=2),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/b", "x", "#/%"]),
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "email", "iri", ""]),
        "enum": st.lists(plain, max_size=3),
        "const": plain,
        "uniqueItems": st.booleans(),
        "not": inner,
    }
    keywords |= dict.fromkeys(set().union(*OF_TYPE.values()) - set(keywords), numbers)
    others = st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True)
    of_type = [st.lists(st.sampled_from(sorted(own)), unique=True) for own in OF_TYPE.values() if own]
    of_type = [st.tuples(st.just(kind), keys) for kind, keys in zip(OF_TYPE, of_type, strict=False)]
    one = st.one_of(of_type).flatmap(
        lambda some: st.fixed_dictionaries({"type": st.just(some[0])} | {key: keywords[key] for key in some[1]})
    )
    return one | others.flatmap(lambda keys: st.fixed_dictionaries({key: keywords[key] | anything for key in keys}))


schema = st.recursive(st.booleans() | st.fixed_dictionaries({"type": TYPES}) | anything, schemas, max_leaves=8)
grammars = st.one_of(
    st.dictionaries(KINDS, anything | words, max_size=2),
    st.fixed_dictionaries({"regex": PATTERNS}),
    st.fixed_dictionaries({"ebnf": RULES | RULES.map("root ::= {}".format)}),
    st.fixed_dictionaries({"choice": st.lists(words | st.text(alphabet="a\ud800\0\n", max_size=3), max_size=3)}),
    st.fixed_dictionaries({"json_schema": schema | schema.map(lambda value: json.dumps(value, default=repr))}),
)
bad_prompts = st.one_of(
    anything,
    st.lists(st.integers(-3, 2**65), max_size=6),
    st.lists(st.integers(0, 95), min_size=120, max_size=140),
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), anything, max_size=3), max_size=3),
    st.text(alphabet=st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=3),
)
sound_requests = st.tuples(tokens, st.tuples(st.fixed_dictionaries({}, optional=good), st.just({})))
requests = sound_requests | st.tuples(
    st.one_of(tokens, words, st.lists(message, min_size=1, max_size=3), bad_prompts),
    st.tuples(
        st.fixed_dictionaries({}, optional=good | {"grammar": grammars}),
        st.just({}) | st.dictionaries(st.sampled_from(sorted(KEYS)), anything, max_size=2),
    ),
)


@pytest.fixture(scope="module")
def engine():
    target = tiny_target(tokenizer=tiny_tokenizer())
    return Engine(target, tiny_draft(target), "d3_bf2", max_batch_size=3, kv_tokens=12 * BLOCK, prefix_cache=True)


def test_a_request_is_answered_or_refused(engine):
    seen, told = Counter(), []

    @settings(max_examples=COUNT, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(requests, min_size=1, max_size=3))
    def ask(asked):
        for prompt, (right, wrong) in asked:
            try:
                params = SamplingParams(**{**right, **wrong})
                engine.add(prompt, params)
                seen["answered"] += 1
                seen["guided"] += params.grammar is not None
            except UserError as error:
                told.append(str(error))
        outputs = []
        while engine.has_unfinished:
            outputs += [update.output for update in engine.step() if update.output]
        for output in outputs:
            assert output.finish_reason in ("stop", "length", "dead_end")
            assert all(0 <= token < 96 for token in output.token_ids)
        pool = pool_of(engine)
        assert sorted([*pool.free, *pool.idle]) == list(range(SCRATCH + 1, SCRATCH + 1 + pool.total))

    ask()
    assert min(seen["answered"], len(told)) > COUNT // 5
    assert all(len(error.splitlines()) == 1 and len(error) < 400 for error in told)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama")), "it goes on as before"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": float("nan")}, "temperature=nan: must be 0 or more, and finite"),
        ({"temperature": "hot"}, "temperature='hot': must be 0 or more, and finite"),
        ({"temperature": float("inf")}, "temperature=inf: must be 0 or more, and finite"),
        ({"temperature": -1e-300}, "temperature=-1e-300: must be 0 or more, and finite"),
        ({"temperature": 10**5000}, "temperature=a whole number of 16610 bits: must be 0 or more, and finite"),
        ({"temperature": 10**400}, "temperature=1.*: must be 0 or more, and finite"),
        ({"top_p": float("nan")}, "top_p=nan: must be above 0 and at most 1"),
        ({"top_k": -2}, r"top_k=-2: must be 0 or -1 \(off\), or more, a whole number"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1, a whole number"),
        ({"seed": -(2**63) - 1}, r"seed=-9223372036854775809: must be None \(a random one\) or a whole number of .*"),
        ({"stop": ""}, "stop='': an empty text would end every answer; leave it out"),
        ({"stop": ["a", ""]}, r"stop=\['a', ''\]: an empty text would end every answer; leave it out"),
        ({"stop": "\ud800"}, r"stop='\\ud800': half of a surrogate pair is in no text"),
        ({"top_p": 0}, "top_p=0: must be above 0 and at most 1"),
        ({"top_k": 1.5}, r"top_k=1.5: must be 0 or -1 \(off\), or more, a whole number"),
        ({"top_k": 2**64}, r"top_k=18446744073709551616: must be 0 or -1 \(off\), or more, a whole number"),
        ({"max_tokens": True}, "max_tokens=True: must be at least 1, a whole number"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be .* whole number of 64 bits, at most 9223372036854775807"),
        ({"stop": [1]}, r"stop=\[1\]: must be None, a text, or a list of texts"),
        ({"stop_token_ids": 3}, "stop_token_ids=3: must be None or a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        ({"include_stop": "yes"}, "include_stop='yes': must be true or false"),
        ({"min_p": 1.01}, r"min_p=1.01: must be from 0 \(off\) to 1"),
        ({"min_p": float("nan")}, r"min_p=nan: must be from 0 \(off\) to 1"),
        ({"min_tokens": -1}, "min_tokens=-1: must be at least 0, a whole number"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: must be at most max_tokens, which is 8"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be from 0.01 to 100; 1 is off"),
        ({"repetition_penalty": True}, "repetition_penalty=True: must be from 0.01 to 100; 1 is off"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1: must be from -2 to 2"),
        ({"frequency_penalty": "x"}, "frequency_penalty='x': must be from -2 to 2"),
        ({"n": 0}, "n=0: must be a whole number from 1 to 65536"),
        ({"n": 65537}, "n=65537: must be a whole number from 1 to 65536"),
        ({"logprobs": -1}, "logprobs=-1: must be None, or 0 or more, a whole number"),
        ({"logprobs": True}, "logprobs=True: must be None, or 0 or more, a whole number"),
        ({"logit_bias": [5]}, r"logit_bias=\[5\]: must be None, or a mapping of token ids to numbers from -100 to 100"),
        ({"logit_bias": {5: 100.5}}, r"logit_bias=\{5: 100.5\}: must be .* from -100 to 100"),
        ({"logit_bias": {"a": 1}}, r"logit_bias=\{'a': 1\}: must be .* token ids .*"),
        ({"logit_bias": {-1: 1}}, r"logit_bias=\{-1: 1\}: must be .* token ids .*"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs='x': must be None, or a mapping of the chat .*"),
        (
            {"chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs.messages: is set for each rendering; leave .*",
        ),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs: 'a b' must be a variable's name"),
        ({"foo": 1}, "foo: SamplingParams has no such parameter; there are temperature, top_p, .*relaxed_thinking"),
        ({"topk": 1}, "topk: SamplingParams has no such parameter; the nearest are top_k, .*"),
        ({"max_new_tokens": 1}, "max_new_tokens: SamplingParams .*; the nearest are max_tokens, min_tokens.*"),
        ({"grammars": 1}, "grammars: SamplingParams has no such parameter; the nearest is grammar"),
    ],
)
def test_parameters(params, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        SamplingParams(**params)


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1.7e308, 10**30, 5e-324, 1e-45])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5, "top_k": 3}, {"grammar": {"regex": "[a-z]{4}"}}])
def test_any_finite_temperature_is_one(engine, temperature, options):
    """The highest samples uniformly from the allowed tokens; the lowest takes the most likely one."""
    outputs = engine.generate(PROMPTS, SamplingParams(temperature=temperature, max_tokens=5, **options))
    assert all(0 <= token < 96 for output in outputs for token in output.token_ids)
    cold = engine.generate(PROMPTS, SamplingParams(max_tokens=5, **options))
    same = [one.token_ids == other.token_ids for one, other in zip(outputs, cold, strict=True)]
    assert all(same) if temperature < 1 else not any(same)


def test_seeds_go_round():
    """The prompts of a call have different seeds, also where 64 bits overflow."""
    largest = SamplingParams(temperature=1.0, seed=2**63 - 1)
    assert [largest.with_seed_after(i).seed for i in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    engine = Engine(tiny_target(tokenizer=tiny_tokenizer()))
    assert len(engine.generate(PROMPTS, largest)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {5: 1, 96: 1}}, r"logit_bias=\[96\]: the vocabulary has 96"),
        ({"logprobs": 97}, "logprobs=97: the vocabulary has 96"),
        ({"n": 2}, "n=2: must be 1 here, one request has one answer; use generate"),
        (
            {"min_tokens": 1, "stop_token_ids": range(96)},
            "min_tokens=1: must be 0 where every token is a stop token",
        ),
        (
            {"stop": "x</s>"},
            "stop='x</s>': answers have no text of the special token </s>; use stop='</s>', or stop_token_ids=\\[2\\]",
        ),
        (
            {"stop": ["a", "<s></s>"]},
            "stop='<s></s>': answers have no text of the special token </s>; use stop='</s>', .*",
        ),
        (
            {"stop": ["a", "</s>"], "include_stop": True},
            "include_stop=True: answers have no text of the special token </s>, which stop names; leave .*",
        ),
        (
            {"chat_template_kwargs": {"thinking": True}},
            r"chat_template_kwargs=\{'thinking': True\}: prompt \d+ is no list of chat messages, and no template .*",
        ),
    ],
)
def test_parameters_that_do_not_fit_the_request(engine, params, message):
    given = {name: list(value) if isinstance(value, range) else value for name, value in params.items()}
    with pytest.raises(UserError, match=f"^{message}$"):
        engine.add(PROMPTS[0], SamplingParams(**given))
    assert not engine.has_unfinished


def test_what_may_be_said_in_two_ways():
    """Off is off, and JSON has texts for keys."""
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logit_bias={"5": 1}) == SamplingParams(logit_bias={5: 1.0})


@pytest.mark.parametrize("token", [96, -1, 2**40])
def test_stop_ids_are_of_the_vocabulary(engine, token):
    with pytest.raises(UserError, match=rf"^stop_token_ids=\[{token}\]: the vocabulary has 96$"):
        engine.add(PROMPTS[0], SamplingParams(stop_token_ids=(5, token)))
    assert not engine.has_unfinished


def test_a_target_whose_stop_token_it_does_not_have():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None  # which would be a stop as well
    engine = Engine(tiny_target("llama", tokenizer, eos_token_id=[500, -1]))
    assert engine.generate(PROMPTS, SamplingParams(max_tokens=3))
    with pytest.raises(UserError, match=r"^grammar: needs a stop token; eos_token_id \[-1, 500\] is none of 96"):
        engine.add(PROMPTS[0], SamplingParams(grammar={"regex": "a"}))
    mixed = Engine(tiny_target("llama", tiny_tokenizer(), eos_token_id=[2, 500]))
    assert mixed.generate([PROMPTS[0]], SamplingParams(grammar={"regex": "a"}))[0].text == "a"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt 0 is None: must be a text, a list of token ids, or a list of chat messages"),
        ([], "prompt 0 is empty: give at least one token"),
        ([1, "2"], "prompt 0 holds '?2'?: must be a text, a list of token ids, or a list of chat messages"),
        ([1, -2], "prompt 0 holds -2: must be a text, a list of token ids, or a list of chat messages"),
        ([1, 96], r"prompt 0 holds token \[96\]: the vocabulary has 96"),
        ("a\ud800", f"prompt 0 holds {HALF}"),
        ([{"role": "user", "content": "a\ud800"}], f"prompt 0: the conversation holds {HALF}"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}],
            f"prompt 0: the conversation holds {HALF}",
        ),
        ([{"role": []}], r"prompt 0 holds a message with role=\[\]: must be a text"),
        ([{"role": "user"}], "prompt 0: the chat template refuses the conversation: .*content.*"),
        ([{"role": "user", "content": 3}], "prompt 0: the chat template fails on the conversation: .*int.*"),
    ],
)
def test_prompts(prompt, message):
    engine = Engine(tiny_target(tokenizer=tiny_tokenizer()))
    with pytest.raises(UserError, match=f"^{message}$"):
        engine.add(prompt)
    assert not engine.has_unfinished


STRING, INTEGER, ARRAY = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": True}


def defined(*schemas: dict) -> dict:
    """One of them, each by its name."""
    names = [f"m{number}" for number in range(len(schemas))]
    one_of = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {"anyOf": one_of, "$defs": dict(zip(names, schemas, strict=True))}


WITHIN_ITSELF: dict = {}
WITHIN_ITSELF["anyOf"] = [WITHIN_ITSELF]
KILLERS = [  # what xgrammar takes for another grammar, compiles for minutes, or says nothing clear about
    ({"regex": "a{4294967297}"}, "4294967297 repetitions; at most 2147483647"),
    ({"ebnf": 'root ::= "a"{1, 99999999999999999999}'}, "repetitions; at most 2147483647"),
    ({"regex": "(((a{0,50}){0,50}){0,50})"}, "repetitions of repetitions of repetitions"),
    ({"ebnf": 'root ::= ((("a"{0,50} "b"?){0,50} "b"?){0,50})'}, "repetitions of repetitions of repetitions"),
    ({"regex": "(" * 100 + "a" + ")*" * 100}, "repetitions of repetitions of repetitions"),
    ({"regex": "a*" * 100}, "more than 32 optional or repeated parts in a row"),
    ({"ebnf": "root ::= " + '"a"? ' * 40}, "more than 32 optional or repeated parts in a row"),
    ({"regex": "a?b" * 10_000}, "10000 groups and optional or repeated parts; at most 2000"),
    ({"regex": "a" * 10**6}, "1000000 characters; at most 32768"),
    ({"regex": "[" * 30_000}, "Unclosed"),
    ({"ebnf": "root ::= " + "[" * 30_000}, "Unclosed class of characters"),
    ({"ebnf": "root ::= " + "|".join(f'"{i}"' for i in range(100_000))}, "characters; at most 32768"),
    ({"choice": ["a" * 10**6]}, "characters; at most 32768"),
    ({"choice": [f"{i}" for i in range(100_000)]}, "characters; at most 32768"),
    ({"choice": ["\ud800"]}, "surrogates not allowed"),
    ({"regex": "a\0b"}, "null characters"),
    ({"ebnf": "root ::= root"}, "line 1: rule root matches no text"),
    ({"json_schema": {"$ref": "#"}}, "#: no value is possible"),
    ({"json_schema": '{"type": "number", "minimum": 1e400}'}, "1e400 is no number that 64 bits hold: .* inf"),
    ({"json_schema": '{"minimum": 9007199254740993.0}'}, "9007199254740993.0 is no number .* take it for 9.*992.0"),
    ({"json_schema": '{"const": 1e-400}'}, "1e-400 is no number that 64 bits hold: readers take it for 0.0"),
    ({"json_schema": '{"default": NaN}'}, "NaN is no number that JSON has"),
    ({"json_schema": {"const": float("inf")}}, "inf is no number that JSON has"),
    ({"json_schema": '{"const": -' + "9" * 5000 + "}"}, "a whole number of 5001 digits; at most 4300"),
    ({"json_schema": {"const": 10**5000}}, "a whole number of 16610 bits; at most 14000"),
    ({"json_schema": '{"type": "integer", "type": "string"}'}, "the key 'type' comes twice in an object"),
    ({"json_schema": r'{"$defs": {"a": true, "\u0061": true}}'}, "the key 'a' comes twice in an object"),
    ({"json_schema": {"type": "object", "properties": {True: INTEGER}}}, "the key True must be a text"),
    ({"json_schema": {"const": b"a"}}, "b'a' is nothing that JSON has"),
    ({"json_schema": '{"type":\n "integer",}'}, "no JSON from line 2, column 12 on"),
    ({"json_schema": "{'type': 'integer'}"}, "no JSON from line 1, column 2 on"),
    ({"json_schema": WITHIN_ITSELF}, "is deeper than can be read, or within itself"),
    ({"json_schema": '{"const": ' + "[" * 5000 + "]" * 5000 + "}"}, "is deeper than can be read"),
    ({"json_schema": {"$ref": "#//$defs/a", "$defs": {"a": INTEGER}}}, "must lead to a schema"),
    ({"json_schema": {"const": "\ud800"}}, "surrogates not allowed"),
    ({"json_schema": {"type": "number", "minimum": 1e-16}}, "#: a bound of more than 15 significant digits"),
    ({"json_schema": {"type": "number", "minimum": 2, "exclusiveMaximum": 2}}, "#: no number is between these bounds"),
    ({"json_schema": INTEGER | {"minimum": 5, "maximum": 1}}, "minimum greater than maximum"),
    ({"json_schema": INTEGER | {"multipleOf": 1025}}, "#: multipleOf 1025 must be a whole number from 1 to 1024"),
    ({"json_schema": INTEGER | {"multipleOf": 0.5}}, "#: multipleOf 0.5 must be a whole number from 1 to 1024"),
    ({"json_schema": STRING | {"maxLength": -1}}, "#: maxLength -1 must be a whole number, at most 2147483647"),
    ({"json_schema": ARRAY | {"maxItems": 2**32 + 1}}, "#: maxItems 4294967297 must be a whole number"),
    ({"json_schema": STRING | {"format": "iri"}}, "#: format 'iri' cannot be guaranteed"),
    ({"json_schema": STRING | {"pattern": "a^b"}}, r"\^ and \$ may stand at the ends only"),
    ({"json_schema": STRING | {"pattern": 5}}, "#: pattern 5 must be a text"),
    ({"json_schema": {"type": "object", "required": ["a"]}}, r"#: required \['a'\] cannot be guaranteed without"),
    ({"json_schema": {"anyOf": []}}, "#: nothing is left to choose from"),
    ({"json_schema": {"type": []}}, "#: nothing is left to choose from"),
    ({"json_schema": {"allOf": 5}}, "#: allOf cannot be guaranteed for more than one schema, or none"),
    (
        {"json_schema": {"anyOf": [STRING | {"maxLength": i} for i in range(200)]}},
        "200 strings of bounds or patterns of their own; at most 100",
    ),
    ({"json_schema": {"anyOf": [{"allOf": [STRING | {"maxLength": i}]} for i in range(101)]}}, "101 strings of bounds"),
    ({"json_schema": defined(*(STRING | {"maxLength": i} for i in range(101)))}, "101 strings of bounds"),
    ({"json_schema": defined(*(STRING | {"pattern": f"[a-z]{{1,{i}}}"} for i in range(50, 151)))}, "101 strings of"),
    ({"json_schema": defined(*(ARRAY | {"maxItems": i} for i in range(999)))}, "999 arrays of bounds"),
    ({"json_schema": {"anyOf": [INTEGER | {"multipleOf": 1000 + i} for i in range(20)]}}, "at most 4096"),
    ({"json_schema": defined(*([INTEGER | {"multipleOf": 1000}] * 5))}, "multiples of 5000 in all; at most 4096"),
    ({"json_schema": {"type": ["integer", "number"], "multipleOf": 5}}, "#: multipleOf cannot be guaranteed for type"),
    ({"json_schema": {"$ref": "#/default", "default": INTEGER | {"not": {}}}}, "#: .ref '#/default' must lead to a"),
    ({"json_schema": {"$ref": "#/$defs", "$defs": INTEGER | {"not": {}}}}, "'#/.defs' must lead to a schema"),
    ({"json_schema": {"$ref": "#/$defs/a/const", "$defs": {"a": {"const": {"not": {}}}}}}, "must lead to a schema"),
    ({"json_schema": {"$ref": "#/$defs/a/b", "$defs": {"a/b": INTEGER, "a": {"title": "b"}}}}, "must lead to a schema"),
    ({"json_schema": {"anyOf": [{"$ref": "#/$defs/b"}], "$defs": {"a": INTEGER}}}, "#/anyOf/0: .ref .* must lead to"),
    ({"json_schema": {"const": list(range(100_000))}}, "characters; at most 32768"),
    ({"json_schema": {"anyOf": [INTEGER] * 4000}}, "more than 3000 schemas"),
    ({"json_schema": {"type": "object", "properties": {"a\nb": {"not": {}}}}}, r"#/properties/'a\\nb': not cannot be"),
]


@pytest.mark.parametrize(("grammar", "said"), KILLERS, ids=[str(i) for i in range(len(KILLERS))])
def test_grammars_that_are_refused_beforehand(engine, grammar, said):
    ((kind, _),) = grammar.items()
    with pytest.raises(UserError, match=rf"^grammar\.{kind}=.*{said}") as error:
        engine.add(PROMPTS[0], SamplingParams(grammar=grammar))
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400
    assert not engine.has_unfinished


FINE = [
    ({"regex": r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,4}"}, "a.b@c.org"),
    ({"regex": r"(\d{1,3}\.){3}\d{1,3}"}, "127.0.0.1"),
    ({"regex": "(.{0,200};){0,50}"}, "a;bc;"),
    ({"regex": "((a{1,9},){0,9};){0,9}"}, "aa,a,;a,;"),
    ({"regex": "(((ab*)*c)*d)*"}, "abbcd"),
    ({"regex": "a?" * 32}, "aaa"),
    ({"regex": "[{2,99999999999}]+"}, "{2,9}"),
    ({"regex": r"\{99999999999\}"}, "{99999999999}"),
    ({"regex": "[a-z]{0,100000}"}, "abc"),
    ({"ebnf": 'root ::= "{99999999999}" x*  # ((((a*)*)*)*)*\nx ::= "b" | "(" x ")"'}, "{99999999999}b(b)"),
    ({"choice": [f"k{i}" for i in range(3000)]}, "k2999"),
    ({"choice": ["", "a"]}, ""),
    ({"json_schema": {"enum": [f"v{i}" for i in range(3000)]}}, '"v2999"'),
    ({"json_schema": INTEGER | {"multipleOf": 7}}, "49"),
    ({"json_schema": {"const": 10**400}}, str(10**400)),
    ({"json_schema": {"type": "number", "minimum": 1e-9, "maximum": 2e-9}}, "0.0000000015"),
    ({"json_schema": STRING | {"format": "date", "title": "x" * 10**5}}, '"2024-01-31"'),
    ({"json_schema": STRING | {"maxLength": 2**31 - 1}}, '"abc"'),
    ({"json_schema": '{"type": "string", "minLength": 2.0, "maxLength": 3e0}'}, '"abc"'),
    ({"json_schema": {"$ref": "#/$defs/", "$defs": {"": {"type": "integer"}}}}, "5"),
    ({"json_schema": ARRAY | {"minItems": 1, "maxItems": 10**6}}, '[1, "a"]'),
    ({"json_schema": {"anyOf": [{"type": "object", "properties": {f"p{i}": True}} for i in range(200)]}}, '{"p7": 1}'),
    ({"json_schema": {"type": "object", "properties": {f"p{i}": STRING | {"maxLength": 9} for i in range(300)}}}, "{}"),
    ({"json_schema": defined(*(STRING | {"title": f"T{i}", "maxLength": 9} for i in range(99)))}, '"abc"'),
    ({"json_schema": defined(*(STRING | {"maxLength": 1000 + i} for i in range(100)))}, '"abc"'),
    (
        {
            "json_schema": {
                "type": "object",
                "properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}},
                "required": ["a", "b"],
            }
        },
        '{"a": 1, "b": 2}',
    ),
    (
        {
            "json_schema": {
                "$ref": "#/$defs/tree",
                "$defs": {
                    "tree": {
                        "type": "object",
                        "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                        "required": ["of"],
                    }
                },
            }
        },
        '{"of": [{"of": []}]}',
    ),
]


@pytest.mark.parametrize(("grammar", "text"), FINE, ids=[str(i) for i in range(len(FINE))])
def test_grammars_that_are_not_refused(engine, grammar, text):
    state = inside(engine).requests.guide.matcher(grammar).state
    assert text == "" or state.accept_string(text)
    assert state.is_completed()


def test_a_chat_needs_a_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"^tiny-llama has no chat template: give prompts as texts$"):
        Engine(tiny_target(tokenizer=tokenizer)).add([{"role": "user", "content": "a"}])


def test_a_template_reads_the_clock_of_the_first_rank(monkeypatch):
    """Here it is a day and some minutes later than there. A rank alone has its own clock."""
    first, here = datetime(2026, 7, 31, 23, 59, 7, 5), datetime(2026, 8, 2, 0, 3)
    told = (first - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    monkeypatch.setattr(requests_module, "datetime", SimpleNamespace(now=lambda: here))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %H:%M:%S %f') }}"
    made = Requests(tiny_target(tokenizer=tokenizer))
    asked = [{"role": "user", "content": "a"}]

    def rendered() -> str:
        return made.template.render(asked, prompt=True)

    assert rendered() == "02 00:03:00 000000"
    monkeypatch.setattr(Ranks, "agreed", lambda ranks, own: own.fill_(told))
    assert rendered() == "31 23:59:07 000005"


def test_generate_that_was_interrupted_leaves_nothing_behind(monkeypatch):
    target = shared_target("llama")
    engine = Engine(target, tiny_draft(target), max_batch_size=2)
    sample = runner_of(engine).sample

    def interrupted(*arguments):
        if len(active_in(engine)[0].generated) > 4:
            raise KeyboardInterrupt
        return sample(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(runner_of(engine), "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
    assert not engine.has_unfinished
    assert len(pool_of(engine).free) == pool_of(engine).total
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
