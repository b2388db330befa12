"""Writes a regular expression's tree as EBNF: as it is, or as it stands within a JSON string.

A JSON string's value is what a schema speaks of; some of its characters are written otherwise than they are. Knows
nothing of schemas and tokens.
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
MOST_STATES = 8  # of one repetition that is written out as it is
# Characters that rules count one by one. Each rule knows all that may follow, so a mask takes 1.5 ms; with 120k tokens
# it is compiled in 63 ms, once for all grammars. More are counted in blocks. Tokens that reach over a block's end are
# read in each step: 44 ms on average, where `char{0,200}` takes 640.
BLOCK = 32
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

    def counted(self, options: list[str], least: int, most: int | None) -> str:
        """`least` to `most` of these, each of which is one character; None: without an end."""
        if most is None:
            blocks, rest = divmod(least, BLOCK)
            return self._blocks(options, blocks, blocks, self._chain(options, rest, self.any_number_of(options)))
        if most < 2 * BLOCK:
            return self._between(options, least, most)
        blocks, rest = divmod(least, BLOCK)
        last, over = divmod(most, BLOCK)
        if blocks == last:
            return self._blocks(options, last, last, self._between(options, rest, over))
        ways = [self._blocks(options, blocks, blocks, self._between(options, rest, BLOCK - 1))] if rest else []
        blocks += rest > 0
        ways += [self._blocks(options, blocks, last - 1, self._between(options, 0, BLOCK - 1))] if blocks < last else []
        return self.named(" | ".join([*ways, self._blocks(options, last, last, self._between(options, 0, over))]))

    def _blocks(self, options: list[str], least: int, most: int, end: str) -> str:
        """`least` to `most` whole blocks, and `end`."""
        block = self._chain(options, BLOCK, '""') if most else ""
        return f"{block}{{{least},{most}}} {end}" if most else end

    def _between(self, options: list[str], least: int, most: int) -> str:
        """Few enough for a rule each, which may end where `least` are there."""
        end = '""'
        for left in range(1, most + 1):
            may_end = [] if left > most - least else ['""']
            end = self.named(" | ".join(may_end + [f"{option} {end}" for option in options]))
        return end

    def _chain(self, options: list[str], count: int, end: str) -> str:
        """Exactly `count`, and `end`."""
        for _ in range(count):
            end = self.named(" | ".join(f"{option} {end}" for option in options))
        return end

    @property
    def text(self) -> str:
        return "\n".join(f"{name} ::= {body}" for name, body in self.bodies.items())


def write_rules(grammar: Mapping[str, Node]) -> str:
    """Rules by their names, with `root` among them, none of which speaks of one that no text matches."""
    rules = Rules("part")
    own = [f"{_rule(name)} ::= {written(node, rules)}" for name, node in grammar.items()]
    return "\n".join([*own, rules.text])


def _rule(name: str) -> str:
    """A rule's name, which is none of xgrammar's words and none that `Rules` gives."""
    return name if name == "root" else f"of_{name}"


def written(node: Node, rules: Rules, json: bool = False) -> str:
    """A tree as an EBNF expression, and some `rules` that it speaks of, besides NEVER_RULE.

    `json`: the texts as JSON strings hold them, without the quotes.
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
    counted = times.least if times.most is None else times.most
    if counted > (MOST_STATES if is_class else 1) and isinstance(only(times.node), Chars):
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
