"""Writes a regular expression's tree as EBNF: as it is, or as it stands within a JSON string.

A JSON string's value is what a schema speaks of; some of its characters are written otherwise than they are. Knows
nothing of schemas and tokens.
"""

from eagle_train.inference.grammars.patterns import Chars, Choice, Node, Ranges, Row, Times, lengths, points, without

NEVER = "never"  # a rule that nothing matches
NEVER_RULE = "never ::= never"
SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
ESCAPED = (*((code, code) for code in range(32)), *points('"\\'))


def literal(text: str) -> str:
    """Exactly this text."""
    return '"' + "".join(map(_safe, text)) + '"'


def in_json(text: str) -> str:
    """A text as a JSON string holds it, without the quotes."""
    return "".join(SHORT.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)


def written(node: Node, json: bool = False) -> str:
    """A tree as an EBNF expression; `json`: the texts as JSON strings hold them, without the quotes.

    May speak of the rule NEVER.
    """
    if isinstance(node, Chars):
        return _chars(node.ranges, json)
    if isinstance(node, Times):
        return _times(node, json)
    if isinstance(node, Choice):
        options = list(dict.fromkeys(written(option, json) for option in node.options))
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"
    assert isinstance(node, Row)
    return _row(node, json)


def _row(row: Row, json: bool) -> str:
    """Characters that are one each become one text."""
    pieces, text = [], ""
    for part in (*row.parts, None):
        if isinstance(part, Chars) and len(part.ranges) == 1 and part.ranges[0][0] == part.ranges[0][1]:
            text += chr(part.ranges[0][0])
            continue
        if text:
            pieces.append(literal(in_json(text) if json else text))
            text = ""
        if part is not None and lengths(part) != (0, 0):
            pieces.append(written(part, json))
    return " ".join(pieces) if len(pieces) == 1 else f"({' '.join(pieces)})" if pieces else '""'


def _times(times: Times, json: bool) -> str:
    if lengths(times) == (0, 0):
        return '""'
    inner = f"({written(times.node, json)})"
    end = "" if times.most is None else times.most
    return inner + {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get((times.least, end), f"{{{times.least},{end}}}")


def _chars(ranges: Ranges, json: bool) -> str:
    if not json:
        return _class(ranges)
    bare = without(ranges, ESCAPED)
    rest = [chr(code) for first, last in without(ranges, bare) for code in range(first, last + 1)]
    options = ([_class(bare)] if bare else []) + [literal(in_json(c)) for c in rest]
    if not options:
        return NEVER
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _class(ranges: Ranges) -> str:
    if not ranges:
        return NEVER
    return "[" + "".join(_safe(chr(a)) + (f"-{_safe(chr(b))}" if b > a else "") for a, b in ranges) + "]"


def _safe(character: str) -> str:
    """A character as a text and a class of EBNF have it."""
    code = ord(character)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
