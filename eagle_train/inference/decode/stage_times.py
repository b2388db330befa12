"""Wall time of a round's stages. Knows nothing of what they do."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimes:
    """Seconds spent in each stage so far, and how often it ran. On a GPU that is the time to launch it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.runs: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage; a block that raises is not counted."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
        self.runs[name] += 1

    def clear(self) -> None:
        """Start again from zero."""
        self.seconds.clear()
        self.runs.clear()
