"""Checks that a grammar can guarantee a JSON schema; all other schemas are refused, naming the place.

json_text.py writes the grammar. Knows nothing of tokens. Every form that is accepted was tested for answers that
violate it.
"""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import combinations, pairwise
from math import isfinite
from typing import Any

from eagle_train.errors import SURROGATE, UserError, check, shown
from eagle_train.inference.grammar.expressions import MOST_TIMES, check_length, check_pattern
from eagle_train.inference.grammar.formats import FORMATS
from eagle_train.inference.grammar.json_text import PYTHON, Path, path_of, place

_DEEPEST, _MOST_PROPERTIES = 32, 500  # the time to compile grows with the cube of each
_MOST_SCHEMAS = 3000  # in the whole schema
_MOST_STRINGS = 100  # with different bounds or patterns; with all of them as alternatives a mask takes 0.3 s
_MOST_ARRAYS = 200  # likewise
_MOST_MULTIPLES = 4096  # their sum
_MOST_IN_NAMES = 4000  # characters of names that others must differ from: 200 names of 20 take 9 s with 50k tokens
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_NOTES |= {"$schema", "$id", "$comment", "$defs", "definitions"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS,
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "boolean": set[str](),
    "null": set[str](),
}
_STRINGS, _ARRAYS = {"minLength", "maxLength", "pattern"}, {"minItems", "maxItems"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_LARGEST_MULTIPLE = 1024
_MOST_DIGITS, _MOST_BITS = 4300, 14000  # of an integer: Python's limits
_ALONE = (
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "enum",
    "const",
)  # no grammar guarantees one of these together with another keyword
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (
        lambda value: _is_listing(value if isinstance(value, list) else [value], _is_type),
        f"one or some of {', '.join(OF_TYPE)}",
    ),
    "properties": (
        lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
        "a mapping",
    ),
    "required": (lambda value: _is_listing(value, _is_text), "a list of names"),
    "pattern": (lambda value: _is_text(value), "a text"),
    "format": (lambda value: _is_text(value), "a text"),
    "multipleOf": (
        lambda value: _is_number(value) and value in range(1, _LARGEST_MULTIPLE + 1),
        f"a whole number from 1 to {_LARGEST_MULTIPLE}",
    ),
    **dict.fromkeys(_COUNTS, (lambda value: _is_count(value), f"a whole number, at most {MOST_TIMES}")),
    **dict.fromkeys(_BOUNDS, (lambda value: _is_number(value), "a number")),
    **dict.fromkeys(("anyOf", "oneOf", "prefixItems"), (lambda value: isinstance(value, list), "a list of schemas")),
    "enum": (lambda value: isinstance(value, list), "a list"),
}
_KINDS = ("boolean", "number", "string", "array", "object")  # a value's kind is the first that fits


def schema_text(schema: Any) -> str:
    """A schema as JSON. Raises UserError for what JSON cannot hold, RecursionError for one nested too deeply."""
    return json.dumps(_as_json(schema), ensure_ascii=False)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        named = next((name for name in value if not isinstance(name, str)), "")
        check(isinstance(named, str), f"the key {shown(named)} must be a text")
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_as_json, value))
    if not isinstance(value, str | int | float | None):
        raise UserError(f"{shown(value)} is nothing that JSON has")
    if isinstance(value, float) and not isfinite(value):
        raise UserError(f"{value} is no number that JSON has")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise UserError(f"a whole number of {value.bit_length()} bits; at most {_MOST_BITS} are possible")
    return value


