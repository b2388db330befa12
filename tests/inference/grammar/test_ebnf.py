"""Users' EBNF is kept exactly: all texts of a few characters are compared with the same language as a regular
expression.

And no text is begun that cannot be completed, in EBNF and in schemas.
"""

import random
from collections.abc import Callable
from functools import reduce

import pytest
import regex
import torch

from eagle_train.errors import UserError
from eagle_train.inference.grammar.guided import ebnf_of
from tests.support.byte_grammars import accepts, compiled, xgrammar

LETTERS = 'ab-]^"\\ \né😀\0x4Aro'
LANGUAGES = [  # a grammar, and its language, as the `regex` module has it
    ('root ::= "a" | "b" "a"', "a|ba"),
    ('root ::= root "a" | "b"', "ba*"),
    ('root ::= x\nx ::= y "a" | "b"\ny ::= x | "x"', "(b|xa)a*"),
    ('root ::= x x\nx ::= x x | "" | "a"', "a*"),
    ('root ::= ("a"?)* "b"', "a*b"),
    ('root ::= (x){2,} "b"\nx ::= "a" | ""', "a*b"),
    ('root ::= "a"{2} "b"{1,}\t"x" { 0 , 1 }', "aab+x?"),
    ('root ::= ("a" "b"){0} | "x"', "x?"),
    ('root ::= x "a" | "" "b"\nx ::= (x){0,2}', "a|b"),  # by which xgrammar ended the process
    ('root ::= (x){0} "a"\nx ::= (y){0,2}\ny ::= x', "a"),
    ('root ::= "a" root "b" | ( ) ""', "(a(?1)?b)?"),
    ('root ::= (\n"a" # )\n| "b" )\n\n x \nx::= "]" ""', r"[ab]\]"),
    ('\ufeffroot ::= "a"\r\n  | "b"\r# c\r| x\r\nx ::= "x"', "[abx]"),
    ('root::=true-|_.4\ntrue- ::= "a"\n_.4 ::=\n"b"', "[ab]"),
    ('root ::= Regex\nRegex ::= "a"', "a"),
    ('root ::= of_root | part0{2}\nof_root ::= "a" "b"\npart0 ::= "a" | "b" "x"', "ab|(a|bx){2}"),
    (r'root ::= "\x41\u00e9" | "\ud83d\ude00" | "\U0001F600a" | "\"\\"', r'Aé|😀|😀a|"\\'),
    (r'root ::= "a\0b" | [\0x]', "a\0b|[\0x]"),
    (r"root ::= [\]\-^]", r"[\]\-^]"),
    (r"root ::= [^\]\n]", r"[^\]\n]"),
    (r"root ::= [-a] | [b-] [a^]", r"[-a]|[b\-][a^]"),
    (r"root ::= [^^a] | [ -\"]{2}", r'[^\^a]|[ -"]{2}'),
    (r'root ::= [+--] ["#] [\x41]', '[+--]["#]A'),
    (r'root ::= "#" | "a" #" "b"', "#|a"),
    (r'root ::= Regex("^a.?b$") | Regex ( "[^\\s\"a]" )', r'a[^\n]?b|[^\s"a]'),
    ('root ::= Regex("a|b"){2} "x"', "(a|b){2}x"),
    ('root ::= "a" | b\nb ::= "b" x\nx ::= x "x"', "a"),
    ('root ::= "a" ("b" x)? ("x" x)* "b"\nx ::= x', "ab"),
]


def texts_of(grammar: dict, longest: int, letters: str = LETTERS) -> tuple[set[str], set[str]]:
    """All texts of up to so many of these letters that a grammar accepts, and all prefixes that it allows."""
    state = xgrammar.GrammarMatcher(compiled(grammar))
    found, begun = set(), set()

    def go(text: str) -> None:
        begun.add(text)
        found.update([text] if state.is_completed() else [])
        for letter in letters if len(text) < longest else "":
            taken = 0
            for byte in letter.encode():
                if not state.accept_token(byte):
                    break
                taken += 1
            if taken == len(letter.encode()):
                go(text + letter)
            state.rollback(taken)

    go("")
    return found, begun


@pytest.mark.parametrize(("ebnf", "pattern"), LANGUAGES, ids=[str(i) for i in range(len(LANGUAGES))])
def test_a_grammar_has_the_texts_it_is_meant_to_have(ebnf, pattern):
    """All texts of up to three characters, each of their prefixes, and nothing else."""
    language = regex.compile(pattern)
    wanted, begun, level = set(), set(), [""]
    for _ in range(4):
        level = [text for text in level if language.fullmatch(text, partial=True)]
        begun.update(level)
        wanted.update(text for text in level if language.fullmatch(text))
        level = [text + letter for text in level for letter in LETTERS]
    assert texts_of({"ebnf": ebnf}, 3) == (wanted, begun)
    assert wanted


# --- random grammars, against the texts that follow from their rules by going round until nothing is new

