"""Parses regular expressions into trees, by the rules of ECMA-262, which JSON Schema prescribes.

A tree denotes a set of texts. An expression whose set no tree here denotes exactly is refused. Characters are Unicode
code points. Knows nothing of EBNF, JSON or tokens.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from eagle_train.errors import UserError, check

Ranges = tuple[tuple[int, int], ...]
"""A set of code points: (first, last) of each interval, ascending, disjoint and not adjacent."""

DEEPEST = 100  # groups within groups
_MOST_WORK = 1 << 17  # nodes of all alternatives that groups with ^ and $ are divided into
CONTROLS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_UNKEPT = {"b": "a word's edge", "B": "a word's edge", "p": "a Unicode property", "P": "a Unicode property"}
_UNKEPT |= dict.fromkeys("k123456789", "what a group has matched")
_TIMES = re.compile(r"\{(\d+)(?:(,)(\d*))?\}|\{,\d*\}")
_NAMED = re.compile(r"\?P?<[A-Za-z_]\w*>")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_LOOKS = {"?=": "Lookahead", "?!": "Lookahead", "?<=": "Lookbehind", "?<!": "Lookbehind"}


class Impossible(UserError):
    """No text satisfies what is asked for."""


def expect(possible: bool, message: str) -> None:
    """Raise Impossible(message) unless `possible`."""
    if not possible:
        raise Impossible(message)


@dataclass(frozen=True)
class Chars:
    """One character of a set. An empty set matches no text."""

    ranges: Ranges


@dataclass(frozen=True)
class Row:
    """A concatenation; without parts, the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """An alternation."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Times:
    """A repetition, `least` to `most` times."""

    node: "Node"
    least: int
    most: int | None  # None: unbounded


@dataclass(frozen=True)
class _Anchor:
    """`^` or `$`; only while parsing: trees that `whole` and `searched` return have none."""

    sign: str


@dataclass(frozen=True)
class Ref:
    """A reference to a rule of a grammar; regular expressions have none."""

    name: str


Node = Chars | Row | Choice | Times | _Anchor | Ref
_Alternative = tuple[tuple[Node, ...], bool, bool]
"""Parts of a row, whether ^ ties them to the text's beginning, whether $ ties them to its end."""


