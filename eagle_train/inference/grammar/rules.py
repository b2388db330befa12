"""EBNF grammars as trees: how they are read, and how they are freed of what no text can match.

The dialect is xgrammar's, without what it reads otherwise than it is meant: every escape, class and name has one
meaning here, or is refused with its line. Knows nothing of JSON or tokens.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

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
"""Rules by their names."""
Names = AbstractSet[str]

NAME = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
DEFINED = re.compile(rf"({NAME.pattern}){SPACE.pattern}::=")
TIMES = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
LINE_END = re.compile(r"\r\n|\r|\n")
MACROS = ("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch")  # of xgrammar: no texts, but tokens
LONG = re.compile(r"U([0-9A-Fa-f]{8})")
ENDLESS = re.compile("x[0-9A-Fa-f]{3}")  # of which xgrammar takes all, and others two digits
ESCAPES = CONTROLS | {"a": "\a", "b": "\b", "e": "\x1b"}


def read_grammar(text: str) -> Grammar:
    """The rules of a grammar that users write. Raises UserError, naming the line, for one that has no exact meaning."""
    reader = Reader(text)
    try:
        found = reader.grammar()
        culprit = impossible_rules(found)[-1:]
        reader.at = reader.defined.get("".join(culprit), 0)
        check(not culprit, f"rule {''.join(culprit)} matches no text")
    except UserError as error:
        raise UserError(f"line {reader.line()}: {error}") from error
    return found


class Reader(Parser):
    """Of rules. What a regular expression has too, groups, classes and repetitions, is read as there."""

    def __init__(self, text: str, deepest: int = DEEPEST):
        super().__init__(text, deepest)
        self.used = dict[str, int]()  # rules that others speak of, and where they do first
        self.defined = dict[str, int]()

    def line(self) -> int:
        return len(LINE_END.findall(self.text, 0, self.at)) + 1

    def grammar(self) -> Grammar:
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
        begun = DEFINED.match(self.text, self.at)
        if begun is None:
            raise UserError(f"a rule must begin so: NAME ::= ; {self.seen()} does not")
        line = max(self.text.rfind(end, 0, self.at) for end in "\r\n") + 1
        check(not self.text[line : self.at].strip(), f"rule {begun[1]} must begin on a line of its own")
        self.at = begun.end()
        self.space()
        return begun[1]

    def seen(self) -> str:
        """What stands here, for an error."""
        return repr(self.text[self.at : self.at + 12]) if self.at < len(self.text) else "its end"

    def space(self) -> None:
        self.at = self.after_space(self.at)

    def after_space(self, place: int) -> int:
        """Where the white space and the comments that begin at `place` end."""
        found = SPACE.match(self.text, place)
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
        """Of a row."""
        return self.at == len(self.text) or self.text[self.at] in "|)" or DEFINED.match(self.text, self.at) is not None

    def repeated(self, node: Node) -> Node:
        self.space()
        times = self.times()
        self.space()
        again = times is not None and self.text[self.at : self.at + 1] in set("*+?{")
        check(not again, "a repetition of a repetition: put the inner one into a group")
        return node if times is None else Times(node, *times)

    def times(self) -> tuple[int, int | None] | None:
        found = TIMES.match(self.text, self.at)
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
        name = NAME.match(self.text, self.at)
        if name is None:
            raise UserError(f"{self.seen()} begins neither a text, a class, a group nor a rule's name")
        if name[0] == "Regex" and self.text.startswith("(", self.after_space(name.end())):
            self.at = name.end()
            return self.regex()
        macro = name[0] in MACROS and self.text[name.end() : name.end() + 1] == "("
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
        """What stands behind the name: one text within parentheses."""
        self.space()
        self.take("(")
        self.space()
        check(self.next_is('"'), 'Regex must have one text: Regex("...")')
        text = self.string()
        self.space()
        check(self.take(")"), 'Regex must have one text: Regex("...")')
        return whole(text)

    def string(self) -> str:
        """A text, from its quote to the other."""
        self.at += 1
        found = ""
        while not self.take('"'):
            ended = self.at == len(self.text) or self.text[self.at] in "\r\n"
            check(not ended, 'a text is not closed: a " is missing')
            found += chr(self.member(negated=False)[0][0])
        return found

    def escape(self, in_set: bool = False, negated: bool = False) -> Ranges:
        endless = ENDLESS.match(self.text, self.at)
        check(not endless, f"\\{endless and endless[0]} means different things; write \\u and four digits")
        if long := LONG.match(self.text, self.at):
            self.at = long.end()
            return points(chr(character(int(long[1], 16), long[0])))
        if (code := self.hexadecimal()) is not None:
            return ((code, code),)
        letter, digit = self.text[self.at : self.at + 1], self.text[self.at + 1 : self.at + 2]
        check(letter != "0" or not digit.isdigit(), f"\\0{digit} is no escape that is known; write \\u and four digits")
        known = letter in ESCAPES or (letter.isascii() and letter.isprintable() and not letter.isalnum())
        check(bool(letter) and known, f"\\{letter} is no escape that is known")
        self.at += 1
        return points(ESCAPES.get(letter, letter))

    def member(self, negated: bool) -> Ranges:
        check(not self.next_is("\n") and not self.next_is("\r"), "a class must end on its line: a ] is missing")
        return super().member(negated)


def refs(node: Node) -> Iterator[str]:
    """The names of the rules that a tree speaks of, in their order."""
    if isinstance(node, Ref):
        yield node.name
    for part in _parts(node):
        yield from refs(part)


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Times):
        return (node.node,)
    return node.parts if isinstance(node, Row) else node.options if isinstance(node, Choice) else ()


def possible_rules(grammar: Mapping[str, Node]) -> set[str]:
    """The names of the rules that some text matches: those that can end without going on for ever."""
    return _rules_that(is_possible, grammar)


def _rules_that(hold: Callable[[Node, Names], bool], grammar: Mapping[str, Node]) -> set[str]:
    """The names of the rules of which `hold` is true, where it is asked again as others' names become known."""
    known: set[str] = set()
    users: dict[str, set[str]] = {}
    for name, node in grammar.items():
        for used in refs(node):
            users.setdefault(used, set()).add(name)
    waiting = list(grammar)
    while waiting:
        name = waiting.pop()
        if name not in known and hold(grammar[name], known):
            known.add(name)
            waiting += users.get(name, ())
    return known


