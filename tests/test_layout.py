"""The tests' own order: no test imports another; what they share is in tests/support."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Also in a program that a test holds as a string of several lines.
IMPORTED_TEST = re.compile(r"^ *(?:from|import) +(?:\S*\btest_|tests\S* +import +.*\btest_).*$", re.MULTILINE)


def test_no_test_imports_another():
    found = {path.relative_to(TESTS): IMPORTED_TEST.findall(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from tests.corpus.test_x import chat",
        "def f():\n    import tests.corpus.test_x",
        "from tests.corpus import test_x",
        "import test_x",
        "PROGRAM = '''\nimport os\nfrom tests.corpus.test_x import chat\n'''",
    ],
)
def test_an_imported_test_is_found(text):
    assert len(IMPORTED_TEST.findall(text)) == 1