def _union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(each for ranges in sets for each in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The difference of two sets."""
    left = []
    for first, last in ranges:
        for start, end in removed:
            if first <= end and start <= last:
                if first < start:
                    left.append((first, start - 1))
                first = end + 1
        if first <= last:
            left.append((first, last))
    return tuple(left)


def points(text: str) -> Ranges:
    """The set of a text's characters."""
    return _union((ord(c), ord(c)) for c in text)


EVERY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # a text has no surrogates


_DIGIT: Ranges = ((48, 57),)
_SPACE = _union(points(" \t\n\r\f\v\xa0\u1680\u2028\u2029\u202f\u205f\u3000"), ((0x2000, 0x200A),))
_ALIKE = {"d": _DIGIT, "w": _union(_DIGIT, ((65, 90), (97, 122)), points("_")), "s": _SPACE}


@cache
def _either(letter: str) -> Ranges:
    r"""The characters that \d, \w or \s matches in ECMA-262 or in Python's `re`; _ALIKE has those of both.

    Validators use the one or the other, and an answer must be valid in both.
    """
    text = "".join(chr(code) for first, last in EVERY for code in range(first, last + 1))
    spans = (match[0] for match in re.finditer(rf"\{letter}+", text))
    python = _union((ord(c), ord(c)) for span in spans for c in span)
    return _union(_ALIKE[letter], python, points("\ufeff") if letter == "s" else ())


_DOT = without(EVERY, points("\n\r\u2028\u2029"))
ANY = Times(Chars(EVERY), 0, None)


def whole(pattern: str) -> Node:
    """The texts that a pattern matches as a whole, the meaning of a grammar's `regex`. Raises UserError."""
    return Choice(tuple(row for row, _, _ in _alternatives(Parser(pattern).parsed())))


def searched(pattern: str) -> Node:
    """The texts that contain a match of a pattern, the meaning of JSON Schema's `pattern`. Raises UserError."""
    rows = [
        Row((*([] if begins else [ANY]), *row.parts, *([] if ends else [ANY])))
        for row, begins, ends in _alternatives(Parser(pattern).parsed())
    ]
    return Choice(tuple(rows))


class Parser:
    """A recursive-descent parser: each method parses a construct at `self.at` and moves behind it."""

    def __init__(self, pattern: str, deepest: int = DEEPEST):
        self.text, self.at, self.depth, self.deepest = pattern, 0, 0, deepest

    def parsed(self) -> Node:
        self.check_characters()
        node = self.choice()
        check(self.at == len(self.text), "a ) closes no group")
        return node

    def check_characters(self) -> None:
        surrogate = any(0xD800 <= ord(c) <= 0xDFFF for c in self.text)
        check(not surrogate, "surrogates not allowed: half of a pair is no character")
        check("\0" not in self.text, r"null characters cannot be read; write \0")

    def next_is(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.next_is(text)
        self.at += len(text) if found else 0
        return found

    def choice(self) -> Node:
        options = [self.row()]
        while self.take("|"):
            options.append(self.row())
        return Choice(tuple(options)) if len(options) > 1 else options[0]

    def row(self) -> Row:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom()))
        return Row(tuple(parts))

    def repeated(self, node: Node) -> Node:
        """`node`, repeated if a quantifier follows."""
        times = self.times()
        if times is None:
            return node
        check(not _has_anchor(node), "^ and $ may stand at the ends only, and not be repeated")
        self.take("?")  # a lazy quantifier matches the same texts
        again = self.at < len(self.text) and (self.text[self.at] in "*+?" or _TIMES.match(self.text, self.at))
        check(not again, "a repetition of a repetition: put the inner one into a group")
        return Times(node, *times)

    def times(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return times
        found = _TIMES.match(self.text, self.at)
        if not found:
            return None
        check(found[1] is not None, f"{found[0]} means different things; write {{0,...}}, or a backslash before it")
        return self.bounds(found)

    def bounds(self, found: re.Match[str]) -> tuple[int, int | None]:
        """The bounds of a quantifier, from its match: the lower bound, a comma, the upper bound."""
        self.at = found.end()
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        check(most is None or least <= most, "Lower bound is larger than the upper bound of a repetition")
        return least, most

    def atom(self) -> Node:
        letter = self.text[self.at]
        self.at += 1
        if letter == "(":
            return self.group()
        if letter == "[":
            return Chars(self.set_of())
        if letter == "\\":
            return Chars(self.escape())
        if letter in "^$":
            return _Anchor(letter)
        literal_brace = letter == "{" and not _TIMES.match(self.text, self.at - 1)
        check(letter not in "*+?{" or literal_brace, f"nothing is there for {letter} to repeat")
        return Chars(_DOT if letter == "." else points(letter))

    def group(self) -> Node:
        for sign, name in _LOOKS.items():
            check(not self.next_is(sign), f"{name} cannot be guaranteed: ({sign}")
        if named := _NAMED.match(self.text, self.at):
            self.at = named.end()
        elif not self.take("?:"):
            check(not self.next_is("?"), f"a group that begins with ({self.text[self.at : self.at + 2]} is not known")
        return self.closed()

    def closed(self) -> Node:
        """The content of a group, up to its closing parenthesis."""
        self.depth += 1
        check(self.depth <= self.deepest, f"groups within groups: at most {self.deepest} are possible")
        node = self.choice()
        check(self.take(")"), "a group is not closed")
        self.depth -= 1
        return node

    def set_of(self) -> Ranges:
        """The content of a class, up to its ]."""
        negated, ranges = self.take("^"), []
        check(not self.next_is("]"), r"a class that begins with ] means different things; write \] for it")
        while not self.take("]"):
            check(self.at < len(self.text), "Unclosed class of characters: a ] is missing")
            first = self.member(negated)
            is_range = self.next_is("-") and not self.next_is("-]") and self.at + 1 < len(self.text)
            if is_range:
                check(_is_one(first), r"a - behind \d, \w or \s means different things; write it last, or \- for it")
                self.at += 1
                last = self.member(negated)
                check(_is_one(last) and first[0][0] <= last[0][0], "a range of characters ends before it begins")
                first = ((first[0][0], last[0][0]),)
            ranges.append(first)
        found = without(_union(*ranges), ((0xD800, 0xDFFF),))
        return without(EVERY, found) if negated else found

    def member(self, negated: bool) -> Ranges:
        letter = self.text[self.at]
        self.at += 1
        return self.escape(in_set=True, negated=negated) if letter == "\\" else points(letter)

    def escape(self, in_set: bool = False, negated: bool = False) -> Ranges:
        """An escape, without its backslash. Its characters are those of all dialects; in a negated class, of any."""
        check(self.at < len(self.text), "a backslash at the end stands for nothing")
        if (code := self.code()) is not None:
            return ((code, code),)
        letter = self.text[self.at]
        self.at += 1
        if letter in _ALIKE:
            return _either(letter) if negated else _ALIKE[letter]
        if letter.lower() in _ALIKE:
            return without(EVERY, _ALIKE[letter.lower()] if negated else _either(letter.lower()))
        if letter == "b" and in_set:
            return points("\b")
        digit = self.text[self.at : self.at + 1]
        check(letter != "0" or not digit.isdigit(), f"\\0{digit} is no escape that is known; write \\x and two digits")
        if letter in CONTROLS:
            return points(CONTROLS[letter])
        check(letter not in _UNKEPT or in_set, f"\\{letter}, {_UNKEPT.get(letter)}, cannot be guaranteed")
        strange = letter.isascii() and letter.isalnum()
        check(not strange, f"\\{letter} is no escape that is known; without the backslash it is the letter")
        return points(letter)

    def code(self) -> int | None:
        r"""The code point of \xHH, \uHHHH, a surrogate pair of those, \u{H...} or \cX; None for any other escape."""
        if self.next_is("c"):
            letter = self.text[self.at + 1 : self.at + 2]
            check(letter.isascii() and letter.isalpha(), r"\c must be followed by a letter")
            self.at += 2
            return ord(letter) % 32
        return self.hexadecimal()

    def hexadecimal(self) -> int | None:
        found = _HEX.match(self.text, self.at)
        if not found:
            return None
        self.at = found.end()
        code = int(found[1] or found[2] or found[3], 16)
        low = _HEX.match(self.text, self.at + 1) if 0xD800 <= code < 0xDC00 and self.next_is("\\u") else None
        if low and low[2] and 0xDC00 <= int(low[2], 16) < 0xE000:
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[2], 16) - 0xDC00
        return character(code, found[0])


