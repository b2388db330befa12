"""Writes JSON schemas as EBNF: every text of the grammar is JSON whose value the schema allows.

`json_schema.check_schema` has refused what cannot be written. Objects have the properties that the schema names, in its
order, and others only where it says so. Knows nothing of tokens.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor
from typing import Any
from urllib.parse import unquote

from eagle_train.errors import UserError, check
from eagle_train.inference.grammar.ebnf import (
    ESCAPED,
    NEVER,
    NEVER_RULE,
    Rules,
    in_json,
    literal,
    write_rules,
    written,
)
from eagle_train.inference.grammar.formats import FORMATS
from eagle_train.inference.grammar.numbers import NUMBER, Bound, decimals, integers, multiples
from eagle_train.inference.grammar.patterns import (
    ANY,
    EVERY,
    Chars,
    Impossible,
    expect,
    limited,
    points,
    searched,
    whole,
    without,
)
from eagle_train.inference.grammar.rules import Reader, freed, impossible_rules, possible_rules

PYTHON: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
    "boolean": bool,
}
Schema = Mapping[str, Any] | bool
Path = tuple[str, ...]
"""A schema's place in the whole: keywords, names and numbers."""

_TYPES = ("object", "array", "string", "number", "boolean", "null")
_MOST_STATES = 5000  # of an object: its properties times the counts that are distinguished
_MOST_LISTED = 1000  # multiples between two bounds, which are listed
_MOST_GROUPS = 200  # nested, in a pattern and around it
WHITESPACE = (
    16  # the most characters between two tokens of JSON, unless a request says otherwise: a line end and indentation
)
# A character that needs no escape, or any escape; surrogates in pairs only.
_CHAR = (written(Chars(without(EVERY, ESCAPED)), Rules("")), r'"\\" ["\\/bfnrt]', r'"\\u" unit')
_BASIC = {
    "unit": r'[0-9a-cA-CeEfF] hex hex hex | [dD] [0-7] hex hex | [dD] [89abAB] hex hex "\\u" [dD] [c-fC-F] hex hex',
    "hex": "[0-9a-fA-F]",
    "string": r'"\"" text "\""',
    "text": " | ".join(['""', *(f"{option} text" for option in _CHAR)]),  # see Rules.any_number_of
    "number": written(whole(NUMBER), Rules("")),
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "array": '"[" (gap value (comma value)*)? gap "]"',
    "object": '"{" (gap string colon value (comma string colon value)*)? gap "}"',
    "comma": 'gap "," gap',
    "colon": 'gap ":" gap',
}


def write_schema(schema: Schema, whitespace: int | None = WHITESPACE) -> str:
    """A schema as EBNF. `whitespace`: the most characters between two tokens of JSON; None: unlimited.

    Raises UserError, naming the place, for what cannot be guaranteed.
    """
    writer = _Writer(schema)
    root = writer.rule_of(schema, ())
    space = r"[ \n\r\t]"
    gap = '""' if whitespace == 0 else f"{space}*" if whitespace is None else f"{space}{{0,{whitespace}}}"
    rules = {"root": root, **writer.rules.bodies, **writer.schemas, **_BASIC, "gap": gap}
    text = "\n".join(f"{name} ::= {body}" for name, body in rules.items())
    return writer.freed(text) if writer.may_be_impossible(text) else text


def place(path: Path) -> str:
    """A schema's place as text, for errors."""
    return "/".join(["#", *(name if name.isprintable() and len(name) < 40 else repr(name)[:60] for name in path)])


def path_of(text: str) -> Path:
    """The place that a `$ref` beginning with # refers to."""
    parts = text[1:].split("/")[1:]
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in parts)


@dataclass(frozen=True)
class _Members:
    """What the members of an object may be."""

    named: list[tuple[str, str, bool]]  # name, rule of the value, whether it is required
    other: str | None  # the rule of other members' values; None: there are no others
    key: str  # the rule of other members' names, where there are others
    least: int  # members
    most: int | None  # members; None: unlimited


