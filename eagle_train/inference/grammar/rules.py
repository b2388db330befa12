"""Parses EBNF grammars into trees, and removes from them what no text can match.

The dialect is xgrammar's, without the constructs that it misreads: an escape, class or name with more than one meaning
is refused with its line. Knows nothing of JSON or tokens.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import reduce
from typing import NamedTuple

from eagle_train.errors import UserError, check
from eagle_train.inference.grammar.patterns import (
    CONTROLS,
    DEEPEST,
    Chars,
    Choice,
    Node,
    Parser,
    Ranges,
    Ref,
    Row,
    Times,
    character,
    points,
    whole,
)

Grammar = dict[str, Node]
"""Rules by name."""
_Names = AbstractSet[str]

_NAME = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*(?=[\r\n]|\Z))*")  # a comment is read in one way only: to its line's end
_DEFINED = re.compile(rf"({_NAME.pattern}){_SPACE.pattern}::=")
_TIMES = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(?:(\d+)\s*)?)?\}")
_LINE_END = re.compile(r"\r\n|\r|\n")
_MACROS = ("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch")  # of xgrammar: they match tokens, not texts
_LONG = re.compile(r"U([0-9A-Fa-f]{8})")
_ENDLESS = re.compile("x[0-9A-Fa-f]{3}")  # xgrammar takes all the digits, other dialects two
_ESCAPES = CONTROLS | {"a": "\a", "b": "\b", "e": "\x1b"}


def read_grammar(text: str, read_pattern: Callable[[str], Node] = whole) -> Grammar:
    """The rules of a user's grammar. Raises UserError, naming the line, for an invalid or ambiguous one.

    `read_pattern` gives the tree of what `Regex` holds, or raises UserError.
    """
    reader = Reader(text, read_pattern=read_pattern)
    try:
        found = reader.grammar()
        culprit = impossible_rules(found)[-1:]
        reader.at = reader.defined.get("".join(culprit), 0)
        check(not culprit, f"rule {''.join(culprit)} matches no text")
    except UserError as error:
        raise UserError(f"line {reader.line()}: {error}") from error
    return found


class Reader(Parser):
    """Parses rules. Groups, classes and repetitions are parsed as in regular expressions."""

    def __init__(self, text: str, deepest: int = DEEPEST, read_pattern: Callable[[str], Node] = whole):
        super().__init__(text, deepest)
        self.read_pattern = read_pattern
        self.used = dict[str, int]()  # rules that are referred to, and where first
        self.defined = dict[str, int]()

    def line(self) -> int:
        """The number of the current line, from 1."""
        return len(_LINE_END.findall(self.text, 0, self.at)) + 1

    def grammar(self) -> Grammar:
        """All rules. Raises UserError."""
        found: Grammar = {}
        self.check_characters()
        self.space()
        while self.at < len(self.text):
            name = self.rule_name()
            check(name not in found, f"rule {name} is defined twice")
            self.defined[name] = self.at
            found[name] = self.choice()
            check(not self.next_is(")"), "a ) closes no group")
        for name, place in self.used.items():
            self.at = place
            check(name in found, f"rule {name} is not defined")
        check("root" in found, "there is no rule of the name root, with which an answer begins")
        return found

    def rule_name(self) -> str:
        begun = _DEFINED.match(self.text, self.at)
        if begun is None:
            raise UserError(f"a rule must begin so: NAME ::= ; {self.seen()} does not")
        line = max(self.text.rfind(end, 0, self.at) for end in "\r\n") + 1
        check(not self.text[line : self.at].strip(), f"rule {begun[1]} must begin on a line of its own")
        self.at = begun.end()
        self.space()
        return begun[1]

    def seen(self) -> str:
        """The text at the current place, for an error."""
        return repr(self.text[self.at : self.at + 12]) if self.at < len(self.text) else "its end"

    def space(self) -> None:
        self.at = self.after_space(self.at)

    def after_space(self, place: int) -> int:
        """Where the white space and the comments that begin at `place` end."""
        found = _SPACE.match(self.text, place)
        assert found is not None  # the empty text matches
        return found.end()

    def row(self) -> Row:
        self.space()
        parts: list[Node] = []
        while not self.at_end():
            parts.append(self.repeated(self.atom()))
            self.space()
        check(bool(parts), f'an element is missing before {self.seen()}; write "" for the empty text')
        return Row(tuple(parts))

    def at_end(self) -> bool:
        """Whether the current place ends a row."""
        return self.at == len(self.text) or self.text[self.at] in "|)" or _DEFINED.match(self.text, self.at) is not None

    def repeated(self, node: Node) -> Node:
        self.space()
        times = self.times()
        self.space()
        again = times is not None and self.text[self.at : self.at + 1] in set("*+?{")
        check(not again, "a repetition of a repetition: put the inner one into a group")
        return node if times is None else Times(node, *times)

    def times(self) -> tuple[int, int | None] | None:
        found = _TIMES.match(self.text, self.at)
        if found is None:
            check(not self.next_is("{"), f"{{ must begin a number of times, as {{2}}, {{2,}} or {{2,3}}: {self.seen()}")
            return super().times()
        return self.bounds(found)

    def atom(self) -> Node:
        if self.next_is("("):
            return self.parenthesis()
        if self.next_is('"'):
            return Row(tuple(Chars(points(c)) for c in self.string()))
        if self.take("["):
            return Chars(self.set_of())
        name = _NAME.match(self.text, self.at)
        if name is None:
            raise UserError(f"{self.seen()} begins neither a text, a class, a group nor a rule's name")
        if name[0] == "Regex" and self.text.startswith("(", self.after_space(name.end())):
            self.at = name.end()
            return self.regex()
        macro = name[0] in _MACROS and self.text[name.end() : name.end() + 1] == "("
        check(not macro, f"{name[0]}(...) cannot be guaranteed: a rule is made of texts, classes and rules")
        self.used.setdefault(name[0], self.at)
        self.at = name.end()
        return Ref(name[0])

    def parenthesis(self) -> Node:
        self.take("(")
        self.space()
        look = self.next_is("=")
        check(not look, "a lookahead, (= ...), cannot be guaranteed; put what must follow into the rule")
        return Row(()) if self.take(")") else self.closed()

    def regex(self) -> Node:
        """The argument of `Regex`: one literal within parentheses."""
        self.space()
        self.take("(")
        self.space()
        check(self.next_is('"'), 'Regex must have one text: Regex("...")')
        text = self.string()
        self.space()
        check(self.take(")"), 'Regex must have one text: Regex("...")')
        return self.read_pattern(text)

    def string(self) -> str:
        """A literal, from its opening quote to the closing one."""
        self.at += 1
        found = ""
        while not self.take('"'):
            ended = self.at == len(self.text) or self.text[self.at] in "\r\n"
            check(not ended, 'a text is not closed: a " is missing')
            found += chr(self.member(negated=False)[0][0])
        return found

    def escape(self, in_set: bool = False, negated: bool = False) -> Ranges:
        endless = _ENDLESS.match(self.text, self.at)
        check(not endless, f"\\{endless and endless[0]} means different things; write \\u and four digits")
        if long := _LONG.match(self.text, self.at):
            self.at = long.end()
            return points(chr(character(int(long[1], 16), long[0])))
        if (code := self.hexadecimal()) is not None:
            return ((code, code),)
        letter, digit = self.text[self.at : self.at + 1], self.text[self.at + 1 : self.at + 2]
        check(letter != "0" or not digit.isdigit(), f"\\0{digit} is no escape that is known; write \\u and four digits")
        known = letter in _ESCAPES or (letter.isascii() and letter.isprintable() and not letter.isalnum())
        check(bool(letter) and known, f"\\{letter} is no escape that is known")
        self.at += 1
        return points(_ESCAPES.get(letter, letter))

    def member(self, negated: bool) -> Ranges:
        check(not self.next_is("\n") and not self.next_is("\r"), "a class must end on its line: a ] is missing")
        return super().member(negated)


def _refs(node: Node) -> Iterator[str]:
    """The names of the rules that a tree refers to, in order."""
    if isinstance(node, Ref):
        yield node.name
    for part in _parts(node):
        yield from _refs(part)


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Times):
        return (node.node,)
    return node.parts if isinstance(node, Row) else node.options if isinstance(node, Choice) else ()


def possible_rules(grammar: Mapping[str, Node]) -> set[str]:
    """The names of the rules that a finite text matches."""
    return _rules_that(is_possible, grammar)


def _rules_that(hold: Callable[[Node, _Names], bool], grammar: Mapping[str, Node]) -> set[str]:
    """The least set of rules that satisfies `hold`, which is given a rule and the names found so far."""
    known: set[str] = set()
    users: dict[str, set[str]] = {}
    for name, node in grammar.items():
        for used in _refs(node):
            users.setdefault(used, set()).add(name)
    waiting = list(grammar)
    while waiting:
        name = waiting.pop()
        if name not in known and hold(grammar[name], known):
            known.add(name)
            waiting += users.get(name, ())
    return known


def is_possible(node: Node, rules: _Names = frozenset()) -> bool:
    """Whether some text matches a tree, given that some text matches each of `rules`."""
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Ref):
        return node.name in rules
    if isinstance(node, Times) and node.least == 0:
        return True
    return (any if isinstance(node, Choice) else all)(is_possible(part, rules) for part in _parts(node))


def pruned(node: Node, rules: _Names = frozenset()) -> Node:
    """A tree of the same texts without options that no text matches, so that decoding cannot enter a dead end."""
    if isinstance(node, Choice):
        return Choice(tuple(pruned(option, rules) for option in node.options if is_possible(option, rules)))
    if isinstance(node, Row):
        return Row(tuple(pruned(part, rules) for part in node.parts))
    if isinstance(node, Times):
        return Times(pruned(node.node, rules), node.least, node.most) if is_possible(node.node, rules) else Row(())
    return node


def _says(node: Node, rules: _Names) -> bool:
    """Whether a non-empty text matches a tree that some text matches, given that one matches each of `rules`."""
    if isinstance(node, Chars):
        return True
    if isinstance(node, Ref):
        return node.name in rules
    return not (isinstance(node, Times) and node.most == 0) and any(_says(part, rules) for part in _parts(node))


def _terse(node: Node, rules: _Names) -> Node:
    """A tree of the same texts in which a part that only the empty text matches is the empty text.

    xgrammar aborts the process for a rule that begins with a counted repetition of itself and matches nothing else.
    """
    if not _says(node, rules):
        return Row(())
    if isinstance(node, Times):
        return Times(_terse(node.node, rules), node.least, node.most)
    if isinstance(node, Row | Choice):
        return type(node)(tuple(_terse(part, rules) for part in _parts(node)))
    return node


def impossible_rules(grammar: Mapping[str, Node]) -> list[str]:
    """A chain of rules that explains why no text matches the root: the root, a rule that it needs and no text matches,
    and so on. Empty where a text matches the root."""
    known = possible_rules(grammar)
    found: list[str] = []
    waiting = ["root"] if "root" not in known else []
    while waiting:
        found.append(waiting[0])
        waiting = [name for name in _needed(grammar[found[-1]], known) if name not in found]
    return found


def _needed(node: Node, rules: _Names) -> Iterator[str]:
    """The rules because of which no text matches a tree."""
    if isinstance(node, Ref) and node.name not in rules:
        yield node.name
    for part in _parts(node) if not is_possible(node, rules) else ():
        yield from _needed(part, rules)


def freed(grammar: Mapping[str, Node]) -> Grammar:
    """The rules reachable from the root, without options that no text matches. Some text must match the root."""
    known = possible_rules(grammar)
    left = {name: pruned(grammar[name], known) for name in known}
    saying = _rules_that(_says, left)
    found, waiting = dict[str, Node](), ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _terse(left[name], saying)
            waiting += reversed(list(_refs(found[name])))
    return found


class _Run(NamedTuple):
    """Optional or repeated parts of a tree with nothing fixed between them: how many there are at its beginning, at its
    end, at most, and from end to end; None: something fixed is between."""

    first: int
    last: int
    most: int
    through: int | None


_FIXED, _NOTHING = _Run(0, 0, 0, None), _Run(0, 0, 0, 0)


def longest_run(grammar: Mapping[str, Node]) -> int:
    """The most optional or repeated parts that follow each other with nothing fixed between them.

    Rules count as what they stand for; one that uses itself, as one part there.
    """
    empty = _rules_that(_may_be_empty, grammar)
    runs = dict[str, _Run]()
    for name in _used_first(grammar):
        runs[name] = _run(grammar[name], runs, empty)
    return max(run.most for run in runs.values())


def _used_first(grammar: Mapping[str, Node]) -> Iterator[str]:
    """The rules reachable from the root, each behind those that it uses, but for rules that use each other."""
    seen, open_rules = {"root"}, [("root", _refs(grammar["root"]))]
    while open_rules:
        name, left = open_rules[-1]
        used = next((each for each in left if each not in seen), None)
        if used is None:
            open_rules.pop()
            yield name
        else:
            seen.add(used)
            open_rules.append((used, _refs(grammar[used])))


def _may_be_empty(node: Node, rules: _Names) -> bool:
    """Whether the empty text matches a tree, given that it matches each of `rules`."""
    if isinstance(node, Ref):
        return node.name in rules
    if isinstance(node, Times) and node.least == 0:
        return True
    is_any = any if isinstance(node, Choice) else all
    return not isinstance(node, Chars) and is_any(_may_be_empty(part, rules) for part in _parts(node))


def _run(node: Node, runs: Mapping[str, _Run], empty: _Names) -> _Run:
    """Of a tree, given those of rules. `empty`: the rules that the empty text matches."""
    if isinstance(node, Ref):
        return runs.get(node.name, _loose([_FIXED]) if node.name in empty else _FIXED)
    inner = [_run(part, runs, empty) for part in _parts(node)]
    if isinstance(node, Row):
        return reduce(_behind, inner, _NOTHING)
    if isinstance(node, Choice):
        passed = any(run.through is not None for run in inner)
        return inner[0] if len(inner) == 1 else _loose(inner) if passed else _widest(inner)
    if not isinstance(node, Times):
        return _FIXED
    if node.most == 0:
        return _NOTHING
    if node.most != 1 and inner[0].through is None:  # one round follows another
        inner.append(_behind(inner[0], inner[0]))
    return _widest(inner) if node.least == node.most and inner[0].through is None else _loose(inner)


def _behind(one: _Run, then: _Run) -> _Run:
    """Of one tree and another behind it."""
    first = one.first if one.through is None else max(one.first, one.through + then.first)
    last = then.last if then.through is None else max(then.last, then.through + one.last)
    passed = one.through is not None and then.through is not None
    through = (one.through or 0) + (then.through or 0) if passed else None
    return _Run(first, last, max(one.most, then.most, one.last + then.first), through)


def _widest(runs: list[_Run]) -> _Run:
    """Of a choice between trees none of which can be passed without something fixed."""
    return _Run(max(run.first for run in runs), max(run.last for run in runs), max(run.most for run in runs), None)


def _loose(runs: list[_Run]) -> _Run:
    """Of one optional or repeated part, which holds these."""
    through = max(1, *(run.through or 0 for run in runs))
    wide = _widest(runs)
    return _Run(max(wide.first, through), max(wide.last, through), max(wide.most, through), through)
