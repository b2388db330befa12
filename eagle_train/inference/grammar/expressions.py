"""Which regular expressions and EBNF grammars xgrammar reads as they are meant, in a time that a server can spare.

Knows nothing of tokens or JSON. Every limit below was found by measuring.
"""

import re

from eagle_train.errors import check
from eagle_train.inference.grammar.ebnf import write_rules
from eagle_train.inference.grammar.patterns import Node, whole
from eagle_train.inference.grammar.rules import freed, is_possible, pruned, read_grammar

MOST_CHARACTERS = 1 << 15  # of one text; the time to compile grows with its square
MOST_TIMES = (1 << 31) - 1  # of a repetition; of what is more xgrammar takes the last 32 bits
MOST_PARTS = 2000  # groups, and parts that are optional or repeated
MOST_NESTED = 1500  # times of three repetitions or more within each other, where one without an end counts as
UNBOUNDED = 4
MOST_IN_A_ROW = 32  # optional or repeated parts with nothing fixed between them; a token's time grows with the square
ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|.", re.DOTALL)  # an escape, a class of characters, or one
# What is no part of a grammar's structure: texts, classes, comments.
EBNF_TEXT = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|\[(?:\\.|[^\]\\])*(?:\]|\Z)|#[^\n]*', re.DOTALL)
TIMES = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
IN_A_ROW = re.compile(rf"(?:[^*+?{{}}|](?:[*+?]|\{{\d*,\d*\}})){{{MOST_IN_A_ROW + 1}}}")
LOOPED = re.compile(r"\(|[^(](?:[*+]|\{\d+,?\d*\})?")  # a group's beginning; its end or a letter, and what repeats it
NUMBER = re.compile(r"\d+")


def as_ebnf(regex: str) -> str:
    """A grammar of exactly the texts that `regex` matches from beginning to end.

    Raises UserError for one that it cannot keep, or not in time.
    """
    tree = check_pattern(regex)
    check(is_possible(tree), "matches no text")
    return write_rules({"root": pruned(tree)})


def check_pattern(regex: str) -> Node:
    """The tree of a regular expression. Raises UserError for one that no grammar keeps, or not in time."""
    check_length(regex)
    check_structure("".join(atom if len(atom) == 1 else "x" for atom in ATOM.findall(regex)))
    return whole(regex)


def kept_ebnf(grammar: str) -> str:
    """A user's EBNF, for xgrammar: in words that it reads as they are meant, without options that cannot be ended.

    Raises UserError, naming the line, for one that it cannot keep, or not in time.
    """
    check_length(grammar)
    check_structure(EBNF_TEXT.sub("x", grammar))
    return write_rules(freed(read_grammar(grammar)))


def check_length(text: str) -> None:
    check(len(text) <= MOST_CHARACTERS, f"{len(text)} characters; at most {MOST_CHARACTERS} are possible")


def check_structure(text: str) -> None:
    """`text`: without texts and classes of characters, which may hold anything."""
    most = max((int(n.lstrip("0")[:12] or 0) for times in TIMES.findall(text) for n in times), default=0)
    check(most <= MOST_TIMES, f"{most} repetitions; at most {MOST_TIMES} are possible")
    parts = sum(map(text.count, "(*+?{"))
    check(parts <= MOST_PARTS, f"{parts} groups and optional or repeated parts; at most {MOST_PARTS} are possible")
    bare = re.sub(r"\s|\?:", "", text)
    check(nested_times(bare) <= MOST_NESTED, "repetitions of repetitions of repetitions would take too long")
    loose = IN_A_ROW.search(re.sub(r"[()]", "", bare))
    check(not loose, f"more than {MOST_IN_A_ROW} optional or repeated parts in a row would take too long")


def nested_times(text: str) -> int:
    """How often the innermost of three or more repetitions within each other may come; 0 where there are none."""
    deepest = [(0, 1)]  # of each open group: how many repetitions are within each other, and the product of their times
    for match in LOOPED.finditer(text):
        if match[0] == "(":
            deepest.append((0, 1))
            continue
        depth, product = deepest.pop() if match[0][0] == ")" and len(deepest) > 1 else (0, 1)
        if loop := match[0][1:]:
            times = UNBOUNDED if loop in "*+" or loop.endswith(",}") else int(NUMBER.findall(loop)[-1][:12])
            depth, product = depth + 1, product * max(times, 1)
        deepest[-1] = max(deepest[-1], (depth, product))
    depth, product = max(deepest)
    return product if depth > 2 else 0
