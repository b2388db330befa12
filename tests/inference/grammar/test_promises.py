"""Guaranteed properties of grammars hold: random walks through what a grammar allows, byte by byte, are validated by
checkers that know nothing of grammars.
"""

import datetime
import ipaddress
import json
import random
import re

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.inference.grammar.formats import FORMATS
from eagle_train.inference.grammar.guided import ebnf_of
from eagle_train.inference.grammar.json_schema import check_schema
from eagle_train.inference.grammar.json_text import WHITESPACE
from tests.support.byte_grammars import accepts, compiled, xgrammar

LONGEST = 600  # bytes of a walk


def weights(hints: str) -> list[int]:
    """How often each byte is taken: closing characters more often, and those that occur in the grammar."""
    ends, digits, hinted = b'"}],:', b"-\\ud8D0159", hints.encode()
    return [
        1 + 4 * (32 <= byte < 127) + 60 * (byte in ends) + 12 * (byte in digits) + 40 * (byte in hinted)
        for byte in range(256)
    ]


def walk(grammar: xgrammar.CompiledGrammar, rng: random.Random, taken: list[int]) -> str | None:
    """One random answer; None for one that did not end in time."""
    state, text = xgrammar.GrammarMatcher(grammar), bytearray()
    bits = torch.zeros(1, 9, dtype=torch.int32)
    while len(text) < LONGEST:
        state.fill_next_token_bitmask(bits)
        words = [word & 0xFFFFFFFF for word in bits[0].tolist()]
        allowed = [byte for byte in range(256) if words[byte // 32] >> (byte % 32) & 1]
        if words[8] & 1 and (not allowed or rng.random() < 0.3):
            return text.decode()
        assert allowed, f"nothing may follow {text!r}"
        byte = rng.choices(allowed, [taken[byte] for byte in allowed])[0]
        assert state.accept_token(byte)
        text.append(byte)
    return None


def answers(grammar: dict, count: int = 40) -> list[str]:
    schema = grammar.get("json_schema")
    taken = weights(grammar["regex"] if schema is None else schema.get("pattern", ""))
    rng, built = random.Random(json.dumps(grammar, sort_keys=True)), compiled(grammar)
    found = [walk(built, rng, taken) for _ in range(count)]
    ended = [text for text in found if text is not None]
    assert len(ended) > count // 3
    return ended


# --- what a schema says of a value, after the specification


def valid(schema, value, root=None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        inner = root
        for name in filter(None, schema["$ref"][1:].split("/")):
            inner = inner[name]
        return valid(inner, value, root)
    types = schema.get("type", list(TYPES))
    rules = [any(TYPES[name](value) for name in ([types] if isinstance(types, str) else types))]
    rules += [value == schema["const"]] if "const" in schema else []
    rules += [any(value == each and type(value) is type(each) for each in schema["enum"])] if "enum" in schema else []
    holds = {key: [valid(each, value, root) for each in schema.get(key, [])] for key in ("anyOf", "oneOf", "allOf")}
    rules += [any(holds["anyOf"])] if "anyOf" in schema else []
    rules += [sum(holds["oneOf"]) == 1] if "oneOf" in schema else []
    rules += [*holds["allOf"], *KEYWORDS[type(value)](schema, value, root)]
    return all(rules)


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: is_number(value) and value == int(value),
    "number": is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def of_number(schema, value, root) -> list[bool]:
    return [
        value >= schema.get("minimum", value),
        value <= schema.get("maximum", value),
        value > schema.get("exclusiveMinimum", float("-inf")),
        value < schema.get("exclusiveMaximum", float("inf")),
        value % schema.get("multipleOf", 1) == 0 or "multipleOf" not in schema,
    ]


def of_text(schema, value, root) -> list[bool]:
    assert not re.search("[\ud800-\udfff]", value), "half of a surrogate pair"
    return [
        len(value) >= schema.get("minLength", 0),
        len(value) <= schema.get("maxLength", len(value)),
        re.search(of_python(schema.get("pattern", "")), value) is not None,
        "format" not in schema or is_of_format(schema["format"], value),
    ]


def of_python(pattern: str) -> str:
    """The one pattern here that ECMA-262 and Python spell differently."""
    return pattern.replace(r"\u{1F600}\ud83d\ude01", "😀😁")


def of_array(schema, value, root) -> list[bool]:
    prefix = schema.get("prefixItems", [])
    each = [valid(one, item, root) for one, item in zip(prefix, value, strict=False)]
    each += [valid(schema.get("items", True), item, root) for item in value[len(prefix) :]]
    return [*each, len(value) >= schema.get("minItems", 0), len(value) <= schema.get("maxItems", len(value))]


def of_object(schema, value, root) -> list[bool]:
    named = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    each = [valid(named.get(name, others), inner, root) for name, inner in value.items()]
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", len(value))
    return [*each, least <= len(value) <= most, all(name in value for name in schema.get("required", []))]


def nothing(schema, value, root) -> list[bool]:
    return []


KEYWORDS = {
    str: of_text,
    list: of_array,
    dict: of_object,
    int: of_number,
    float: of_number,
    bool: nothing,
    type(None): nothing,
}
LABEL = re.compile(r"(?!-)(?!..--)[A-Za-z0-9-]{1,63}(?<!-)")
DURATION = re.compile(r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)")
GAPS = re.compile(r"Y\d+D|H\d+S|Y(T|$)?\d+D")


def is_of_format(name: str, text: str) -> bool:
    try:
        return CHECKS[name](text)
    except ValueError:
        return False


def is_time(text: str) -> bool:
    zoned = re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
    return zoned is not None and datetime.time.fromisoformat(text) is not None


def is_date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text) is not None and datetime.date.fromisoformat(text) is not None


def is_host(text: str) -> bool:
    return len(text) <= 253 and all(LABEL.fullmatch(label) for label in text.split("."))


def is_email(text: str) -> bool:
    local, _, host = text.rpartition("@")
    atoms = all(re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+", atom, re.ASCII) for atom in local.split("."))
    return atoms and len(local) <= 64 and len(text) <= 254 and is_host(host)


def is_uri(text: str, reference: bool = False) -> bool:
    scheme, rest = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]*:)?(.*)", text).groups()
    characters = re.fullmatch(r"([!#$&-;=?@\[\]_~A-Za-z0-9]|%[0-9A-Fa-f]{2})*", text)
    path, *query = re.split("[?#]", rest, maxsplit=1)
    if path.startswith("//"):
        host = path[2:].partition("/")[0].rpartition("@")[2]
        literal = re.fullmatch(r"\[(.*)\](:\d*)?", host)
        path = "/" + path[2:].partition("/")[2]
        if literal:
            ipaddress.IPv6Address(literal[1])
        elif "[" in host or "]" in host or not re.fullmatch(r"[^:]*(:\d{0,5})?", host):
            return False
    brackets = "[" in path or "]" in path or (any(sign in text for sign in query for sign in "[]") and "[" not in rest)
    colon_first = scheme is None and ":" in path.partition("/")[0]
    return bool(characters) and not brackets and text.count("#") <= 1 and not colon_first and bool(scheme or reference)


def is_template(text: str) -> bool:
    name = r"([\w.]|%[0-9A-Fa-f]{2})+(:[1-9]\d{0,3}|\*)?"
    outside = re.sub(rf"\{{[+#./;?&]?{name}(,{name})*\}}", "", text, flags=re.ASCII)
    return re.search(r"[\x00-\x20\"'<>\\^`{|}]|%(?![0-9A-Fa-f]{2})", outside) is None


def is_pointer(text: str) -> bool:
    return text == "" or (text[0] == "/" and re.search("~(?![01])", text) is None)


CHECKS = {
    "date": is_date,
    "time": is_time,
    "date-time": lambda text: is_date(text[:10]) and text[10] == "T" and is_time(text[11:]),
    "duration": lambda text: DURATION.fullmatch(text) is not None and GAPS.search(text) is None,
    "email": is_email,
    "hostname": is_host,
    "ipv4": lambda text: bool(ipaddress.IPv4Address(text)),
    "ipv6": lambda text: ipaddress.IPv6Address(text) is not None and "%" not in text,
    "uuid": lambda text: re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text) is not None,
    "uri": is_uri,
    "uri-reference": lambda text: is_uri(text, reference=True),
    "uri-template": is_template,
    "json-pointer": is_pointer,
    "relative-json-pointer": lambda text: re.fullmatch(r"(0|[1-9]\d*)(#|(/([^~/]|~[01])*)*)", text) is not None,
}
CHECKS["ipv4"] = lambda text: str(ipaddress.IPv4Address(text)) == text
STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
NAMES = {"a": INTEGER, "ab": {"type": "null"}, 'q"\\\n': {"const": 1}}
KIND = {"a": {"const": "x"}, "b": {"enum": ["y", "z"]}}


