"""artifacts/markdown.py: any text stands in a report as it is, and ends no cell, line or code."""

import re

import pytest

from eagle_train.artifacts.markdown import aligned, code, plain, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("snake_case stays", "snake_case stays"),
        ("*bold* _it_ __x__", r"\*bold\* \_it\_ \_\_x\_\_"),
        ("<script>alert(1)</script>", r"\<script>alert(1)\</script>"),
        ("a`b ~~c~~ $d$", r"a\`b \~\~c\~\~ \$d\$"),
        ("[a](http://b) &amp; R&D &", r"\[a\](http://b) \&amp; R\&D &"),
        (r"C:\new", r"C:\\new"),
        ("one\ntwo\r\n\tthree ", "one two three"),
        ("\x1b[31mred\u202e", r"\\x1b\[31mred\\u202e"),
    ],
)
def test_text(text, shown):
    assert plain(text) == shown


def test_a_long_name_is_cut_before_it_is_escaped():
    assert plain("x" * 61, 60) == "x" * 59 + "…"
    assert plain("*" * 60, 60) == r"\*" * 60
    assert plain("ab cd", 4) == "ab…"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_b*c", "`a_b*c`"),
        ("a`b", "``a`b``"),
        ("`", "`` ` ``"),
        ("a``b`", "``` a``b` ```"),
        ("a\nb", "`a b`"),
        ("", "` `"),
    ],
)
def test_code(text, shown):
    assert code(text) == shown


CELLS = ["a|b", r"c\|d", r"e\\|f", "|", "g\nh", "", r"\\", "`i|j`"]


@pytest.mark.parametrize("as_markdown", [plain, code, str])
def test_any_text_stays_in_its_cell(as_markdown):
    lines = table(["n", "m"], [[as_markdown(cell), "1"] for cell in CELLS], rule="---:").splitlines()
    assert lines[1] == "| --- | ---: |"
    assert len(lines) == 2 + len(CELLS)
    # As GitHub reads it: a backslash takes the next character with it.
    assert {len(re.findall(r"\\.|(\|)", line)) - len(re.findall(r"\\.", line)) for line in lines} == {3}


def test_columns_on_a_terminal_are_even():
    text = table(["name", "n"], [["a|b", "1"], ["日本", "22"]], rule="---:")
    assert aligned(text).splitlines() == [
        "| name |  n |",
        "| ---- | -: |",
        r"| a\|b |  1 |",
        "| 日本 | 22 |",
    ]
