"""Which JSON schemas a grammar can promise to keep. xgrammar ignores what it cannot express; here that is refused.

Knows nothing of tokens. Every form below was tried against answers that violate it.
"""

import json
from collections.abc import Mapping
from typing import Any

from eagle_train.config import check, shown
from eagle_train.inference.expressions import MOST_TIMES, as_whole, check_length

DEEPEST, MOST_PROPERTIES = 32, 500  # the time to compile grows with their cubes
MOST_SCHEMAS = 3000  # in all
MOST_STRINGS = 32  # of bounds or patterns of their own; the time grows with their third to fourth power
MOST_ARRAYS = 200  # the same
MOST_MULTIPLES = 4096  # their sum
NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
NOTES |= {"$schema", "$id", "$comment", "$defs", "definitions"}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": BOUNDS | {"multipleOf"},
    "number": BOUNDS,
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "boolean": set[str](),
    "null": set[str](),
}
STRINGS, ARRAYS = {"minLength", "maxLength", "pattern"}, {"minItems", "maxItems"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
LARGEST_MULTIPLE = 1024
FORMATS = {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"}
FORMATS |= {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
ALONE = ("$ref", "anyOf", "allOf", "enum", "const")  # beside one of these xgrammar ignores all others
APART = [{"pattern"}, {"format"}, {"minLength", "maxLength"}], [{"multipleOf"}, BOUNDS]  # of each it keeps the first
Path = tuple[str, ...]
"""Of keywords, names and numbers: where a schema is."""
PYTHON = {"string": str, "integer": int, "number": (int, float), "array": list, "object": dict, "boolean": bool}


def check_schema(schema: Any) -> None:
    """Raise UserError, naming the place, if an answer could be given that violates `schema`, or none in time."""
    inside: list[tuple[Path, Any, int]] = [((), schema, 0)]
    found: dict[Path, Any] = {}
    while inside:
        path, each, depth = inside.pop()
        check(depth <= DEEPEST, f"{place(path)}: deeper than {DEEPEST} schemas")
        found[path] = each
        check(len(found) <= MOST_SCHEMAS, f"more than {MOST_SCHEMAS} schemas")
        if isinstance(each, Mapping):  # else true, or what xgrammar refuses
            check_one(each, place(path))
            inside += [((*path, *name), inner, depth + 1) for name, inner in reversed(parts(each))]
    schemas = {path: each for path, each in found.items() if isinstance(each, Mapping)}
    for path, each in schemas.items():
        check_reference(each, place(path), found)
    check_work(list(schemas.values()))


def check_one(schema: Mapping[str, Any], where: str) -> None:
    """As `check_schema`, without the schemas inside."""
    many = len(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else 0
    check(many <= MOST_PROPERTIES, f"{where}: {many} properties; at most {MOST_PROPERTIES} are possible")
    keys = set(schema) - NOTES
    first = next((key for key in ALONE if key in keys), None)
    allowed = {first} if first else {"type"} | keys_of(schema.get("type"))
    if first in ("enum", "const") and "type" in keys:
        check_values(schema, where)
        allowed |= {"type"}
    if isinstance(schema.get("type"), list) and "number" in schema["type"]:
        allowed -= {"multipleOf"}  # beside it, it would be kept for whole numbers alone
    unknown = sorted(map(str, keys - allowed))
    reason = f"beside {first}" if first else f"for type {schema.get('type')!r}"
    check(not unknown, f"{where}: {', '.join(unknown)} cannot be guaranteed {reason}")
    for groups in APART:
        found = sorted(key for group in groups for key in group & keys)
        together = sum(bool(group & keys) for group in groups) > 1
        check(not together, f"{where}: {', '.join(found)} cannot be guaranteed together")
    single = first != "allOf" or (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)
    check(single, f"{where}: allOf cannot be guaranteed for more than one schema, or none")
    check(schema.get("anyOf") != [] and schema.get("type") != [], f"{where}: nothing is left to choose from")
    for key in sorted(keys):
        check_value(key, schema[key], where)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(properties, Mapping) and isinstance(required, list):
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        check(not missing, f"{where}: required {shown(missing)} cannot be guaranteed without a schema in properties")


def keys_of(types: Any) -> set[str]:
    """The keywords that constrain values of these types."""
    names = types if isinstance(types, list | tuple) else [types]
    return set().union(*(OF_TYPE.get(name, set()) for name in names if isinstance(name, str)))


def check_value(key: str, value: Any, where: str) -> None:
    """Raise UserError for a keyword's value that xgrammar would take for another, or that takes too long."""
    if key in COUNTS:
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TIMES
        check(whole, f"{where}: {key} {shown(value)} must be a whole number, at most {MOST_TIMES}")
    elif key == "multipleOf":
        whole = isinstance(value, int | float) and value in range(1, LARGEST_MULTIPLE + 1)
        check(whole, f"{where}: multipleOf {shown(value)} must be a whole number from 1 to {LARGEST_MULTIPLE}")
    elif key == "format":
        known = isinstance(value, str) and value in FORMATS
        check(
            known, f"{where}: format {shown(value)} cannot be guaranteed; those that can: {', '.join(sorted(FORMATS))}"
        )
    elif key == "pattern":
        check(isinstance(value, str), f"{where}: pattern {shown(value)} must be a text")
        as_whole(value)
    elif key in ("const", "enum"):
        check_length(json.dumps(value))


def check_reference(schema: Mapping[str, Any], where: str, found: Mapping[Path, Any]) -> None:
    """Raise UserError unless what is referred to is one of the schemas that were `found`, and so looked at: xgrammar
    takes whatever lies there for one."""
    reference = schema.get("$ref", "#")
    begins = isinstance(reference, str) and reference[:2] in ("#", "#/")
    check(begins, f"{where}: $ref {shown(reference)} must begin with #/")
    known = tuple(filter(None, reference[1:].split("/"))) in found
    check(known, f"{where}: $ref {shown(reference)} must lead to a schema, as #/$defs/NAME does")


def check_work(schemas: list[Mapping[str, Any]]) -> None:
    """Raise UserError where all of them together take too long. What is the same costs once, but for multiples."""
    for keys, kind, most in ((STRINGS, "strings", MOST_STRINGS), (ARRAYS, "arrays", MOST_ARRAYS)):
        bounded = [{key: each[key] for key in each.keys() - NOTES} for each in schemas if keys & set(each)]
        bounded = {json.dumps(each, sort_keys=True) for each in bounded}
        said = f"{len(bounded)} {kind} of bounds or patterns of their own; at most {most} are possible"
        check(len(bounded) <= most, said)
    multiples = [each.get("multipleOf") for each in schemas]
    total = sum(number for number in multiples if isinstance(number, int))
    check(total <= MOST_MULTIPLES, f"multiples of {total} in all; at most {MOST_MULTIPLES} are possible")


def check_values(schema: Mapping[str, Any], where: str) -> None:
    """Raise UserError unless the values of `enum` or `const` are of its `type`."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kinds = PYTHON.get(schema["type"]) if isinstance(schema["type"], str) else None
    right = kinds is not None and isinstance(values, list | tuple) and all(isinstance(v, kinds) for v in values)
    right = right and (kinds is bool or not any(isinstance(v, bool) for v in values))  # True is an int to Python
    check(right, f"{where}: enum and const cannot be guaranteed beside type {schema['type']!r}")


def parts(schema: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """The schemas directly inside one, by their places in it."""
    found: list[tuple[Path, Any]] = [
        ((key,), schema[key]) for key in ("items", "additionalProperties") if key in schema
    ]
    for key in ("properties", "$defs", "definitions"):
        inner = schema.get(key)
        found += [((key, name), each) for name, each in inner.items()] if isinstance(inner, Mapping) else []
    for key in ("anyOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        found += [((key, str(i)), each) for i, each in enumerate(inner)] if isinstance(inner, list | tuple) else []
    return found


def place(path: Path) -> str:
    """A schema's place as an error may show it."""
    return "/".join(["#", *(name if name.isprintable() and len(name) < 40 else shown(name) for name in path)])