def tagged(tag: str, **properties) -> dict:
    properties = {"kind": KIND[tag], **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


PATTERNS = [
    '^"x"$',
    r"^C:\\[a-z]{2}$",
    "a.c",
    "^ab?|c$",
    "^(a|b$)",
    r"^[^a-z]{1,3}$",
    r"^\S+\s\S+$",
    r"^[\x00-\x1f]{2}$",
    r"^\d{3}-\w+$",
    r"^(\"|\\|/){2,4}$",
    "é|😀",
    "^[😀-😂]{2}$",
    r"^\u{1F600}\ud83d\ude01$",
    "(x|^y)z",
    "^$",
    "",
    r"^[\\\]\[^-]+$",
    r"^.{2,4}$",
    r"\D\W",
]
SCHEMAS = [
    *({**STRING, "format": name} for name in FORMATS),
    *({**STRING, "pattern": pattern} for pattern in PATTERNS),
    {**STRING, "minLength": 2, "maxLength": 3},
    {**STRING, "maxLength": 0},
    {**STRING, "pattern": '^[a-z"]+$', "minLength": 3, "maxLength": 5},
    {**STRING, "pattern": "^ab{2,3}$", "maxLength": 4},
    {**STRING, "format": "uuid", "maxLength": 36},
    {**INTEGER, "minimum": -12, "maximum": 105},
    {**INTEGER, "exclusiveMinimum": 3.5, "exclusiveMaximum": 1e3},
    {**INTEGER, "minimum": 99},
    {**INTEGER, "exclusiveMaximum": -7},
    {**INTEGER, "multipleOf": 12},
    {**INTEGER, "multipleOf": 7, "minimum": -20, "maximum": 20},
    {"type": "number", "minimum": -0.25, "exclusiveMaximum": 0.1},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "maximum": -1.5},
    {"type": "number", "minimum": 9.99, "maximum": 10.01},
    {"type": ["integer", "null", "string"], "maximum": 5, "maxLength": 1},
    {"type": "array", "minItems": 2},
    {"type": "array", "maxItems": 1},
    {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3, "uniqueItems": False},
    {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 1},
    {
        "type": "array",
        "prefixItems": [INTEGER, {"type": "null"}],
        "items": {"type": "boolean"},
        "minItems": 3,
        "maxItems": 4,
    },
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "maxItems": 1},
    {"type": "object", "maxProperties": 2},
    {"type": "object", "required": []},
    {"type": "object", "minProperties": 1},
    {"type": "object", "properties": NAMES, "minProperties": 2},
    {"type": "object", "properties": NAMES, "maxProperties": 1},
    {"type": "object", "properties": NAMES, "required": ["ab"], "minProperties": 2, "maxProperties": 2},
    {"type": "object", "properties": NAMES, "required": ["a"], "additionalProperties": STRING},
    {
        "type": "object",
        "properties": NAMES,
        "additionalProperties": {"type": "boolean"},
        "minProperties": 2,
        "maxProperties": 3,
    },
    {"type": "object", "additionalProperties": {"enum": ['"', "\\", "\n", "é😀", 1.5, None, True, [1, {"a": "b"}]]}},
    {"anyOf": [INTEGER, {"allOf": [{"type": "null"}]}]},
    {"oneOf": [INTEGER, STRING, {"type": "array", "maxItems": 1}]},
    {"oneOf": [tagged("a", n=INTEGER), {"$ref": "#/$defs/b"}], "$defs": {"b": tagged("b", m=STRING)}},
    {
        "$defs": {"list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}, "v": INTEGER}}},
        "$ref": "#/$defs/list",
    },
    {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}},
    {},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=[str(i) for i in range(len(SCHEMAS))])