def read_schema(text: str) -> Any:
    """A schema from JSON, in which no key of an object comes twice and every number is exact in 64 bits.

    Raises UserError, and RecursionError for one nested too deeply.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_once, parse_float=_exact, parse_int=_whole, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        raise UserError(f"no JSON from line {error.lineno}, column {error.colno} on") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None) if len(found) < len(names) else None
    check(twice is None, f"the key {shown(twice)} comes twice in an object")
    for name in _COUNTS & set(found):  # 2.0 is a whole number to JSON Schema
        value = found[name]
        found[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return found


def _exact(text: str) -> float:
    number = float(text)
    exact = isfinite(number) and Decimal(repr(number)) == Decimal(text)
    check(exact, f"{shown(text)[1:-1]} is no number that 64 bits hold: readers take it for {number}")
    return number


def _whole(text: str) -> int:
    check(len(text) <= _MOST_DIGITS, f"a whole number of {len(text)} digits; at most {_MOST_DIGITS} are possible")
    return int(text)


def _no_number(text: str) -> None:
    raise UserError(f"{text} is no number that JSON has")


def check_schema(schema: Any) -> None:
    """Raise UserError, naming the place, unless a grammar can guarantee `schema`, and is compiled in time."""
    inside: list[tuple[Path, Any, int]] = [((), schema, 0)]
    found: dict[Path, Any] = {}
    while inside:
        path, each, depth = inside.pop()
        check(depth <= _DEEPEST, f"{place(path)}: deeper than {_DEEPEST} schemas")
        found[path] = each
        check(len(found) <= _MOST_SCHEMAS, f"more than {_MOST_SCHEMAS} schemas")
        if isinstance(each, Mapping):
            _check_one(each, place(path))
            check(not path or "$id" not in each, f"{place(path)}: $id cannot be guaranteed but at the root")
            inside += [((*path, *name), inner, depth + 1) for name, inner in reversed(_parts(each))]
    schemas = {path: each for path, each in found.items() if isinstance(each, Mapping)}
    for path, each in schemas.items():
        _check_reference(each, place(path), found)
    for path, each in found.items():
        check(isinstance(each, bool | Mapping), f"{place(path)}: {shown(each)} must be a schema")
    for path, each in schemas.items():
        _check_one_of(each.get("oneOf", []), place(path), found)
    _check_work(list(schemas.values()))
    _check_names(schemas)


def _check_one(schema: Mapping[str, Any], where: str) -> None:
    """As `check_schema`, of one schema without its subschemas."""
    keys = set(schema) - _NOTES
    for key in sorted(keys & set(_SHAPES)):
        right, wanted = _SHAPES[key]
        check(right(schema[key]), f"{where}: {key} {shown(schema[key])} must be {wanted}")
    many = len(schema.get("properties", {}))
    check(many <= _MOST_PROPERTIES, f"{where}: {many} properties; at most {_MOST_PROPERTIES} are possible")
    first = next((key for key in _ALONE if key in keys), None)
    allowed = {first} if first else {"type"} | _keys_of(schema.get("type"))
    if first in ("enum", "const") and "type" in keys:
        allowed |= {"type"}
    if isinstance(schema.get("type"), list) and "number" in schema["type"]:
        allowed -= {"multipleOf"}  # beside it, it would be kept for whole numbers alone
    if schema.get("uniqueItems") is not False:
        allowed -= {"uniqueItems"}
    unknown = sorted(map(str, keys - allowed))
    reason = f"beside {first}" if first else f"for type {schema.get('type')!r}"
    check(not unknown, f"{where}: {', '.join(unknown)} cannot be guaranteed {reason}")
    known = schema.get("format", "date") in FORMATS
    said = f"format {shown(schema.get('format'))} cannot be guaranteed; those that can: {', '.join(sorted(FORMATS))}"
    check(known, f"{where}: {said}")
    both = {"pattern", "format"} <= keys
    check(not both, f"{where}: format, pattern cannot be guaranteed together")
    single = "allOf" not in keys or (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)
    check(single, f"{where}: allOf cannot be guaranteed for more than one schema, or none")
    empty = any(schema.get(key) == [] for key in ("anyOf", "oneOf", "enum", "type"))
    check(not empty, f"{where}: nothing is left to choose from")
    for key in sorted(keys & {"pattern", "const", "enum"}):
        _check_text(key, schema[key], where)
    missing = [name for name in schema.get("required", []) if name not in schema.get("properties", {})]
    check(not missing, f"{where}: required {shown(missing)} cannot be guaranteed without a schema in properties")
    names = [name for name in schema.get("properties", {}) if SURROGATE.search(name)]
    check(not names, f"{where}: {shown(names)}: surrogates not allowed")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    return _is_text(value) and value in OF_TYPE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TIMES


def _is_listing(values: Any, each: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(each, values))


def _keys_of(types: Any) -> set[str]:
    """The keywords that constrain values of these types."""
    names = types if isinstance(types, list | tuple) else [types]
    return set().union(*(OF_TYPE.get(name, set()) for name in names if isinstance(name, str)))


def _check_text(key: str, value: Any, where: str) -> None:
    """Raise UserError for a pattern or value that cannot be guaranteed, or takes too long."""
    if key == "pattern":
        try:
            check_pattern(value)
        except UserError as error:
            raise UserError(f"{where}: pattern: {error}") from error
        return
    check_length(json.dumps(value))
    check(not SURROGATE.search(json.dumps(value, ensure_ascii=False)), f"{where}: {key}: surrogates not allowed")


def _check_reference(schema: Mapping[str, Any], where: str, found: Mapping[Path, Any]) -> None:
    """Raise UserError unless a `$ref` refers to one of the schemas in `found`, all of which are checked."""
    reference = schema.get("$ref", "#")
    begins = isinstance(reference, str) and reference[:2] in ("#", "#/")
    check(begins, f"{where}: $ref {shown(reference)} must begin with #/")
    known = path_of(reference) in found
    check(known, f"{where}: $ref {shown(reference)} must lead to a schema, as #/$defs/NAME does")


def _check_work(schemas: list[Mapping[str, Any]]) -> None:
    """Raise UserError where all schemas together take too long. Equal ones count once, except multiples."""
    for keys, kind, most in ((_STRINGS, "strings", _MOST_STRINGS), (_ARRAYS, "arrays", _MOST_ARRAYS)):
        bounded = [{key: each[key] for key in each.keys() - _NOTES} for each in schemas if keys & set(each)]
        different = len({json.dumps(each, sort_keys=True) for each in bounded})
        said = f"{different} {kind} of bounds or patterns of their own; at most {most} are possible"
        check(different <= most, said)
    multiples = [each.get("multipleOf") for each in schemas]
    total = sum(number for number in multiples if isinstance(number, int))
    check(total <= _MOST_MULTIPLES, f"multiples of {total} in all; at most {_MOST_MULTIPLES} are possible")


def _check_names(schemas: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raise UserError where names of other properties must be told from too many characters of names.

    What names begin with together counts once, and so do objects of the same names.
    """
    total, known = 0, set[tuple[str, ...]]()
    for path, schema in schemas.items():
        names = tuple(sorted(schema.get("properties", {})))
        if schema.get("additionalProperties", False) is False or names in known:
            continue
        known.add(names)
        total += sum(map(len, names)) - sum(_shared(*pair) for pair in pairwise(names))
        said = f"{total} characters of names beside additionalProperties; at most {_MOST_IN_NAMES} are possible"
        check(total <= _MOST_IN_NAMES, f"{place(path)}: {said}")


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _check_one_of(options: list[Any], where: str, found: Mapping[Path, Any]) -> None:
    """Raise UserError unless it is certain that no value satisfies two of the schemas."""
    for (i, one), (j, other) in combinations(enumerate(options), 2):
        apart = _are_apart(one, other, found)
        check(apart, f"{where}: oneOf cannot be guaranteed: {i} and {j} may hold together; anyOf lets them")


