"""JSON schemas as EBNF: every text of the grammar is JSON whose value the schema allows.

`json_schema.check_schema` has refused what has no grammar; here is what each keyword that is left means. Objects have
the properties that the schema names, in that order, and others only where it says so. Knows nothing of tokens.
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
"""Of keywords, names and numbers: where a schema is."""

TYPES = ("object", "array", "string", "number", "boolean", "null")
MOST_STATES = 5000  # of an object: properties times those that are counted
MOST_LISTED = 1000  # multiples between two bounds, which are written one by one
MOST_GROUPS = 200  # within each other, of a pattern and what is around it
WHITESPACE = 16  # characters between two tokens of JSON, at most: a line's end and some indentation
# A character outside of what JSON must escape, or any escape; a surrogate comes as half of a pair only.
CHAR = (written(Chars(without(EVERY, ESCAPED)), Rules("")), r'"\\" ["\\/bfnrt]', r'"\\u" unit')
BASIC = {
    "unit": r'[0-9a-cA-CeEfF] hex hex hex | [dD] [0-7] hex hex | [dD] [89abAB] hex hex "\\u" [dD] [c-fC-F] hex hex',
    "hex": "[0-9a-fA-F]",
    "string": r'"\"" text "\""',
    "text": " | ".join(['""', *(f"{option} text" for option in CHAR)]),  # see Rules.any_number_of
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
    """A schema as EBNF. `whitespace`: characters between two tokens of JSON at most; None: any number.

    Raises UserError, naming the place, for what cannot be promised.
    """
    writer = Writer(schema)
    root = writer.rule_of(schema, ())
    space = r"[ \n\r\t]"
    gap = '""' if whitespace == 0 else f"{space}*" if whitespace is None else f"{space}{{0,{whitespace}}}"
    rules = {"root": root, **writer.rules.bodies, **writer.schemas, **BASIC, "gap": gap}
    text = "\n".join(f"{name} ::= {body}" for name, body in rules.items())
    return writer.freed(text) if writer.may_be_impossible(text) else text


def place(path: Path) -> str:
    """A schema's place as an error may show it."""
    return "/".join(["#", *(name if name.isprintable() and len(name) < 40 else repr(name)[:60] for name in path)])


def path_of(text: str) -> Path:
    """Where a `$ref` that begins with # leads."""
    parts = text[1:].split("/")[1:]
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in parts)


@dataclass(frozen=True)
class Members:
    """An object's members: (name, rule of its value, whether it must be there), the rule of the others' values or None,
    how many there may be, and the rule of the others' names.
    """

    named: list[tuple[str, str, bool]]
    other: str | None
    key: str
    least: int
    most: int | None