def test_whatever_is_allowed_is_valid(schema):
    texts = answers({"json_schema": schema})
    for text in texts:
        value = json.loads(text, parse_constant=pytest.fail)
        assert valid(schema, value), text
    one = {"^$", r"^\u{1F600}\ud83d\ude01$", '^"x"$'}
    assert len(set(texts)) > 1 or schema.get("pattern") in one or schema.get("maxLength") == 0


def test_the_checks_can_tell():
    """Violations that xgrammar's own conversion of schemas lets pass."""
    for schema, wrong in (
        ({**STRING, "format": "date"}, "2023-11-31"),
        ({**STRING, "format": "date"}, "2023-02-29"),
        ({**STRING, "format": "time"}, "12:00:60Z"),
        ({**STRING, "format": "ipv4"}, "01.2.3.4"),
        ({**STRING, "format": "ipv6"}, "1:2:3:4:5:6:7:8:9"),
        ({**STRING, "format": "hostname"}, "a" * 64),
        ({**STRING, "pattern": "^(?!a)[ab]$"}, "a"),
        ({"type": "object", "minProperties": 2}, {"a": 2}),
    ):
        assert not valid(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**STRING, "pattern": '^"x"$'}, r'"\"x\""'),
        ({**STRING, "pattern": r"^C:\\[a-z]{2}$"}, r'"C:\\ru"'),
        ({**STRING, "pattern": "b"}, '"abc"'),
        ({**STRING, "format": "date"}, '"2024-02-29"'),
        ({**STRING, "format": "hostname"}, '"a-b.' + "c" * 31 + '.example.org"'),
        ({**STRING, "format": "email"}, '"first.last+tag@mail.example.org"'),
        ({**STRING, "format": "uri"}, '"https://u@example.org:8080/a/b;c?d=e&f#g"'),
        ({**STRING, "maxLength": 1}, r'"\ud83d\ude00"'),
        ({"type": "array", "minItems": 1}, '[1, "a", {"b": [null]}]'),
        ({"type": "object", "maxProperties": 2}, '{"a": 1, "b": {"c": [2]}}'),
        ({"type": "object", "required": []}, '{"a": 1}'),
        ({"type": "object", "properties": NAMES, "additionalProperties": True}, '{"a": 1, "abc": 2, "b": "c"}'),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0.625"),
        ({"type": "array", "prefixItems": [INTEGER], "minItems": 2}, '[1, "x", 2]'),
    ],
)
def test_what_is_valid_is_allowed(schema, text):
    assert accepts({"json_schema": schema}, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": NAMES, "additionalProperties": STRING}, '{"a": 1, "a": "x"}'),
        ({"type": "object", "properties": NAMES, "additionalProperties": STRING}, r'{"a": 1, "\u0061": "x"}'),
        ({"type": "object", "properties": NAMES, "minProperties": 2}, '{"a": 1, "a": 1}'),
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER, "minProperties": 2},
         '{"b": 1, "b": 2}'),
        (STRING, r'"\ud800"'),
        (STRING, r'"\ude00\ud83d"'),
        ({**STRING, "minLength": 2}, r'"\ud83d\ude00"'),
        (INTEGER, "-"),
        (INTEGER, "01"),
    ],
)  # fmt: skip
def test_what_is_not_valid_is_not_allowed(schema, text):
    assert not accepts({"json_schema": schema}, text)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({**STRING, "pattern": "^(?!a)[ab]$"}, r"#: pattern: Lookahead cannot be guaranteed"),
        ({**STRING, "pattern": "(?<=a)b"}, r"Lookbehind cannot be guaranteed"),
        ({**STRING, "pattern": r"(a)\1"}, r"\\1, what a group has matched, cannot be guaranteed"),
        ({**STRING, "pattern": r"\bword\b"}, r"\\b, a word's edge, cannot be guaranteed"),
        ({**STRING, "pattern": r"^\p{L}+$"}, r"\\p, a Unicode property, cannot be guaranteed"),
        ({**STRING, "pattern": r"[\d-a]"}, r"a - behind \\d, \\w or \\s means different things"),
        ({**STRING, "pattern": r"[^\S-\w]"}, r"a - behind \\d, \\w or \\s means different things"),
        ({**STRING, "pattern": "(?i)abc"}, r"a group that begins with \(\?i is not known"),
        ({**STRING, "pattern": "^ab$", "minLength": 3}, r"#: minLength, pattern leave no text that has the length"),
        ({**STRING, "format": "email", "maxLength": 9}, r"#: format, maxLength cannot be guaranteed together"),
        ({**STRING, "format": "email", "pattern": "a"}, r"#: format, pattern cannot be guaranteed together"),
        ({**STRING, "format": "regex"}, r"format 'regex' cannot be guaranteed"),
        ({**STRING, "format": "idn-email"}, r"format 'idn-email' cannot be guaranteed"),
        ({"type": "object", "minProperties": 2}, "one name may come twice"),
        ({"type": "object", "properties": NAMES, "minProperties": 4}, "no object has so many"),
        ({"type": "object", "properties": NAMES, "required": ["a", "ab"], "maxProperties": 1}, "no object has so many"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties cannot be guaranteed"),
        ({"type": "object", "propertyNames": {}}, "propertyNames cannot be guaranteed"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired cannot be guaranteed"),
        ({"type": "array", "contains": INTEGER}, "contains cannot be guaranteed"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be guaranteed"),
        ({"type": "array", "items": False, "minItems": 1}, "minItems 1: there can be only 0"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({**INTEGER, "multipleOf": 7, "minimum": 1}, "multipleOf and bounds cannot be guaranteed together"),
        ({**INTEGER, "minimum": True}, "minimum True must be a number"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf cannot be guaranteed: 0 and 1 may hold together"),
        ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, "oneOf cannot be guaranteed: 0 and 1"),
        ({"oneOf": [tagged("a"), {"type": "object"}]}, "oneOf cannot be guaranteed: 0 and 1"),
        ({"not": {}}, "not cannot be guaranteed"),
        ({"if": {}, "then": {}}, "if, then cannot be guaranteed"),
        ({"type": "object", "properties": {"a": 5}}, "#/properties/a: 5 must be a schema"),
        ({"type": "object", "properties": {"a": {"$id": "x", "type": "null"}}}, r"#/properties/a: \$id cannot be"),
        (
            {"type": "object", "properties": {"a": {"properties": []}}},
            "#/properties/a: properties .* must be a mapping",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(schema, said):
    with pytest.raises(UserError, match=said) as error:
        ebnf_of({"json_schema": schema})
    assert len(str(error.value).splitlines()) == 1
    check_schema({"anyOf": [STRING]})


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p])
def test_a_regex_is_matched_from_beginning_to_end(pattern):
    found = re.compile(of_python(pattern))
    for text in answers({"regex": pattern}, 30):
        assert found.fullmatch(text), text


def test_a_hyphen_behind_a_class_escape():
    """It is itself at the end and behind a backslash; elsewhere dialects read it differently, and it is refused."""
    for pattern in (r"[\d-]", r"[\d\-a]", r"[-\da]"):
        assert accepts({"regex": pattern}, "-")
        assert accepts({"regex": pattern}, "7")
    assert not accepts({"regex": r"[\d-]"}, "a")


@pytest.mark.parametrize(
    ("ebnf", "texts", "others"),
    [
        ('root ::= "x" Regex("^a.b$") "y"', ["xacby"], ["xa\nby", "xaby"]),
        ('root ::= Regex("[0-9]{2}|\\\\d-") | "Regex(\\"a\\")"', ["12", "1-", 'Regex("a")'], ["1"]),
        ("\ufeffroot ::= [ab]", ["a"], ["c"]),
        ('root ::= Regex ( "a" )  # Regex("(?=b)"', ["a"], ["b"]),
    ],
)
def test_regexes_within_ebnf(ebnf, texts, others):
    assert all(accepts({"ebnf": ebnf}, text) for text in texts)
    assert not any(accepts({"ebnf": ebnf}, text) for text in others)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ({"ebnf": 'root ::= Regex("^(?!a)[ab]$")'}, "Lookahead cannot be guaranteed"),
        ({"ebnf": 'root ::= Regex("a$b")'}, r"\^ and \$ may stand at the ends only"),
        ({"ebnf": 'root ::= Regex("a", "b")'}, "Regex must have one text"),
        ({"ebnf": 'root ::= a "b"\na ::= "x"* (= "y")'}, r"a lookahead, \(= \.\.\.\), cannot be guaranteed"),
        ({"regex": ""}, r"grammar\.regex='': is empty"),
        ({"ebnf": ""}, r"grammar\.ebnf='': is empty"),
        ({"json_schema": ""}, r"grammar\.json_schema='': is empty"),
        ({"regex": "a", "whitespace": 3}, "whitespace=3: is for json_schema only, not for regex"),
        ({"json_schema": {}, "whitespace": -1}, "whitespace=-1: must be a whole number from 0 to 1000, or any"),
        ({"json_schema": {}, "whitespace": "all"}, "whitespace='all': must be a whole number"),
        ({"whitespace": 3}, "must be a mapping with one of the keys"),
    ],
)
def test_grammars_that_are_refused(grammar, said):
    with pytest.raises(UserError, match=said):
        compiled(grammar)


def test_white_space_has_an_end():
    schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    pretty = '{\n    "a"\t:\r\n 5\n}'
    assert accepts({"json_schema": schema}, pretty)
    for grammar, most in (
        ({}, WHITESPACE),
        ({"whitespace": 3}, 3),
        ({"whitespace": 0}, 0),
        ({"whitespace": "any"}, 99),
    ):
        grammar = {"json_schema": schema, **grammar}
        assert accepts(grammar, "{" + " " * most + '"a":5}')
        assert accepts(grammar, "{" + " " * (most + 1) + '"a":5}') == (most == 99)


@pytest.mark.parametrize("text", ["[]", "{}", "[1]", '{"a":1}', "[[]]"])
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"anyOf": [{"type": "array"}, {"type": "object"}]},
        {"enum": [[], {}, [1], {"a": 1}, [[]]]},
        {"anyOf": [{"type": "array", "prefixItems": [True]}, {"type": "object", "properties": {"a": True}}]},
    ],
)
def test_no_gap_is_wider_than_another(schema, text):
    for place in range(1, len(text)):
        inside = text[:place] + "  " + text[place:]
        if "a" in text[place - 1 : place + 1]:  # that would be another name
            continue
        assert accepts({"json_schema": schema, "whitespace": 2}, inside)
        assert not accepts({"json_schema": schema, "whitespace": 1}, inside)


