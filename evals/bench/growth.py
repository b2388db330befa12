"""How a time grows with the batch and with the context: the exponent of a power law. Knows nothing of who was timed."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import linear_regression
from typing import Any

AXES = {"batch_size": "context_length", "context_length": "batch_size"}
"""What grows, and what is the same meanwhile."""

Row = Mapping[str, Any]


def growth(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each variant and each line of two or more cells: `exponent`, the b of the law TTIT = a * size^b that is
    nearest in logarithms (least squares). TTIT is the median: on average it has the wait for prompts that are read
    later, of which large batches of long prompts have many.

    `rows`: those of `sweep.rows_of`, of batches that come together. `over` names what grows, `at` is the size of the
    other, which stays. Where each row's keys are read once, exponents are 1 or less.
    """
    lines: dict[tuple[str, str, Any], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        for over, other in AXES.items():
            if row[over] is not None:
                lines[over, row["decoding"], row[other]].append((row[over], row["ttit_p50_s"]))
    found = []
    for (over, decoding, at), points in lines.items():
        if len({size for size, _ in points}) > 1:
            sizes, times = zip(*((math.log(size), math.log(time)) for size, time in points), strict=True)
            slope = linear_regression(sizes, times).slope
            found.append({"decoding": decoding, "over": over, "at": at, "exponent": slope})
    return found
