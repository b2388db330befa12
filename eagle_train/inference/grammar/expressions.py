"""Regular expressions and users' EBNF as EBNF for xgrammar; what it would misread, or compile too slowly, is refused.

Knows nothing of tokens or JSON. The limits were measured: with them a server is not blocked by one request.
"""

import re

from eagle_train.errors import check
from eagle_train.inference.grammar.ebnf import write_rules
from eagle_train.inference.grammar.patterns import Node, whole
from eagle_train.inference.grammar.rules import Grammar, freed, is_possible, longest_run, pruned, read_grammar

_MOST_CHARACTERS = 1 << 15  # of one text; the time to compile grows with its square
MOST_TIMES = (1 << 31) - 1  # of a repetition; xgrammar truncates larger numbers to 32 bits
_MOST_PARTS = 2000  # groups, and parts that are optional or repeated
_MOST_NESTED = 1500  # product of the bounds of three or more nested repetitions
_UNBOUNDED = 4  # what an unbounded repetition counts as in it
_MOST_IN_A_ROW = 32  # optional or repeated parts with nothing fixed between them; a token's time grows with the square
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|.", re.DOTALL)  # an escape, a class of characters, or one
# What has no part in a grammar's structure: literals, classes, comments.
_EBNF_TEXT = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\r\n]*', re.DOTALL)
_TIMES = re.compile(r"\{\s*(?:(\d+)\s*)?(?:,\s*(?:(\d+)\s*)?)?\}")  # white space is read in one way only
# A group's beginning; its end or a letter, and what repeats it.
_LOOPED = re.compile(r"\(|[^(](?:[*+]|\{\d+(?:,\d*)?\})?")
_NUMBER = re.compile(r"\d+")


def as_ebnf(regex: str) -> str:
    """A grammar of exactly the texts that `regex` matches as a whole.

    Raises UserError for one that cannot be guaranteed, or takes too long.
    """
    tree = check_pattern(regex)
    check(is_possible(tree), "matches no text")
    return write_rules({"root": pruned(tree)})


def check_pattern(regex: str) -> Node:
    """The tree of a regular expression. Raises UserError for one that cannot be guaranteed, or takes too long."""
    check_length(regex)
    _check_structure("".join(atom if len(atom) == 1 else "x" for atom in _ATOM.findall(regex)))
    tree = whole(regex)
    _check_runs({"root": tree})
    return tree


def kept_ebnf(grammar: str) -> str:
    """A user's EBNF rewritten so that xgrammar reads it as it is meant, without options that no text matches.

    Raises UserError, naming the line, for one that cannot be guaranteed, or takes too long.
    """
    check_length(grammar)
    _check_structure(_EBNF_TEXT.sub("x", grammar))
    rules = freed(read_grammar(grammar, check_pattern))
    _check_runs(rules)
    return write_rules(rules)


def check_length(text: str) -> None:
    """Raise UserError for a text that is too long."""
    check(len(text) <= _MOST_CHARACTERS, f"{len(text)} characters; at most {_MOST_CHARACTERS} are possible")


def _check_structure(text: str) -> None:
    """Raise UserError where compiling would take too long. `text`: with literals and classes replaced by a letter."""
    most = max((int(n.lstrip("0")[:12] or 0) for times in _TIMES.findall(text) for n in times), default=0)
    check(most <= MOST_TIMES, f"{most} repetitions; at most {MOST_TIMES} are possible")
    parts = sum(map(text.count, "(*+?{"))
    check(parts <= _MOST_PARTS, f"{parts} groups and optional or repeated parts; at most {_MOST_PARTS} are possible")
    bare = re.sub(r"\s|\?:", "", text)
    check(_nested_times(bare) <= _MOST_NESTED, "repetitions of repetitions of repetitions would take too long")


def _check_runs(grammar: Grammar) -> None:
    """Raise UserError for a grammar with too many optional or repeated parts in a row."""
    loose = longest_run(grammar) > _MOST_IN_A_ROW
    check(not loose, f"more than {_MOST_IN_A_ROW} optional or repeated parts in a row would take too long")


def _nested_times(text: str) -> int:
    """The greatest product of the bounds of three or more nested repetitions; 0 without any."""
    deepest = [(0, 1)]  # of each open group: the depth of nested repetitions, and the product of their bounds
    for match in _LOOPED.finditer(text):
        if match[0] == "(":
            deepest.append((0, 1))
            continue
        depth, product = deepest.pop() if match[0][0] == ")" and len(deepest) > 1 else (0, 1)
        if loop := match[0][1:]:
            times = _UNBOUNDED if loop in "*+" or loop.endswith(",}") else int(_NUMBER.findall(loop)[-1][:12])
            depth, product = depth + 1, product * max(times, 1)
        deepest[-1] = max(deepest[-1], (depth, product))
    depth, product = max(deepest)
    return product if depth > 2 else 0