BOUNDS = [(0, 1), (2, 9), (0, 31), (5, 63), (0, 64), (31, 65), (32, 64), (33, 95), (40, 100), (64, 64), (70, 200)]
LENGTHS = {0, 31, 32, 33, 63, 64, 65, 95, 96, 128}


@pytest.mark.parametrize(("least", "most"), [*BOUNDS, (2, None), (63, None), (64, None), (70, None), (0, 2**31 - 1)])
@pytest.mark.parametrize("kind", ["string", "pattern", "regex"])
def test_lengths_are_counted_exactly(least, most, kind):
    """In code points, whether rules count them one by one or in blocks."""
    times = f"{{{least},{'' if most is None else most}}}"
    grammar = {
        "string": {"json_schema": {**STRING, "minLength": least} | ({} if most is None else {"maxLength": most})},
        "pattern": {"json_schema": {**STRING, "pattern": f"^.{times}$"}},
        "regex": {"regex": f'[x"é😀]{times}'},
    }[kind]
    built = compiled(grammar)
    for length in LENGTHS | {least - 1, least, least + 1, (most or 0) % 999 + 1, most or 0}:
        if 0 <= length < 1000:
            text = ('x"é😀x' * 200)[:length]
            text = text if kind == "regex" else json.dumps(text, ensure_ascii=length % 2 == 0 and kind == "string")
            state = xgrammar.GrammarMatcher(built)
            read = all(state.accept_token(byte) for byte in text.encode())
            assert (read and state.is_completed()) == (least <= length and (most is None or length <= most)), length


