"""Wall time of a round's stages. Knows nothing of what they do."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimes:
    """Wall seconds and number of runs by stage. On a GPU the time is that of launching the work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.runs: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of a `with` block to a stage; one that raises is not counted."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
        self.runs[name] += 1

    def clear(self) -> None:
        """Start again from zero."""
        self.seconds.clear()
        self.runs.clear()
