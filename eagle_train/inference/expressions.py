"""Which regular expressions and EBNF grammars xgrammar reads as they are meant, in a time that a server can spare.

Knows nothing of tokens or JSON. Every limit below was found by measuring.
"""

import json
import re

from eagle_train.config import UserError, check, shown
from eagle_train.inference.grammars.ebnf import NEVER_RULE, Rules, written
from eagle_train.inference.grammars.patterns import Node, whole

MOST_CHARACTERS = 1 << 15  # of one text; the time to compile grows with its square
MOST_TIMES = (1 << 31) - 1  # of a repetition; of what is more xgrammar takes the last 32 bits
MOST_PARTS = 2000  # groups, and parts that are optional or repeated
MOST_NESTED = 1500  # times of three repetitions or more within each other, where one without an end counts as
UNBOUNDED = 4
MOST_IN_A_ROW = 32  # optional or repeated parts with nothing fixed between them; a token's time grows with the square
ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|.", re.DOTALL)  # an escape, a class of characters, or one
# What is no part of a grammar's structure: texts, classes, comments.
EBNF_TEXT = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|\[(?:\\.|[^\]\\])*(?:\]|\Z)|#[^\n]*', re.DOTALL)
LOOK = re.compile(r"\(\s*=")
MACRO = re.compile(r"\bRegex\b(?=\s*\()")
REGEX = re.compile(r'Regex\s*\(\s*"((?:\\.|[^"\\])*)"\s*\)', re.DOTALL)
TIMES = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
IN_A_ROW = re.compile(rf"(?:[^*+?{{}}|](?:[*+?]|\{{\d*,\d*\}})){{{MOST_IN_A_ROW + 1}}}")
LOOPED = re.compile(r"\(|[^(](?:[*+]|\{\d+,?\d*\})?")  # a group's beginning; its end or a letter, and what repeats it
NUMBER = re.compile(r"\d+")


def as_ebnf(regex: str) -> str:
    """A grammar of exactly the texts that `regex` matches from beginning to end.

    Raises UserError for one that it cannot keep, or not in time.
    """
    check_pattern(regex)
    rules = Rules("part")
    return f"root ::= {written(whole(regex), rules)}\n{rules.text}\n{NEVER_RULE}"


def check_pattern(regex: str) -> None:
    """Raise UserError for a regular expression that no grammar keeps, or not in time."""
    check_length(regex)
    check_structure("".join(atom if len(atom) == 1 else "x" for atom in ATOM.findall(regex)))
    whole(regex)


def kept_ebnf(grammar: str) -> str:
    """An EBNF grammar for xgrammar, which ignores what a rule says of the text after it, and parts of `Regex("...")`.

    Raises UserError for one that it cannot keep, or not in time.
    """
    check_length(grammar)
    bare = EBNF_TEXT.sub(lambda found: "x" * len(found[0]), grammar)  # what is left of texts says nothing
    look = LOOK.search(bare)
    check(not look, "a lookahead, (= ...), cannot be guaranteed; put what must follow into the rule")
    check_structure(EBNF_TEXT.sub("x", grammar))
    pieces, end, rules = [], 0, Rules("eagle_part")
    for macro in MACRO.finditer(bare):
        regex = REGEX.match(grammar, macro.start())
        check(regex is not None, 'Regex must have one text: Regex("...")')
        pieces += [grammar[end : macro.start()], f"({written(regex_of(regex[1]), rules)})"]
        end = regex.end()
    own = f"\n{rules.text}\n{NEVER_RULE}" if pieces else ""
    return "".join([*pieces, grammar[end:]]) + own


def regex_of(text: str) -> Node:
    """The regular expression in an EBNF text, as it stands between its quotes."""
    try:
        regex = json.loads(f'"{text}"')
    except ValueError as error:
        raise UserError(f'Regex("{shown(text)[1:-1]}"): its text must be written as JSON writes one') from error
    check_pattern(regex)
    return whole(regex)


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