PARTS = [('"a"', {"a"}), ('"ab"', {"ab"}), ("()", {""}), ("[ab]", {"a", "b"}), (r"[^a\0-\x1f]", {"b", '"'})]
PARTS += [(r'"\u0062"', {"b"}), ('Regex("a?")', {"", "a"}), (r'Regex("[^\\s\\S]")', set())]
TIMES = [("*", 0, 9), ("+", 1, 9), ("?", 0, 1), ("{2}", 2, 2), ("{0}", 0, 0), ("{0,70}", 0, 9), ("{2,}", 2, 9)]
MOST = 3  # characters of a text that are looked at
Texts = Callable[[dict[str, set[str]]], set[str]]
"""Those of a part of a rule, from those of the rules."""


def joined(first: set[str], then: set[str]) -> set[str]:
    return {a + b for a in first for b in then if len(a + b) <= MOST}


def repeated(texts: set[str], least: int, most: int) -> set[str]:
    found, now = set(), {""}
    for count in range(most + 1):
        found |= now if count >= least else set()
        now = joined(now, texts)
    return found


def random_part(rng: random.Random, names: list[str], depth: int) -> tuple[str, Texts]:
    kind = rng.choice(["name", "text", "row", "choice", "times"] if depth else ["name", "text"])
    if kind == "name":
        name = rng.choice(names)
        return name, lambda known: known[name]
    if kind == "text":
        written, texts = rng.choice(PARTS)
        return written, lambda known: texts
    inner = [random_part(rng, names, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == "row":
        return " # c\n".join(each for each, _ in inner), lambda known: reduce(joined, (of(known) for _, of in inner))
    if kind == "choice":
        return f"({' | '.join(each for each, _ in inner)})", lambda known: set().union(*(of(known) for _, of in inner))
    (sign, least, most), (written, of) = rng.choice(TIMES), inner[0]
    return f"({written}){sign}", lambda known: repeated(of(known), least, most)


def refused(ebnf: str) -> bool:
    try:
        return not ebnf_of({"ebnf": ebnf})
    except UserError as error:
        return "matches no text" in str(error)


@pytest.mark.parametrize("seed", range(8))
def test_random_grammars_have_the_texts_that_follow_from_their_rules(seed):
    """And every prefix that is allowed can be completed; grammars that are refused have no texts."""
    rng, count = random.Random(seed), 0
    for _ in range(60):
        names = ["root", "x", "true"][: rng.randint(1, 3)]
        rules = {name: random_part(rng, names, 3) for name in names}
        known = {name: set() for name in names}
        while (more := {name: of(known) for name, (_, of) in rules.items()}) != known:
            known = more
        ebnf = "\n".join(f"{name} ::= {written}" for name, (written, _) in rules.items())
        if refused(ebnf):
            assert not known["root"], ebnf
            count += 1
            continue
        found, begun = texts_of({"ebnf": ebnf}, MOST, 'ab"')
        assert found == known["root"], ebnf
        grammar = compiled({"ebnf": ebnf})
        for text in begun - found:
            state, bits = xgrammar.GrammarMatcher(grammar), torch.zeros(1, 9, dtype=torch.int32)
            assert state.accept_string(text)
            state.fill_next_token_bitmask(bits)
            assert bits.any(), (ebnf, text)
    assert 0 < count < 50


@pytest.mark.parametrize(
    ("ebnf", "said"),
    [
        ("root ::= (", "line 1: an element is missing before its end"),
        ('root ::= "a"\n |', "line 2: an element is missing before its end"),
        ("root ::= \n\nx", "line 3: rule x is not defined"),
        ('x ::= "a"', "line 1: there is no rule of the name root"),
        ('root ::= "a"\r\n\rroot ::= "b"', "line 3: rule root is defined twice"),
        ('root ::= "a" x ::= "b"', "line 1: rule x must begin on a line of its own"),
        ('root ::= "a\nb"', 'line 1: a text is not closed: a " is missing'),
        ("root ::= [a\n]", "line 1: a class must end on its line"),
        ("root ::= []a]", r"line 1: a class that begins with ] means different things; write \] for it"),
        (r'root ::= "\q"', r"line 1: \q is no escape that is known"),
        (r'root ::= [\d]', r"line 1: \d is no escape that is known"),
        (r'root ::= "\x414"', r"line 1: \x414 means different things; write \u and four digits"),
        (r'root ::= "\x4"', r"line 1: \x is no escape that is known"),
        (r'root ::= "\012"', r"line 1: \01 is no escape that is known"),
        (r'root ::= "\ud800"', r"line 1: \ud800 is no character"),
        (r'root ::= "\U00110000"', r"line 1: \U00110000 is no character"),
        ("root ::= [b-a]", "line 1: a range of characters ends before it begins"),
        ('root ::= "a"{,3}', "line 1: { must begin a number of times"),
        ('root ::= "a"{3,1}', "line 1: Lower bound is larger than the upper bound of a repetition"),
        ('root ::= "a"+?', "line 1: a repetition of a repetition"),
        ('root ::= x\nx ::= ("a") (= "b")', "line 2: a lookahead, (= ...), cannot be guaranteed"),
        ("root ::= Token(3)", "line 1: Token(...) cannot be guaranteed"),
        ('root ::= "a" )', "line 1: a ) closes no group"),
        ("root ::= 'a'", """line 1: "'a'" begins neither a text, a class, a group nor a rule's name"""),
        ('# c\nroot = "a"', "line 2: a rule must begin so: NAME ::= ;"),
        ('root[max_tokens=3] ::= "a"', "line 1: a rule must begin so: NAME ::= ;"),
        ('root ::= "a"\n  Regex("b$a")', "line 2: ^ and $ may stand at the ends only"),
        ('root ::= Regex("a", "b")', 'line 1: Regex must have one text: Regex("...")'),
        ("root ::= root", "line 1: rule root matches no text"),
        ('root ::= "a" x\nx ::= x "a" | y\ny ::= "b" x', "line 3: rule y matches no text"),
        ("root ::= x\nx ::= Regex(\"[^\\\\s\\\\S]\")", "line 2: rule x matches no text"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_refused(ebnf, said):
    with pytest.raises(UserError) as error:
        ebnf_of({"ebnf": ebnf})
    assert str(error.value).startswith(said)
    assert len(str(error.value).splitlines()) == 1


# --- what nothing can match

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
NO_TEXT = {**STRING, "minLength": 3, "maxLength": 2}


def needing(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (False, "#: no value is possible"),
        (needing(a=INTEGER, b=False), "#/properties/b: no value is possible"),
        (needing(a=NO_TEXT), "#/properties/a: minLength greater than maxLength leaves no string"),
        ({"anyOf": [NO_TEXT, False]}, "#/anyOf/0: minLength greater than maxLength leaves no string"),
        ({"$ref": "#"}, "#: no value is possible"),
        (needing(next={"$ref": "#"}), "#/properties/next: no value is possible"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items: no value is possible"),
        ({"enum": ["a", True], "type": ["integer", "null"]}, "#: no value of enum or const is of type"),
        ({"type": "array", "prefixItems": [INTEGER, False], "minItems": 2}, "#/prefixItems/1: no value is possible"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "#: minItems 2: there can be only 1"),
        ({**STRING, "pattern": r"^a[^\s\S]$"}, "#: no value is possible"),
        ({**STRING, "pattern": "^ab$", "minLength": 3}, "#: minLength, pattern leave no text that has the length"),
        ({**STRING, "format": "uuid", "maxLength": 35}, "#: format, maxLength leave no text that has the length"),
        ({**INTEGER, "multipleOf": 7, "minimum": 1, "maximum": 6}, "#: no multiple of 7 is between these bounds"),
        ({"type": "object", "additionalProperties": False, "minProperties": 1}, "#: no object has so many, or so few"),
        (r"a[^\s\S]|[^\s\S]b", "matches no text"),
    ],
)
def test_what_nothing_matches_is_refused(grammar, said):
    """In schemas and regular expressions; the error names the part that cannot be satisfied."""
    with pytest.raises(UserError) as error:
        ebnf_of({"regex" if isinstance(grammar, str) else "json_schema": grammar})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("grammar", "texts", "begun"),
    [
        ({"type": "object", "properties": {"a": False, "ab": INTEGER}}, ["{}", '{"ab":1}'], '{"a"'),
        ({"type": "object", "properties": {"a": NO_TEXT, "b": True}, "minProperties": 1}, ['{"b":null}'], '{"a'),
        ({"type": "object", "additionalProperties": NO_TEXT}, ["{}"], '{"'),
        ({"type": "array", "items": {"anyOf": [NO_TEXT]}}, ["[]"], '["'),
        ({"type": "array", "prefixItems": [INTEGER, NO_TEXT]}, ["[]", "[1]"], "[1,"),
        ({"anyOf": [needing(a=NO_TEXT), needing(b=INTEGER)]}, ['{"b":1}'], '{"a'),
        ({"type": ["string", "null"], "minLength": 3, "maxLength": 2}, ["null"], '"'),
        ({"enum": ["a", 5, 6.0, 6.5, True, None], "type": ["integer", "null"]}, ["5", "6.0", "null"], "6.5"),
        ({"type": "array", "items": {"$ref": "#"}}, ["[]", "[[],[[]]]"], "1"),
        ({"anyOf": [needing(n={"$ref": "#/anyOf/0"}), INTEGER]}, ["1"], "{"),
        ({**STRING, "pattern": r"^ab$|^ac[^\s\S]$"}, ['"ab"'], '"ac'),
        (r"ab|ac[^\s\S]|b([^\s\S]x)*", ["ab", "b"], "ac"),
    ],
)
def test_what_nothing_matches_is_not_begun(grammar, texts, begun):
    grammar = {"regex" if isinstance(grammar, str) else "json_schema": grammar}
    assert all(accepts(grammar, text) for text in texts)
    state = xgrammar.GrammarMatcher(compiled(grammar))
    assert not all(state.accept_token(byte) for byte in begun.encode())