class Writer:
    def __init__(self, root: Schema):
        self.root, self.rules = root, Rules("r")
        self.schemas, self.known = dict[str, str](), dict[Path, str]()
        self.reasons, self.is_recursive = dict[Path, str](), False  # why no value of a schema is possible

    def may_be_impossible(self, text: str) -> bool:
        """Whether a rule can have no text: one that has none itself, or one that needs itself."""
        return NEVER in text or self.is_recursive

    def freed(self, text: str) -> str:
        """A grammar without what no value is of. Raises UserError, naming the place, where nothing is left."""
        grammar = Reader(f"{text}\n{NEVER_RULE}", MOST_GROUPS).grammar()
        paths = {name: path for path, name in self.known.items()}
        culprits = [paths[name] for name in impossible_rules(grammar) if name in paths]
        if culprits:
            reason = self.reasons.get(culprits[-1], "no value is possible")
            raise UserError(f"{place(culprits[-1])}: {reason}")
        as_it_is = NEVER not in text and set(grammar) - possible_rules(grammar) == {NEVER}
        return text if as_it_is else write_rules(freed(grammar))

    def rule_of(self, schema: Schema, path: Path) -> str:
        """The rule of a schema's texts; what it refers to may refer to it."""
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
        return " | ".join(dict.fromkeys(self.possible(name, schema, path) for name in types_of(schema)))

    def constants(self, schema: Mapping[str, Any], path: Path) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        left = [value for value in values if any(is_of(value, name) for name in types_of(schema))]
        if not left:
            self.reasons[path] = f"no value of enum or const is of type {schema.get('type')!r}"
        return " | ".join(dict.fromkeys(map(constant, left))) or NEVER

    def possible(self, name: str, schema: Mapping[str, Any], path: Path) -> str:
        """The texts of one of a schema's types; none where its keywords leave none."""
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
            return string(schema, self.rules)
        if name == "integer":
            return self.integer(schema)
        return number(schema, self.rules) if name == "number" else name

    def integer(self, schema: Mapping[str, Any]) -> str:
        least, most = whole_bounds(schema)
        expect(least is None or most is None or least <= most, "minimum greater than maximum leaves no number")
        of = int(schema.get("multipleOf", 1))
        if of == 1:
            return written(whole(integers(least, most)), self.rules)
        if least is None and most is None:
            return self.multiple(of)
        listed = None if least is None or most is None else range(-(-least // of) * of, most + 1, of)
        if listed is None or len(listed) > MOST_LISTED:
            raise UserError(
                f"multipleOf and bounds cannot be guaranteed together but for {MOST_LISTED} numbers at most"
            )
        expect(len(listed) > 0, f"no multiple of {of} is between these bounds")
        return " | ".join(literal(str(each)) for each in listed)

    def multiple(self, of: int) -> str:
        """A rule for each remainder of the digits so far."""
        name = f"multiple{of}_"
        for remainder, after in enumerate(multiples(of)):
            end = ['""'] if remainder == 0 else []
            self.schemas[f"{name}{remainder}"] = " | ".join(end + digits(after, name))
        first = digits([None, *multiples(of)[0][1:]], name)
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
        after = repeated(f"comma {item}", max(least - len(prefix), 0), left) if left is None or left > 0 else '""'
        for i in reversed(range(len(prefix))):
            if most is not None and i >= most:
                continue
            each = f"{'comma' if i else 'gap'} {self.rule_of(prefix[i], (*path, 'prefixItems', str(i)))}"
            after = f"{each} {after}" if i < least else f"({each} {self.rules.named(after)})?"
        if not prefix:
            after = listed(item, least, most)
        return f'"[" {after} gap "]"'

    def object(self, schema: Mapping[str, Any], path: Path) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        other = schema.get("additionalProperties", "properties" not in schema)
        members = Members(
            [
                (name, self.rule_of(each, (*path, "properties", name)), name in required)
                for name, each in properties.items()
            ],
            None
            if other is False
            else "value"
            if other is True
            else self.rule_of(other, (*path, "additionalProperties")),
            self.other_name(list(properties)),
            schema.get("minProperties", 0),
            schema.get("maxProperties"),
        )
        counted = max(members.least, members.most or 0)
        states = (len(members.named) + 1) * (min(counted, len(members.named)) + 1)
        check(states <= MOST_STATES, "minProperties or maxProperties cannot be guaranteed for so many properties")
        body = self.members(members)
        same = members.other is not None and members.least > len(properties) + 1
        check(not same, "minProperties cannot be guaranteed: one name may come twice")
        expect(body is not None, "no object has so many, or so few, of these properties")
        return f'"{{" {body} gap "}}"'

    def members(self, members: Members) -> str | None:
        """From the last property to the first, what may follow when `count` members are written; None: nothing may."""
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

    def others(self, members: Members, count: int) -> str | None:
        """Members of other names. They may come twice, so however many there are, they are counted as one."""
        least = max(members.least - count, 0)
        if members.other is None or members.most == count:
            return '""' if least == 0 else None
        if least > 1:
            return None
        member = f"{members.key} colon {members.other}"
        left = None if members.most is None else members.most - count
        if count:
            return self.rules.named(repeated(f"comma {member}", least, left))
        return self.rules.named(listed(member, least, left))

    def other_name(self, names: list[str]) -> str:
        """A string that is none of these names: written in one way only, so that none comes in disguise."""
        if not names:
            return "string"
        plain = written(ANY, self.rules, json=True)
        nodes: dict[str, set[str]] = {"": set()}
        for name in names:
            for i, character in enumerate(name):
                nodes.setdefault(name[:i], set()).add(character)
                nodes.setdefault(name[: i + 1], set())
        rules = dict[str, str]()
        for node in sorted(nodes, key=len, reverse=True):
            after = [f"{literal(in_json(c))} {rules[node + c]}" for c in sorted(nodes[node])]
            rest = written(Chars(without(EVERY, points("".join(nodes[node])))), self.rules, json=True)
            rules[node] = self.rules.named(" | ".join([*end_of(node, names), *after, rf'{rest} {plain} "\""']))
        return self.rules.named(rf'"\"" {rules[""]}')


def types_of(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", list(TYPES))
    return [types] if isinstance(types, str) else types


def is_of(value: Any, name: str) -> bool:
    """Whether a value is of a type, of which `integer` has 1.0 as well."""
    if isinstance(value, bool) or value is None:  # True is an int to Python
        return name == ("null" if value is None else "boolean")
    whole_float = name == "integer" and isinstance(value, float) and value.is_integer()
    return whole_float or (name not in ("null", "boolean") and isinstance(value, PYTHON[name]))


def end_of(node: str, names: list[str]) -> list[str]:
    return [] if node in names else [r'"\""']


def digits(after: Iterable[int | None], name: str) -> list[str]:
    """A digit each, and the rule for the remainder after it; None: not this digit."""
    return [f'"{digit}" {name}{remainder}' for digit, remainder in enumerate(after) if remainder is not None]


def repeated(body: str, least: int, most: int | None) -> str:
    return f"({body}){{{least},{'' if most is None else most}}}"


def listed(each: str, least: int, most: int | None) -> str:
    """Some in a row, with commas, and the gap before them."""
    if most == 0:
        return '""'
    some = f"gap {each} {repeated(f'comma {each}', max(least - 1, 0), None if most is None else most - 1)}"
    return some if least else f"({some})?"


def constant(value: Any) -> str:
    """One value, with gaps where JSON has them."""
    if isinstance(value, Mapping):
        names = [literal(json.dumps(name, ensure_ascii=False)) for name in value]
        inner = [f"{name} colon {constant(each)}" for name, each in zip(names, value.values(), strict=True)]
    elif isinstance(value, list | tuple):
        inner = [constant(each) for each in value]
    else:
        return literal(json.dumps(value, ensure_ascii=False))
    start, end = "{}" if isinstance(value, Mapping) else "[]"
    body = f"gap {' comma '.join(inner)} " if inner else ""
    return f'"{start}" {body}gap "{end}"'


def string(schema: Mapping[str, Any], rules: Rules) -> str:
    """`pattern` and `format` are of the string's value; so are its lengths, in code points."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    expect(most is None or least <= most, "minLength greater than maxLength leaves no string")
    keys = sorted({"minLength", "maxLength", "pattern", "format"} & set(schema))
    if "pattern" not in schema and "format" not in schema:
        return rf'"\"" ({rules.counted(list(CHAR), least, most)}) "\""' if keys else "string"
    node = searched(schema["pattern"]) if "pattern" in schema else whole(FORMATS[schema["format"]])
    try:
        node = limited(node, least, most)
    except UserError as error:
        raise type(error)(f"{', '.join(keys)} {error}") from error
    return rf'"\"" {written(node, rules, json=True)} "\""'


def bounds(schema: Mapping[str, Any]) -> tuple[Bound | None, Bound | None]:
    """The tighter one on either side."""
    given = {key: Bound(Decimal(repr(schema[key])), key.startswith("ex")) for key in BOUNDS if key in schema}
    low = [given[key] for key in ("minimum", "exclusiveMinimum") if key in given]
    high = [given[key] for key in ("maximum", "exclusiveMaximum") if key in given]
    least = max(low, key=lambda bound: (bound.value, bound.strict), default=None)
    return least, min(high, key=lambda bound: (bound.value, not bound.strict), default=None)


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def whole_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The least and the greatest whole number."""
    low, high = bounds(schema)
    least = None if low is None else ceil(low.value) + (low.strict and low.value == ceil(low.value))
    most = None if high is None else floor(high.value) - (high.strict and high.value == floor(high.value))
    return least, most


def number(schema: Mapping[str, Any], rules: Rules) -> str:
    least, most = bounds(schema)
    if least is None and most is None:
        return "number"
    above = least is not None and most is not None and least.value > most.value
    expect(not above, "minimum greater than maximum leaves no number")
    return written(whole(decimals(least, most)), rules)
