"""Writes the trees of patterns.py as EBNF for xgrammar: the text itself, or the text as a JSON string spells it.

A schema's `pattern` is about a string's value, some of whose characters are escaped in JSON. Knows nothing of schemas
or tokens.
"""

import re
from collections.abc import Mapping

from eagle_train.inference.grammar.patterns import (
    Chars,
    Choice,
    Node,
    Ranges,
    Ref,
    Row,
    Times,
    lengths,
    only,
    points,
    without,
)

NEVER = "eagle_never"  # a rule that nothing matches
NEVER_RULE = f"{NEVER} ::= {NEVER}"
_MOST_STATES = 8  # the largest bound of a repetition that is written as `{n,m}`
# Up to so many characters are counted by a rule for each count, whose masks xgrammar precomputes: a mask takes 1.5 ms,
# and compiling 63 ms with 120k tokens, once for all grammars. More are counted in blocks. Tokens that cross a block's
# end are matched anew in each step: 44 ms on average, where `char{0,200}` takes 640.
_BLOCK = 32
_CLASS = re.compile(r"\[[^\]]*\]")
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
ESCAPED = (*((code, code) for code in range(32)), *points('"\\'))


def literal(text: str) -> str:
    """The EBNF literal of a text."""
    return '"' + "".join(map(_safe, text)) + '"'


def in_json(text: str) -> str:
    """A text escaped as in a JSON string, without the quotes."""
    return "".join(_SHORT.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)


class Rules:
    """Rules of a grammar under generated names; equal bodies share one rule."""

    def __init__(self, prefix: str):
        self.prefix, self.bodies, self.names = prefix, dict[str, str](), dict[str, str]()

    def named(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self.names:
            self.names[body] = f"{self.prefix}{len(self.names)}"
            self.bodies[self.names[body]] = body
        return self.names[body]

    def any_number_of(self, options: list[str]) -> str:
        """The name of a rule for any number of these, none of which may match the empty text.

        It is right-recursive: xgrammar precomputes such a rule's masks, but matches `(...)*` anew in each step.
        """
        key = f"any number of {options}"
        if key not in self.names:
            name = self.names[key] = f"{self.prefix}{len(self.names)}"
            self.bodies[name] = " | ".join(['""', *(f"{option} {name}" for option in options)])
        return self.names[key]

    def counted(self, options: list[str], least: int, most: int | None) -> str:
        """An expression for `least` to `most` of these, each of which is one character; None: unbounded."""
        if most is None:
            blocks, rest = divmod(least, _BLOCK)
            return self._blocks(options, blocks, blocks, self._chain(options, rest, self.any_number_of(options)))
        if most < 2 * _BLOCK:
            return self._between(options, least, most)
        blocks, rest = divmod(least, _BLOCK)
        last, over = divmod(most, _BLOCK)
        if blocks == last:
            return self._blocks(options, last, last, self._between(options, rest, over))
        ways = [self._blocks(options, blocks, blocks, self._between(options, rest, _BLOCK - 1))] if rest else []
        blocks += rest > 0
        ways += (
            [self._blocks(options, blocks, last - 1, self._between(options, 0, _BLOCK - 1))] if blocks < last else []
        )
        return self.named(" | ".join([*ways, self._blocks(options, last, last, self._between(options, 0, over))]))

    def _blocks(self, options: list[str], least: int, most: int, end: str) -> str:
        """An expression for `least` to `most` blocks of _BLOCK, then `end`."""
        block = self._chain(options, _BLOCK, '""') if most else ""
        return f"{block}{{{least},{most}}} {end}" if most else end

    def _between(self, options: list[str], least: int, most: int) -> str:
        """The name of a rule for `least` to `most`, with a rule for each count."""
        end = '""'
        for left in range(1, most + 1):
            may_end = [] if left > most - least else ['""']
            end = self.named(" | ".join(may_end + [f"{option} {end}" for option in options]))
        return end

    def _chain(self, options: list[str], count: int, end: str) -> str:
        """The name of a rule for exactly `count`, then `end`."""
        for _ in range(count):
            end = self.named(" | ".join(f"{option} {end}" for option in options))
        return end

    @property
    def text(self) -> str:
        """All rules."""
        return "\n".join(f"{name} ::= {body}" for name, body in self.bodies.items())


def write_rules(grammar: Mapping[str, Node]) -> str:
    """A grammar as EBNF. It has a rule `root`, and refers to no rule that matches no text."""
    rules = Rules("part")
    own = [f"{_rule(name)} ::= {written(node, rules)}" for name, node in grammar.items()]
    return "\n".join([*own, rules.text])


def _rule(name: str) -> str:
    """A user's rule under a name that is neither reserved in xgrammar nor generated by `Rules`."""
    return name if name == "root" else f"of_{name}"


def written(node: Node, rules: Rules, json: bool = False) -> str:
    """A tree as an EBNF expression. Adds to `rules` those that it refers to, except NEVER_RULE.

    `json`: spell the texts as within a JSON string.
    """
    if isinstance(node, Chars):
        return _either(_chars(node.ranges, json))
    if isinstance(node, Ref):
        return _rule(node.name)
    if isinstance(node, Times):
        return _times(node, rules, json)
    if isinstance(node, Choice):
        return _either(_options(node, rules, json))
    assert isinstance(node, Row)
    return _row(node, rules, json)


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _options(node: Node, rules: Rules, json: bool) -> list[str]:
    node = only(node)
    if isinstance(node, Chars):
        return _chars(node.ranges, json)
    if isinstance(node, Choice):
        return list(dict.fromkeys(written(option, rules, json) for option in node.options))
    return [written(node, rules, json)]


def _row(row: Row, rules: Rules, json: bool) -> str:
    """Adjacent single characters are joined to one literal."""
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
    is_class = len(options) == 1 and _CLASS.fullmatch(options[0]) is not None
    counted = times.least if times.most is None else times.most
    if counted > (_MOST_STATES if is_class else 1) and isinstance(only(times.node), Chars):
        return f"({rules.counted(options, times.least, times.most)})"
    inner = options[0] if is_class else f"({' | '.join(options)})"
    if times.most is None and not is_class and lengths(times.node)[0] > 0:
        first = f"{inner}{{{times.least},{times.least}}} " if times.least > 1 else f"{inner} " * times.least
        return f"({first}{rules.any_number_of(options)})"
    if times.most is not None and times.most > 1 and not is_class:
        inner = rules.named(inner)
    end = "" if times.most is None else times.most
    return inner + {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get((times.least, end), f"{{{times.least},{end}}}")


def _chars(ranges: Ranges, json: bool) -> list[str]:
    """Expressions that together match each of the characters once."""
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
    """A character escaped for a literal or class of EBNF."""
    code = ord(character)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