def is_possible(node: Node, rules: Names = frozenset()) -> bool:
    """Whether some text matches, where `rules` can be matched."""
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Ref):
        return node.name in rules
    if isinstance(node, Times) and node.least == 0:
        return True
    return (any if isinstance(node, Choice) else all)(is_possible(part, rules) for part in _parts(node))


def pruned(node: Node, rules: Names = frozenset()) -> Node:
    """The same texts, without options that none matches: so none is begun that cannot be ended."""
    if isinstance(node, Choice):
        return Choice(tuple(pruned(option, rules) for option in node.options if is_possible(option, rules)))
    if isinstance(node, Row):
        return Row(tuple(pruned(part, rules) for part in node.parts))
    if isinstance(node, Times):
        return Times(pruned(node.node, rules), node.least, node.most) if is_possible(node.node, rules) else Row(())
    return node


def says(node: Node, rules: Names) -> bool:
    """Whether a text of at least one character matches, where one matches `rules`. Of what some text matches."""
    if isinstance(node, Chars):
        return True
    if isinstance(node, Ref):
        return node.name in rules
    return not (isinstance(node, Times) and node.most == 0) and any(says(part, rules) for part in _parts(node))


def terse(node: Node, rules: Names) -> Node:
    """The same texts, where the empty text stands for what matches no other.

    xgrammar ends the process where a rule begins with a counted repetition of itself and matches nothing else.
    """
    if not says(node, rules):
        return Row(())
    if isinstance(node, Times):
        return Times(terse(node.node, rules), node.least, node.most)
    if isinstance(node, Row | Choice):
        return type(node)(tuple(terse(part, rules) for part in _parts(node)))
    return node


def impossible_rules(grammar: Mapping[str, Node]) -> list[str]:
    """Why no text matches the root: it, a rule that it needs and nothing matches, and so on; nothing where one does."""
    known = possible_rules(grammar)
    found: list[str] = []
    waiting = ["root"] if "root" not in known else []
    while waiting:
        found.append(waiting[0])
        waiting = [name for name in _needed(grammar[found[-1]], known) if name not in found]
    return found


def _needed(node: Node, rules: Names) -> Iterator[str]:
    """The rules for which nothing matches a tree."""
    if isinstance(node, Ref) and node.name not in rules:
        yield node.name
    for part in _parts(node) if not is_possible(node, rules) else ():
        yield from _needed(part, rules)


def freed(grammar: Mapping[str, Node]) -> Grammar:
    """The rules that the root leads to, without options that no text matches. Some text must match the root."""
    known = possible_rules(grammar)
    left = {name: pruned(grammar[name], known) for name in known}
    saying = _rules_that(says, left)
    found, waiting = dict[str, Node](), ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = terse(left[name], saying)
            waiting += reversed(list(refs(found[name])))
    return found