class _Writer:
    def __init__(self, root: Schema):
        self.root, self.rules = root, Rules("r")
        self.schemas, self.known = dict[str, str](), dict[Path, str]()
        self.reasons, self.is_recursive = dict[Path, str](), False  # by schema: why no value satisfies it

    def may_be_impossible(self, text: str) -> bool:
        """Whether there may be a rule that no text matches: NEVER is used, or a rule refers to itself."""
        return NEVER in text or self.is_recursive

    def freed(self, text: str) -> str:
        """A grammar without the parts that no text matches. Raises UserError, naming the place, where none is left."""
        grammar = Reader(f"{text}\n{NEVER_RULE}", _MOST_GROUPS).grammar()
        paths = {name: path for path, name in self.known.items()}
        culprits = [paths[name] for name in impossible_rules(grammar) if name in paths]
        if culprits:
            reason = self.reasons.get(culprits[-1], "no value is possible")
            raise UserError(f"{place(culprits[-1])}: {reason}")
        as_it_is = NEVER not in text and set(grammar) - possible_rules(grammar) == {NEVER}
        return text if as_it_is else write_rules(freed(grammar))

    def rule_of(self, schema: Schema, path: Path) -> str:
        """The name of the rule of a schema's texts. Schemas may refer to each other."""
        self.is_recursive |= path in self.known and self.known[path] not in self.schemas
        if path not in self.known:
            self.known[path] = f"s{len(self.known)}"
            try:
                self.schemas[self.known[path]] = self.body(schema, path)
            except UserError as error:
                raise error if str(error).startswith("#") else UserError(f"{place(path)}: {error}") from error
        return self.known[path]

    def body(self, schema: Schema, path: Path) -> str:
        if isinstance(schema, bool):
            return "value" if schema else NEVER
        if "$ref" in schema:
            return self.referred(schema["$ref"])
        for key in ("anyOf", "oneOf", "allOf"):  # which are alone, oneOf's exclude each other, allOf has one
            if key in schema:
                return " | ".join(self.rule_of(each, (*path, key, str(i))) for i, each in enumerate(schema[key]))
        if "const" in schema or "enum" in schema:
            return self.constants(schema, path)
        return " | ".join(dict.fromkeys(self.possible(name, schema, path) for name in _types_of(schema)))

    def constants(self, schema: Mapping[str, Any], path: Path) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        left = [value for value in values if any(_is_of(value, name) for name in _types_of(schema))]
        if not left:
            self.reasons[path] = f"no value of enum or const is of type {schema.get('type')!r}"
        return " | ".join(dict.fromkeys(map(_constant, left))) or NEVER

    def possible(self, name: str, schema: Mapping[str, Any], path: Path) -> str:
        """The texts of one of a schema's types; NEVER where its keywords allow none."""
        try:
            return self.of_type(name, schema, path)
        except Impossible as error:
            self.reasons[path] = str(error)
            return NEVER

    def referred(self, text: str) -> str:
        path = path_of(text)
        schema: Any = self.root
        for name in path:
            schema = schema[int(name) if isinstance(schema, list) else name]
        return self.rule_of(schema, path)

    def of_type(self, name: str, schema: Mapping[str, Any], path: Path) -> str:
        if name == "object":
            return self.object(schema, path)
        if name == "array":
            return self.array(schema, path)
        if name == "string":
            return _string(schema, self.rules)
        if name == "integer":
            return self.integer(schema)
        return _number(schema, self.rules) if name == "number" else name

    def integer(self, schema: Mapping[str, Any]) -> str:
        least, most = _whole_bounds(schema)
        expect(least is None or most is None or least <= most, "minimum greater than maximum leaves no number")
        of = int(schema.get("multipleOf", 1))
        if of == 1:
            return written(whole(integers(least, most)), self.rules)
        if least is None and most is None:
            return self.multiple(of)
        listed = None if least is None or most is None else range(-(-least // of) * of, most + 1, of)
        if listed is None or len(listed) > _MOST_LISTED:
            raise UserError(
                f"multipleOf and bounds cannot be guaranteed together but for {_MOST_LISTED} numbers at most"
            )
        expect(len(listed) > 0, f"no multiple of {of} is between these bounds")
        return " | ".join(literal(str(each)) for each in listed)

    def multiple(self, of: int) -> str:
        """The multiples of a number, by a rule for each remainder of the digits so far."""
        name = f"multiple{of}_"
        for remainder, after in enumerate(multiples(of)):
            end = ['""'] if remainder == 0 else []
            self.schemas[f"{name}{remainder}"] = " | ".join(end + _digits(after, name))
        first = _digits([None, *multiples(of)[0][1:]], name)
        return f'"0" | "-"? ({" | ".join(first)})'

    def array(self, schema: Mapping[str, Any], path: Path) -> str:
        prefix, least, most = schema.get("prefixItems", []), schema.get("minItems", 0), schema.get("maxItems")
        beyond = max(least, most or 0) > len(prefix)
        rest = schema.get("items", not prefix or beyond)  # a tuple is closed unless something speaks of more
        if rest is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        expect(most is None or least <= most, f"minItems {least}: there can be only {most}")
        item = "value" if rest is True else self.rule_of(rest, (*path, "items")) if rest is not False else NEVER
        left = None if most is None else most - len(prefix)
        after = _repeated(f"comma {item}", max(least - len(prefix), 0), left) if left is None or left > 0 else '""'
        for i in reversed(range(len(prefix))):
            if most is not None and i >= most:
                continue
            each = f"{'comma' if i else 'gap'} {self.rule_of(prefix[i], (*path, 'prefixItems', str(i)))}"
            after = f"{each} {after}" if i < least else f"({each} {self.rules.named(after)})?"
        if not prefix:
            after = _listed(item, least, most)
        return f'"[" {after} gap "]"'

    def object(self, schema: Mapping[str, Any], path: Path) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        other = schema.get("additionalProperties", "properties" not in schema)
        members = _Members(
            [
                (name, self.rule_of(each, (*path, "properties", name)), name in required)
                for name, each in properties.items()
            ],
            None
            if other is False
            else "value"
            if other is True
            else self.rule_of(other, (*path, "additionalProperties")),
            "" if other is False else self.other_name(list(properties)),
            schema.get("minProperties", 0),
            schema.get("maxProperties"),
        )
        counted = max(members.least, members.most or 0)
        states = (len(members.named) + 1) * (min(counted, len(members.named)) + 1)
        check(states <= _MOST_STATES, "minProperties or maxProperties cannot be guaranteed for so many properties")
        body = self.members(members)
        same = members.other is not None and members.least > len(properties) + 1
        check(not same, "minProperties cannot be guaranteed: one name may come twice")
        expect(body is not None, "no object has so many, or so few, of these properties")
        return f'"{{" {body} gap "}}"'

    def members(self, members: _Members) -> str | None:
        """An object's members; None where it can have none such.

        Built from the last property to the first: `after[count]` is what may follow once `count` members are written;
        None: nothing.
        """
        most_counted = max(1, members.least, members.most or 0)
        counts = range(min(most_counted, len(members.named)) + 1)
        after = {count: self.others(members, count) for count in counts}
        for name, value, is_required in reversed(members.named):
            member = f"{literal(json.dumps(name, ensure_ascii=False))} colon {value}"
            now: dict[int, str | None] = {}
            for count in counts:
                full = members.most is not None and count >= members.most
                then = None if full else after[min(count + 1, counts[-1])]
                with_it = None if then is None else f"{'comma' if count else 'gap'} {member} {then}"
                possible = [with_it] if is_required else [with_it, after[count]]
                options = [option for option in possible if option is not None]
                now[count] = self.rules.named(" | ".join(options)) if options else None
            after = now
        return after[0]

    def others(self, members: _Members, count: int) -> str | None:
        """Members with other names, after `count` members; None: impossible. A name may come twice, so that any number
        of them counts as one towards `least`."""
        least = max(members.least - count, 0)
        if members.other is None or members.most == count:
            return '""' if least == 0 else None
        if least > 1:
            return None
        member = f"{members.key} colon {members.other}"
        left = None if members.most is None else members.most - count
        if count:
            return self.rules.named(_repeated(f"comma {member}", least, left))
        return self.rules.named(_listed(member, least, left))

    def other_name(self, names: list[str]) -> str:
        """A rule for the strings that are none of these names. It has no escapes, which could spell one of them."""
        if not names:
            return "string"
        plain = written(ANY, self.rules, json=True)
        children, ends = _tree_of(names)
        rules = [""] * len(children)
        for node in reversed(range(len(children))):
            after = [f"{literal(in_json(c))} {rules[child]}" for c, child in sorted(children[node].items())]
            others = written(Chars(without(EVERY, points("".join(children[node])))), self.rules, json=True)
            rest = self.rules.named(rf'{others} {plain} "\""')
            end = [] if node in ends else [r'"\""']
            rules[node] = self.rules.named(" | ".join([*end, *after, rest]))
        return self.rules.named(rf'"\"" {rules[0]}')


def _tree_of(names: Iterable[str]) -> tuple[list[dict[str, int]], set[int]]:
    """A tree of names: the nodes that follow each node, by character, all behind it, and the nodes where names end."""
    children, ends = [dict[str, int]()], set[int]()
    for name in names:
        node = 0
        for character in name:
            if character not in children[node]:
                children[node][character] = len(children)
                children.append({})
            node = children[node][character]
        ends.add(node)
    return children, ends


def _types_of(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", list(_TYPES))
    return [types] if isinstance(types, str) else types


def _is_of(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON Schema; 1.0 is an integer."""
    if isinstance(value, bool) or value is None:  # True is an int to Python
        return name == ("null" if value is None else "boolean")
    whole_float = name == "integer" and isinstance(value, float) and value.is_integer()
    return whole_float or (name not in ("null", "boolean") and isinstance(value, PYTHON[name]))


def _digits(after: Iterable[int | None], name: str) -> list[str]:
    """For each digit an expression: the digit, then the rule of its remainder. None leaves the digit out."""
    return [f'"{digit}" {name}{remainder}' for digit, remainder in enumerate(after) if remainder is not None]


def _repeated(body: str, least: int, most: int | None) -> str:
    return f"({body}){{{least},{'' if most is None else most}}}"


def _listed(each: str, least: int, most: int | None) -> str:
    """`least` to `most` of `each`, separated by commas, after a gap."""
    if most == 0:
        return '""'
    some = f"gap {each} {_repeated(f'comma {each}', max(least - 1, 0), None if most is None else most - 1)}"
    return some if least else f"({some})?"


def _constant(value: Any) -> str:
    """A value, with gaps between the tokens of its JSON."""
    if isinstance(value, Mapping):
        names = [literal(json.dumps(name, ensure_ascii=False)) for name in value]
        inner = [f"{name} colon {_constant(each)}" for name, each in zip(names, value.values(), strict=True)]
    elif isinstance(value, list | tuple):
        inner = [_constant(each) for each in value]
    else:
        return literal(json.dumps(value, ensure_ascii=False))
    start, end = "{}" if isinstance(value, Mapping) else "[]"
    body = f"gap {' comma '.join(inner)} " if inner else ""
    return f'"{start}" {body}gap "{end}"'


def _string(schema: Mapping[str, Any], rules: Rules) -> str:
    """A string. `pattern`, `format` and the lengths, in code points, are about its value, not about its JSON."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    expect(most is None or least <= most, "minLength greater than maxLength leaves no string")
    keys = sorted({"minLength", "maxLength", "pattern", "format"} & set(schema))
    if "pattern" not in schema and "format" not in schema:
        return rf'"\"" ({rules.counted(list(_CHAR), least, most)}) "\""' if keys else "string"
    node = searched(schema["pattern"]) if "pattern" in schema else whole(FORMATS[schema["format"]])
    try:
        node = limited(node, least, most)
    except UserError as error:
        raise type(error)(f"{', '.join(keys)} {error}") from error
    return rf'"\"" {written(node, rules, json=True)} "\""'


def _bounds(schema: Mapping[str, Any]) -> tuple[Bound | None, Bound | None]:
    """The tighter lower and upper bound; None: unbounded."""
    given = {key: Bound(Decimal(repr(schema[key])), key.startswith("ex")) for key in _BOUNDS if key in schema}
    low = [given[key] for key in ("minimum", "exclusiveMinimum") if key in given]
    high = [given[key] for key in ("maximum", "exclusiveMaximum") if key in given]
    least = max(low, key=lambda bound: (bound.value, bound.strict), default=None)
    return least, min(high, key=lambda bound: (bound.value, not bound.strict), default=None)


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _whole_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The bounds as integers, both inclusive."""
    low, high = _bounds(schema)
    least = None if low is None else ceil(low.value) + (low.strict and low.value == ceil(low.value))
    most = None if high is None else floor(high.value) - (high.strict and high.value == floor(high.value))
    return least, most


def _number(schema: Mapping[str, Any], rules: Rules) -> str:
    least, most = _bounds(schema)
    if least is None and most is None:
        return "number"
    above = least is not None and most is not None and least.value > most.value
    expect(not above, "minimum greater than maximum leaves no number")
    return written(whole(decimals(least, most)), rules)
