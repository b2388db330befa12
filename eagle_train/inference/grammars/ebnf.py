"""Writes a regular expression's tree as EBNF: as it is, or as it stands within a JSON string.

A JSON string's value is what a schema speaks of; some of its characters are written otherwise than they are. Knows
nothing of schemas and tokens.
"""

import re

from eagle_train.inference.grammars.patterns import Chars, Choice, Node, Ranges, Row, Times, lengths, points, without

NEVER = "eagle_never"  # a rule that nothing matches
NEVER_RULE = f"{NEVER} ::= {NEVER}"
MOST_STATES = 8  # of one repetition; beyond, it repeats a rule, which xgrammar counts and does not write out
CLASS = re.compile(r"\[[^\]]*\]")
SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
ESCAPED = (*((code, code) for code in range(32)), *points('"\\'))


def literal(text: str) -> str:
    """Exactly this text."""
    return '"' + "".join(map(_safe, text)) + '"'


def in_json(text: str) -> str:
    """A text as a JSON string holds it, without the quotes."""
    return "".join(SHORT.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)


class Rules:
    """Rules of a grammar by their names; what has the same body is one."""

    def __init__(self, prefix: str):
        self.prefix, self.bodies, self.names = prefix, dict[str, str](), dict[str, str]()

    def named(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self.names:
            self.names[body] = f"{self.prefix}{len(self.names)}"
            self.bodies[self.names[body]] = body
        return self.names[body]

    def any_number_of(self, options: list[str]) -> str:
        """The name of a rule of any number of these, one after another; none of them matches the empty text.

        It calls itself at its end: xgrammar has such a rule's tokens at once, and those of `(...)*` anew in each step.
        """
        key = f"any number of {options}"
        if key not in self.names:
            name = self.names[key] = f"{self.prefix}{len(self.names)}"
            self.bodies[name] = " | ".join(['""', *(f"{option} {name}" for option in options)])
        return self.names[key]

    @property
    def text(self) -> str:
        return "\n".join(f"{name} ::= {body}" for name, body in self.bodies.items())


def written(node: Node, rules: Rules, json: bool = False) -> str:
    """A tree as an EBNF expression, and some `rules` that it speaks of, besides NEVER_RULE.

    `json`: the texts as JSON strings hold them, without the quotes.
    """
    if isinstance(node, Chars):
        return _either(_chars(node.ranges, json))
    if isinstance(node, Times):
        return _times(node, rules, json)
    if isinstance(node, Choice):
        return _either(_options(node, rules, json))
    assert isinstance(node, Row)
    return _row(node, rules, json)


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _options(node: Node, rules: Rules, json: bool) -> list[str]:
    if isinstance(node, Row) and len(node.parts) == 1:
        return _options(node.parts[0], rules, json)
    if isinstance(node, Chars):
        return _chars(node.ranges, json)
    if isinstance(node, Choice):
        return list(dict.fromkeys(written(option, rules, json) for option in node.options))
    return [written(node, rules, json)]


def _row(row: Row, rules: Rules, json: bool) -> str:
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
            pieces.append(written(part, rules, json))
    return " ".join(pieces) if len(pieces) == 1 else f"({' '.join(pieces)})" if pieces else '""'


def _times(times: Times, rules: Rules, json: bool) -> str:
    if lengths(times) == (0, 0):
        return '""'
    options = _options(times.node, rules, json)
    is_class = len(options) == 1 and CLASS.fullmatch(options[0]) is not None
    inner = options[0] if is_class else f"({' | '.join(options)})"
    if times.most is None and not is_class and lengths(times.node)[0] > 0:
        rest = rules.any_number_of(options)
        return (
            f"({inner}{{{times.least},{times.least}}} {rest})"
            if times.least > 1
            else (f"({inner} {rest})" if times.least else rest)
        )
    if times.most is not None and times.most > (MOST_STATES if is_class else 1):
        inner = rules.named(inner)
    end = "" if times.most is None else times.most
    return inner + {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get((times.least, end), f"{{{times.least},{end}}}")


def _chars(ranges: Ranges, json: bool) -> list[str]:
    """The ways in which one of the characters is written."""
    if not json:
        return [_class(ranges)]
    bare = without(ranges, ESCAPED)
    rest = [chr(code) for first, last in without(ranges, bare) for code in range(first, last + 1)]
    return ([_class(bare)] if bare else []) + [literal(in_json(c)) for c in rest] or [NEVER]


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
