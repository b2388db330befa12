"""What a Chrome trace of torch.profiler says: how busy the device was, its gaps, and the cost by stage and by operator.

Pure functions over the trace's events (a list of mappings, as JSON has them; times in microseconds). Nothing is
recorded here, see profiling.py.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WINDOW = "profiled"  # the name of the range around all that is looked at
REST = "rest"  # what is in no stage
MOST_EXPENSIVE = 10
COUNTS = ("kernels", "launches", "operations", "operations_with_views")
GAPS = {"below_10_us": 10.0, "below_100_us": 100.0, "below_1_ms": 1000.0, "longer": float("inf")}

_COPIES = ("gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Events = Iterable[Mapping[str, Any]]
Interval = tuple[float, float]
Place = tuple[Any, float]  # a thread, and a time on it


@dataclass(frozen=True)
class Span:
    """Something that ran from `start` to `end`, on a thread of the host or on a stream. `launch`: the number that a
    kernel shares with the call that launched it."""

    start: float
    end: float
    name: str
    thread: Any
    launch: int | None


def figures(
    events: Events, stages: Collection[str], units: int, is_view: Callable[[str], bool | None]
) -> dict[str, Any]:
    """The figures of `units` rounds or steps, which the range `WINDOW` is around.

    `stages`: names of ranges (`record_function`) within it; of nested ones the innermost counts. `is_view`: by an
    operator's name, whether it returns a view; None for what is no operator. Times are milliseconds of one unit, counts
    are per unit, but for `gaps`, which are those of the whole window.

    The device is the GPU if kernels ran, else the CPU, which is busy while an operator runs on any thread.
    `busy` and `copying` are shares of the window. A kernel belongs to the stage in which it was launched.
    `kernels`: those that ran; `launches`: calls that launched one, or a graph of many. `operations`: operators that
    Python or autograd called, without those that they call in turn; `operations_with_views` counts those too that
    compute nothing. `rest` is the time of the window's thread in no stage. `operators`: the most expensive by their own
    time, which is that of the kernels that they launched, or, without a GPU, that of the host without the operators
    within.
    """
    recorded = [event for event in events if event.get("ph") == "X"]
    window = next(iter(_spans(recorded, ("user_annotation",), {WINDOW})))
    ranges = _within(_spans(recorded, ("user_annotation",), set(stages)), window)
    operators = [span for span in _within(_spans(recorded, ("cpu_op",)), window) if _counts(span, is_view)]
    kernels = _within(_spans(recorded, ("kernel",)), window)
    places = {span.launch: (span.thread, span.start) for span in _spans(recorded, _LAUNCHES)}
    launched = [(kernel, places.get(kernel.launch, (None, kernel.start))) for kernel in kernels]
    owner = _Owners(ranges, window)
    whole = window.end - window.start
    busy = merged(kernels or operators)
    copies = _within(_spans(recorded, _COPIES), window)
    calls = outermost(operators, is_view)
    return {
        "device": "cuda" if kernels else "cpu",
        "units": units,
        "unit_ms": whole / units / 1e3,
        "device_ms": _length(busy) / units / 1e3,
        "busy": _length(busy) / whole,
        "copying": _length(merged(copies)) / whole,
        "gaps": gaps(busy),
        **_counted(launched, calls, units),
        "stages": _by_stage([*stages, REST], owner, launched, calls, units),
        "operators": _most_expensive(operators, launched, units),
    }


def merged(spans: Iterable[Span]) -> list[Interval]:
    """The intervals in which at least one span runs, in their order; none touches the next."""
    found: list[Interval] = []
    for span in sorted(spans, key=lambda each: each.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


def gaps(busy: Sequence[Interval]) -> dict[str, Any]:
    """The gaps between merged intervals: their number, milliseconds, the longest, and how many are how long."""
    lengths = [after[0] - before[1] for before, after in pairwise(busy)]
    counted = Counter(next(name for name, limit in GAPS.items() if length < limit) for length in lengths)
    return {
        "count": len(lengths),
        "total_ms": sum(lengths) / 1e3,
        "longest_ms": max(lengths, default=0.0) / 1e3,
        **{name: counted[name] for name in GAPS},
    }


def innermost(spans: Iterable[Span]) -> list[tuple[Interval, Span]]:
    """Spans of one thread, nested in one another, cut so that each moment belongs to the innermost; in their order."""
    parts: list[tuple[Interval, Span]] = []
    opened: list[Span] = []
    at = float("-inf")

    def cut(end: float) -> None:
        nonlocal at
        if end > at:
            parts.append(((at, end), opened[-1]))
            at = end

    def close(until: float) -> None:
        while opened and opened[-1].end <= until:
            cut(opened[-1].end)
            opened.pop()

    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        close(span.start)
        if opened:
            cut(span.start)
        at = span.start
        opened.append(span)
    close(float("inf"))
    return parts


def outermost(operators: Iterable[Span], is_view: Callable[[str], bool | None]) -> list[tuple[Span, bool]]:
    """The operators that no other one called, and whether each computes: it, or one that it calls, is no view."""
    found: list[tuple[Span, bool]] = []
    for theirs in _by_thread(operators).values():
        end = float("-inf")
        for span in sorted(theirs, key=lambda each: (each.start, -each.end)):
            computes = not is_view(span.name)
            if span.start >= end:
                found.append((span, computes))
                end = span.end
            elif computes:
                found[-1] = (found[-1][0], True)
    return found


class _Owners:
    """Whose a moment of a thread is: the innermost stage's that is open on it, else, for a thread that works for the
    window's (autograd's, a helper's), the stage's that is open there."""

    def __init__(self, ranges: Iterable[Span], window: Span):
        self.main, self.window = window.thread, window
        self.parts = {thread: innermost(theirs) for thread, theirs in _by_thread(ranges).items()}
        self._starts = {thread: [start for (start, _), _ in parts] for thread, parts in self.parts.items()}

    def __call__(self, place: Place) -> str:
        thread, time = place
        return self._at(thread, time) or self._at(self.main, time) or REST

    def _at(self, thread: Any, time: float) -> str | None:
        number = bisect_right(self._starts.get(thread, []), time) - 1
        if number < 0:
            return None
        (_, end), span = self.parts[thread][number]
        return span.name if time < end else None

    def host_us(self) -> dict[str, float]:
        """Microseconds of the host by stage, over all threads, and the window's thread's `REST`."""
        spent: dict[str, float] = defaultdict(float)
        for parts in self.parts.values():
            for (start, end), span in parts:
                spent[span.name] += end - start
        inside = sum(end - start for (start, end), _ in self.parts.get(self.main, []))
        return {**spent, REST: self.window.end - self.window.start - inside}


Launched = Sequence[tuple[Span, Place]]  # each kernel, with where it was launched
Calls = Sequence[tuple[Span, bool]]


def _counted(launched: Launched, calls: Calls, units: int) -> dict[str, Any]:
    """Kernels, launches and operations of one unit."""
    return {
        "kernels": len(launched) / units,
        "launches": len({kernel.launch for kernel, _ in launched}) / units,
        "operations": sum(computes for _, computes in calls) / units,
        "operations_with_views": len(calls) / units,
    }


def _by_stage(
    names: Iterable[str], owner: _Owners, launched: Launched, calls: Calls, units: int
) -> dict[str, dict[str, float]]:
    """Each stage's host time, device time and counts, of one unit."""
    host = owner.host_us()
    theirs: dict[str, list[tuple[Span, Any]]] = defaultdict(list)
    called: dict[str, list[tuple[Span, Any]]] = defaultdict(list)
    for kernel, place in launched:
        theirs[owner(place)].append((kernel, place))
    for call in calls:
        called[owner((call[0].thread, call[0].start))].append(call)
    return {
        name: {
            "host_ms": host.get(name, 0.0) / units / 1e3,
            "device_ms": _length(merged(span for span, _ in (theirs if launched else called)[name])) / units / 1e3,
            **_counted(theirs[name], called[name], units),
        }
        for name in names
    }


