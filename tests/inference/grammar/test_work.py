"""A short request does not block the engine: it is compiled, or refused in one line, in a moment.

Without the bounds that are tested here each of these texts takes minutes or more.
"""

import time
from collections.abc import Iterator

import pytest

from eagle_train.errors import UserError
from eagle_train.inference.grammar.guided import ebnf_of
from tests.support.byte_grammars import accepts

BANNER = "#" * 200


@pytest.fixture(autouse=True)
def moment() -> Iterator[None]:
    begun = time.process_time()
    yield
    assert time.process_time() - begun < 5


def is_refused(grammar: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        ebnf_of(grammar)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_banners_in_comments(end):
    """Behind a name, between rules, at the text's end: the grammar is that without them."""
    plain = f'root ::= x{end}x ::= "a"'
    for text in (f'root ::= x {BANNER}{end}x ::= "a"', f'root ::= x{end}{BANNER}{end}x ::= "a"', f"{plain} {BANNER}"):
        assert ebnf_of({"ebnf": text}) == ebnf_of({"ebnf": plain})
    is_refused({"ebnf": f'root ::= x {BANNER}{end}y "a"'}, "rule x is not defined")


@pytest.mark.parametrize("filling", [" ", "1"])
def test_braces_that_are_not_closed(filling):
    long = "{" + filling * 30_000
    is_refused({"ebnf": f'root ::= "a"{long}'}, "{ must begin a number of times")
    assert accepts({"regex": f"a{long}"}, f"a{long}")


def test_classes_and_texts_that_end_in_a_backslash():
    is_refused({"regex": "[" * 30_000 + "\\"}, "a backslash at the end")
    is_refused({"ebnf": "root ::= " + "[" * 30_000 + "\\"}, "is no escape that is known")


@pytest.mark.parametrize("key", ["pattern", "regex"])
def test_groups_with_anchors_do_not_multiply(key):
    def grammar(pattern: str) -> dict:
        return {key: pattern} if key == "regex" else {"json_schema": {"type": "string", "pattern": pattern}}

    for pattern in ("(|^)" * 100, "(|$)" * 100, "(^|)" * 40 + "(|$)" * 40, "^" * 10_000):
        assert ebnf_of(grammar(pattern))
    is_refused(grammar("(^a|" + "|".join(f"^{i}" for i in range(500)) + ")" + "x" * 1000), "too many alternatives")


def rules(*bodies: str) -> dict:
    """Rules root, a, b, ... with these bodies."""
    return {"ebnf": "\n".join(f"{name} ::= {body}" for name, body in zip(["root", *"abcdef"], bodies, strict=False))}


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "a??" * 33},
        {"regex": "(ab)?" * 33},
        {"regex": "(a|)" * 33},
        {"regex": "((a?)(b*)){1}" * 17},
        {"regex": "(xa{0,2})?" * 33},
        {"regex": "x" + "(a?b*)" * 17 + "x|y"},
        {"regex": "(" + "a?" * 17 + "x" + "b?" * 17 + ")*"},
        {"json_schema": {"type": "string", "pattern": "^" + "a*?" * 33 + "$"}},
        rules('Regex("' + "a?" * 33 + '")'),
        rules('Regex("' + "(ab)??" * 33 + '")'),
        rules("a " * 33, '"x"?'),
        rules("a " * 33, "b | b b", '"x" | ""'),
        rules("a " * 7, "b " * 5, '"x"?'),
        rules("a " * 33, '"x" a | ""'),
        rules('("x" "y")? ' * 33),
    ],
    ids=str,
)
def test_too_many_loose_parts_in_a_row(grammar):
    """However they are written: a token's time grows with the square of their number."""
    is_refused(grammar, "more than 32 optional or repeated parts in a row")


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "a??" * 32},
        {"regex": "a?b" * 100},
        {"regex": "(a?b)+x" * 40},
        {"regex": "(a|b)" * 100},
        {"regex": "(a?){1,70}"},
        {"regex": "[a-z]+( [a-z]+){40}"},
        rules("a " * 32, '"x"?'),
        rules("a " * 40, '"x"? "y"'),
        rules('"x" ( a b )* a a', '"x"? root "y" | ""', 'b b | "" | "x"'),
    ],
    ids=str,
)
def test_loose_parts_that_may_stand_in_a_row(grammar):
    assert ebnf_of(grammar)


def test_what_regex_holds_is_bounded_as_a_regex():
    is_refused(rules('Regex("(((a{0,50}){0,50}){0,50})")'), "line 1: repetitions of repetitions of repetitions")
    is_refused(rules('"x"', 'Regex("' + "a?b" * 2001 + '")'), "line 2: 2001 groups and optional or repeated parts")


def with_names(names: list[str], others: object = True) -> dict:
    return {"type": "object", "properties": dict.fromkeys(names, True), "additionalProperties": others}


def test_names_that_others_must_differ_from_are_bounded():
    hundred = [f"{i:02}" + "x" * 18 for i in range(100)]
    assert accepts({"json_schema": with_names(hundred)}, f'{{"{hundred[5]}":1,"{hundred[5]}x":2}}')
    assert ebnf_of({"json_schema": {"anyOf": [with_names(hundred, others) for others in (True, {"type": "null"})]}})
    assert ebnf_of({"json_schema": with_names(["a" * 3900 + str(i) for i in range(50)])})
    assert ebnf_of({"json_schema": with_names(["a" * 20_000], False)})
    said = "#: 20000 characters of names beside additionalProperties; at most 4000 are possible"
    is_refused({"json_schema": with_names(["a" * 20_000])}, said)
    two = {"anyOf": [with_names(["a" * 3000]), with_names(["b" * 3000])]}
    is_refused({"json_schema": two}, "#/anyOf/1: 6000 characters of names")


def test_names_take_rules_only_where_there_are_others():
    """And as much text as the names, not a multiple of it."""
    name = "a" * 2000
    assert len(ebnf_of({"json_schema": with_names([name], False)})) < 5 * len(name)
    assert len(ebnf_of({"json_schema": with_names([name])})) < 50 * len(name)
