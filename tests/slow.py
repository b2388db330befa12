"""Which tests are slow: those whose names are in slow.txt, by a measurement. Writes it from pytest's JUnit file:

bash launch/test.sh --junitxml=times.xml; python tests/slow.py times.xml
"""

import sys
import xml.etree.ElementTree
from pathlib import Path

NAMES = Path(__file__).with_name("slow.txt")
LIMIT_S = 2.0  # of one set of its parameters


def slow() -> set[str]:
    """FILE::TEST, without parameters."""
    return set(NAMES.read_text().split())


def measured(file: Path) -> list[str]:
    cases = xml.etree.ElementTree.parse(file).iter("testcase")
    times = [(float(case.get("time")), case.get("classname"), case.get("name")) for case in cases]
    return sorted(
        {f"{where.split('.')[-1]}.py::{name.partition('[')[0]}" for time, where, name in times if time > LIMIT_S}
    )


if __name__ == "__main__":
    NAMES.write_text("\n".join(measured(Path(sys.argv[1]))) + "\n")