def _are_apart(one: Any, other: Any, found: Mapping[Path, Any], depth: int = 0) -> bool:
    """Whether their types or constants show that no value satisfies both schemas."""
    one, other = (_referred(each, found) for each in (one, other))
    if depth > _DEEPEST or not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one is False or other is False
    for schema, against in ((one, other), (other, one)):
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return all(_are_apart(each, against, found, depth + 1) for each in schema[key])
    values = [_values_of(schema) for schema in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    types = [_types_of(schema) for schema in (one, other)]
    if not types[0] & types[1]:
        return True
    shared = set(one.get("required", [])) & set(other.get("required", []))
    objects = types[0] == types[1] == {"object"}
    return objects and any(
        _are_apart(one["properties"][name], other["properties"][name], found, depth + 1) for name in shared
    )


def _referred(schema: Any, found: Mapping[Path, Any]) -> Any:
    """The schema that a chain of `$ref` ends at; True where it never ends."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = found[path_of(schema["$ref"])]
    return True


def _values_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The constants of a schema as JSON, equal numbers spelled alike; None without enum or const."""
    if not {"const", "enum"} & set(schema):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema's values may have; `integer` counts as `number`."""
    if {"const", "enum"} & set(schema):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return {next((name for name in _KINDS if isinstance(value, PYTHON[name])), "null") for value in values}
    types = schema.get("type", [*_KINDS, "null"])
    types = [types] if isinstance(types, str) else types
    return {"number" if name == "integer" else name for name in types}


def _parts(schema: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """The direct subschemas of a schema, by their places in it."""
    found: list[tuple[Path, Any]] = [
        ((key,), schema[key]) for key in ("items", "additionalProperties") if key in schema
    ]
    for key in ("properties", "$defs", "definitions"):
        inner = schema.get(key)
        found += [((key, name), each) for name, each in inner.items()] if isinstance(inner, Mapping) else []
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        found += [((key, str(i)), each) for i, each in enumerate(inner)] if isinstance(inner, list | tuple) else []
    return found