def _most_expensive(operators: Sequence[Span], launched: Launched, units: int) -> list[dict[str, Any]]:
    """By name, of one unit: calls and the host's own milliseconds, or, on a GPU, kernels and theirs."""
    parts = {thread: innermost(theirs) for thread, theirs in _by_thread(operators).items()}
    spent: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    if launched:
        starts = {thread: [start for (start, _), _ in theirs] for thread, theirs in parts.items()}
        for kernel, (thread, time) in launched:
            number = bisect_right(starts.get(thread, []), time) - 1
            inside = number >= 0 and time < parts[thread][number][0][1]
            name = parts[thread][number][1].name if inside else kernel.name  # of a graph, and of Triton's
            spent[name] += kernel.end - kernel.start
            counts[name] += 1
    else:
        counts.update(span.name for span in operators)
        for theirs in parts.values():
            for (start, end), span in theirs:
                spent[span.name] += end - start
    order = sorted(spent, key=lambda name: (-spent[name], name))[:MOST_EXPENSIVE]
    return [{"name": name, "calls": counts[name] / units, "self_ms": spent[name] / units / 1e3} for name in order]


def _spans(events: Events, categories: Collection[str], names: Collection[str] | None = None) -> Iterator[Span]:
    """The spans of these categories and, where they are given, names."""
    for event in events:
        if event.get("cat") in categories and (names is None or event["name"] in names):
            start, given = float(event["ts"]), event.get("args", {})
            yield Span(start, start + event["dur"], event["name"], event["tid"], given.get("correlation"))


def _within(spans: Iterable[Span], window: Span) -> list[Span]:
    """The parts of spans that lie within the window."""
    cut = (
        Span(max(each.start, window.start), min(each.end, window.end), each.name, each.thread, each.launch)
        for each in spans
    )
    return [each for each in cut if each.end > each.start]


def _counts(span: Span, is_view: Callable[[str], bool | None]) -> bool:
    return is_view(span.name) is not None


def _by_thread(spans: Iterable[Span]) -> dict[Any, list[Span]]:
    found: dict[Any, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.thread].append(span)
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
