"""Which regular expressions and EBNF grammars xgrammar reads as they are meant, in a time that a server can spare.

Knows nothing of tokens or JSON. Every limit below was found by measuring.
"""

import re

from eagle_train.config import check

MOST_CHARACTERS = 1 << 15  # of one text; the time to compile grows with its square
MOST_TIMES = (1 << 31) - 1  # of a repetition; of what is more xgrammar takes the last 32 bits
MOST_PARTS = 2000  # groups, and parts that are optional or repeated
MOST_NESTED = 1500  # times of three repetitions or more within each other, where one without an end counts as
UNBOUNDED = 4
MOST_IN_A_ROW = 32  # optional or repeated parts with nothing fixed between them; a token's time grows with the square
ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|.", re.DOTALL)  # an escape, a class of characters, or one
# What a backslash may make of a letter or digit; of others xgrammar takes the letter itself, or refuses them by name.
ESCAPES, REFUSED = frozenset("dDwWsSfnrtvaexuc0"), frozenset("bBpPk123456789")
ESCAPE = re.compile(r"\\(.)(\d?)", re.DOTALL)
# What is no part of a grammar's structure: texts, classes, comments.
EBNF_TEXT = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|\[(?:\\.|[^\]\\])*(?:\]|\Z)|#[^\n]*', re.DOTALL)
TIMES = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
IN_A_ROW = re.compile(rf"(?:[^*+?{{}}|](?:[*+?]|\{{\d*,\d*\}})){{{MOST_IN_A_ROW + 1}}}")
LOOPED = re.compile(r"\(|[^(](?:[*+]|\{\d+,?\d*\})?")  # a group's beginning; its end or a letter, and what repeats it
NUMBER = re.compile(r"\d+")


def as_whole(regex: str) -> str:
    """`regex` for xgrammar, which matches all of a text, ignores anchors inside, and lets `.` be the end of a line.

    Raises UserError for one that it cannot keep, or not in time.
    """
    check_length(regex)
    atoms = ATOM.findall(regex)
    inside = "^" in atoms[1:] or "$" in atoms[:-1]
    check(not inside, "^ and $ may stand at the ends only: the whole answer is matched")
    check_escapes(atoms)
    check_structure("".join(atom if len(atom) == 1 else "x" for atom in atoms))
    return "".join(r"[^\n\r]" if atom == "." else atom for atom in atoms)


def check_escapes(atoms: list[str]) -> None:
    """Raise UserError for what xgrammar would take for something else without a word."""
    for atom, after in zip(atoms, [*atoms[1:], ""], strict=True):
        is_class = len(atom) > 1 and atom[0] == "["
        check(not re.match(r"\[\^?\]", atom), r"a class that begins with ] means different things; write \] for it")
        known = ESCAPES | (frozenset("b") if is_class else REFUSED)
        for letter, digit in ESCAPE.findall(atom if is_class else atom + after if len(atom) > 1 else ""):
            strange = letter.isascii() and letter.isalnum() and letter not in known
            check(not strange, f"\\{letter} is no escape that is known; without the backslash it is the letter")
            check(letter != "0" or not digit, f"\\0{digit} is no escape that is known; write \\x and two digits")


def check_ebnf(grammar: str) -> None:
    """Raise UserError for an EBNF grammar that xgrammar cannot keep, or not in time."""
    check_length(grammar)
    check_structure(EBNF_TEXT.sub("x", grammar))


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