def character(code: int, said: str) -> int:
    """`code`, which was written as the escape `said`. Raises UserError for a surrogate or beyond Unicode."""
    is_point = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
    check(is_point, f"\\{said} is no character: surrogates not allowed")
    return code


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _has_anchor(node: Node) -> bool:
    if isinstance(node, Row | Choice):
        return any(map(_has_anchor, node.parts if isinstance(node, Row) else node.options))
    return isinstance(node, _Anchor) or (isinstance(node, Times) and _has_anchor(node.node))


def _alternatives(node: Node) -> list[tuple[Row, bool, bool]]:
    """The alternatives without anchors, each with whether ^ ties it to the beginning, and $ to the end, of the text.

    Raises UserError for anchors elsewhere, and for too many alternatives.
    """
    found, seen, work = [], set[_Alternative](), 0
    waiting: list[_Alternative] = [(_rowed(node).parts, False, False)]
    while waiting:
        alternative = _bare(*waiting.pop())
        if alternative in seen:
            continue
        seen.add(alternative)
        parts, begins, ends = alternative
        work += 1 + sum(map(_size, parts))
        check(work <= _MOST_WORK, "groups with ^ and $ have too many alternatives; write ^ and $ outside of groups")
        if parts and isinstance(parts[0], Row | Choice) and _has_anchor(parts[0]):
            waiting += [((*_rowed(option).parts, *parts[1:]), begins, ends) for option in _options_of(parts[0])]
        elif parts and isinstance(parts[-1], Row | Choice) and _has_anchor(parts[-1]):
            waiting += [((*parts[:-1], *_rowed(option).parts), begins, ends) for option in _options_of(parts[-1])]
        else:
            inside = any(map(_has_anchor, parts))
            check(not inside, "^ and $ may stand at the ends only: elsewhere they cannot be guaranteed")
            found.append((Row(parts), begins, ends))
    return found