def test_tokens_that_reach_over_what_is_counted_at_once():
    """Masks of long tokens against the same text matched byte by byte."""
    texts = [c * n for c in 'a"é\\' for n in (1, 2, 3, 30, 31, 32, 33, 64, 65)]
    texts += ['aa"', 'a",', "\\n" * 31, "é" * 32 + '"']
    info = xgrammar.TokenizerInfo([*texts, "<stop>"], stop_token_ids=[len(texts)])
    built = xgrammar.GrammarCompiler(info).compile_grammar(ebnf_of({"json_schema": {**STRING, "maxLength": 70}}))
    bits = torch.zeros(1, (len(texts) + 32) // 32, dtype=torch.int32)
    for begun in (0, 1, 5, 6, 37, 38, 39, 40, 63, 64, 69, 70):
        state = xgrammar.GrammarMatcher(built)
        assert state.accept_string('"' + "a" * begun)
        state.fill_next_token_bitmask(bits)
        for token, text in enumerate(texts):
            other = xgrammar.GrammarMatcher(built)
            assert other.accept_string('"' + "a" * begun)
            allowed = bits[0, token // 32].item() >> (token % 32) & 1
            assert allowed == other.accept_string(text) == begins_string('"' + "a" * begun + text, 70), (begun, text)


def begins_string(text: str, most: int) -> bool:
    """Whether a text is a prefix of a JSON string of at most so many characters."""
    if re.fullmatch(r'"([^"\\]|\\["\\nu/bfrt])*(\\|"|)', text, re.DOTALL) is None:
        return False
    return len(re.findall(r'[^"\\]|\\.|\\$', text[1:])) <= most


def test_a_byte_order_mark_is_no_text():
    assert accepts({"json_schema": '\ufeff{"type": "null"}'}, "null")
    assert accepts({"regex": "\ufeffa"}, "a")
