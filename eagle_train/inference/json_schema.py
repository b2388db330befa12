"""Which JSON schemas a grammar can promise to keep. xgrammar ignores what it cannot express; here that is refused.

Knows nothing of tokens. Every form below was tried against answers that violate it.
"""

from collections.abc import Mapping
from typing import Any

from eagle_train.config import check

DEEPEST, MOST_PROPERTIES = 32, 500  # the time to compile grows with their cubes
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
ALONE = ("$ref", "anyOf", "allOf", "enum", "const")  # beside one of these xgrammar ignores all others
APART = [{"pattern"}, {"format"}, {"minLength", "maxLength"}], [{"multipleOf"}, BOUNDS]  # of each it keeps the first
PYTHON = {"string": str, "integer": int, "number": (int, float), "array": list, "object": dict, "boolean": bool}


def check_schema(schema: Any, where: str = "#", depth: int = 0) -> None:
    """Raise UserError, naming the place, if an answer could be given that violates `schema`."""
    check(depth <= DEEPEST, f"{where}: deeper than {DEEPEST} schemas")
    if not isinstance(schema, Mapping):  # true, or what xgrammar refuses
        return
    many = len(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else 0
    check(many <= MOST_PROPERTIES, f"{where}: {many} properties; at most {MOST_PROPERTIES} are possible")
    keys = set(schema) - NOTES
    first = next((key for key in ALONE if key in keys), None)
    allowed = {first} if first else {"type"} | keys_of(schema.get("type"))
    if first in ("enum", "const") and "type" in keys:
        check_values(schema, where)
        allowed |= {"type"}
    unknown = sorted(map(str, keys - allowed))
    reason = f"beside {first}" if first else f"for type {schema.get('type')!r}"
    check(not unknown, f"{where}: {', '.join(unknown)} cannot be guaranteed {reason}")
    for groups in APART:
        found = sorted(key for group in groups for key in group & keys)
        together = sum(bool(group & keys) for group in groups) > 1
        check(not together, f"{where}: {', '.join(found)} cannot be guaranteed together")
    check(
        first != "allOf" or len(schema["allOf"]) == 1, f"{where}: allOf cannot be guaranteed for more than one schema"
    )
    reference = schema.get("$ref", "#")
    check(str(reference)[:2] in ("#", "#/"), f"{where}: $ref {reference!r} must begin with #/")
    for place, inner in parts(schema):
        check_schema(inner, f"{where}/{place}", depth + 1)


def keys_of(types: Any) -> set[str]:
    """The keywords that constrain values of these types."""
    names = types if isinstance(types, list | tuple) else [types]
    return set().union(*(OF_TYPE.get(name, set()) for name in names if isinstance(name, str)))


def check_values(schema: Mapping[str, Any], where: str) -> None:
    """Raise UserError unless the values of `enum` or `const` are of its `type`."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kinds = PYTHON.get(schema["type"]) if isinstance(schema["type"], str) else None
    right = kinds is not None and isinstance(values, list | tuple) and all(isinstance(v, kinds) for v in values)
    right = right and (kinds is bool or not any(isinstance(v, bool) for v in values))  # True is an int to Python
    check(right, f"{where}: enum and const cannot be guaranteed beside type {schema['type']!r}")


def parts(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The schemas directly inside one, by their places."""
    found = [(key, schema[key]) for key in ("items", "additionalProperties") if key in schema]
    for key in ("properties", "$defs", "definitions"):
        inner = schema.get(key)
        found += [(f"{key}/{name}", each) for name, each in inner.items()] if isinstance(inner, Mapping) else []
    for key in ("anyOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        found += [(f"{key}/{i}", each) for i, each in enumerate(inner)] if isinstance(inner, list | tuple) else []
    return found
