"""Which tests are slow: those that slow.txt names, by a measurement. Writes slow.txt from pytest's JUnit file:

bash launch/test.sh --junitxml=times.xml; python tests/support/slow.py times.xml
"""

import sys
import xml.etree.ElementTree
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMES = Path(__file__).with_name("slow.txt")
LIMIT_S, LIMIT_OF_ALL_S = 2.0, 4.0  # of one set of a test's parameters, and of all


def slow_tests() -> set[str]:
    """FILE::TEST, without parameters; FILE is relative to tests/."""
    return set(NAMES.read_text().split())


def measured(file: Path) -> list[str]:
    times = defaultdict(list)
    for case in xml.etree.ElementTree.parse(file).iter("testcase"):
        path = case.get("classname").removeprefix("tests.").replace(".", "/")
        times[f"{path}.py::{case.get('name').partition('[')[0]}"].append(float(case.get("time")))
    return sorted(name for name, each in times.items() if max(each) > LIMIT_S or sum(each) > LIMIT_OF_ALL_S)


if __name__ == "__main__":
    NAMES.write_text("\n".join(measured(Path(sys.argv[1]))) + "\n")