def _bare(parts: tuple[Node, ...], begins: bool, ends: bool) -> _Alternative:
    """An alternative without the ^ that it begins with and the $ that it ends with."""
    first, last = 0, len(parts)
    while first < last and parts[first] == _Anchor("^"):
        first += 1
    while first < last and parts[last - 1] == _Anchor("$"):
        last -= 1
    return parts[first:last], begins or first > 0, ends or last < len(parts)


def _size(node: Node) -> int:
    """The number of a tree's nodes."""
    if isinstance(node, Times):
        return 1 + _size(node.node)
    inner = node.parts if isinstance(node, Row) else node.options if isinstance(node, Choice) else ()
    return 1 + sum(map(_size, inner))


def _options_of(node: Row | Choice) -> tuple[Node, ...]:
    return node.options if isinstance(node, Choice) else (node,)


def _rowed(node: Node) -> Row:
    return node if isinstance(node, Row) else Row((node,))


def only(node: Node) -> Node:
    """The tree without rows and choices that have one element."""
    while isinstance(node, Row | Choice) and len(parts := node.parts if isinstance(node, Row) else node.options) == 1:
        node = parts[0]
    return node


def lengths(node: Node) -> tuple[int, int | None]:
    """The least and the most characters of a tree's texts; None: unbounded. Of a Ref nothing is known."""
    if isinstance(node, Ref):
        return 0, None
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Times):
        least, most = lengths(node.node)
        if most == 0 or node.most == 0:
            return 0, 0
        return least * node.least, None if most is None or node.most is None else most * node.most
    assert isinstance(node, Row | Choice), node  # no tree that is looked at here has an anchor
    sizes = [lengths(part) for part in (node.parts if isinstance(node, Row) else node.options)]
    shortest, longest = [least for least, _ in sizes], [most for _, most in sizes if most is not None]
    has_end = len(longest) == len(sizes)
    if isinstance(node, Row):
        return sum(shortest), sum(longest) if has_end else None
    return min(shortest), max(longest) if has_end else None


def limited(node: Node, least: int, most: int | None) -> Node:
    """The tree's texts of `least` to `most` characters. Raises Impossible where there are none, UserError where they
    cannot be denoted.

    They can where all texts have such lengths, and where the tree is a repetition of one set of characters.
    """
    shortest, longest = lengths(node)
    none = (most is not None and shortest > most) or (longest is not None and longest < least)
    expect(not none, "leave no text that has the length")
    if shortest >= least and (most is None or (longest is not None and longest <= most)):
        return node
    inner = only(node)
    if not (isinstance(inner, Times) and isinstance(inner.node, Chars)):
        raise UserError("cannot be guaranteed together")
    ends = [end for end in (inner.most, most) if end is not None]
    times = Times(inner.node, max(inner.least, least), min(ends, default=None))
    expect(times.most is None or times.least <= times.most, "leave no text that has the length")
    return times
