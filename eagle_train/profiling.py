"""Profiles: what runs is recorded by torch.profiler, written as a Chrome trace, and told in figures (trace.py).

Knows nothing of what is profiled: whoever runs it names its stages by `stage`. DESIGN section 3.10.
"""

import gzip
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from eagle_train.ops.torch_private import all_threads
from eagle_train.results import write_bytes
from eagle_train.trace import COUNTS, GAPS, WINDOW, figures

_NOTHING = nullcontext()
_marked: Callable[[str], AbstractContextManager[Any]] | None = None  # a stage; None where nothing is profiled


def stage(name: str) -> AbstractContextManager[Any]:
    """A range of that name in the profile that is being recorded. Where none is, it does nothing, in 0.2 us."""
    marked = _marked  # another thread may set it
    return _NOTHING if marked is None else marked(name)


class Profile:
    """A recording of what runs on a device, `cpu` or `cuda`, between `start` and `stop`, on all threads.

    `memory`: the most bytes that tensors took on the GPU, by stage; empty on a CPU.
    """

    def __init__(self, device: str):
        self._is_gpu = device == "cuda"
        self.memory: dict[str, int] = {}
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell of each start and stop on stderr
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])]
        self._profile = profile(activities=activities, experimental_config=all_threads())
        self._window = record_function(WINDOW)
        self._events: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin, when the device has done all that it was given before."""
        self._profile.start()  # takes seconds at first
        self._wait()
        peaks = MemoryPeaks(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats, self.memory)
        _mark(peaks.stage if self._is_gpu else record_function)
        self._window.__enter__()

    def stop(self) -> None:
        """End, when the device has done all that it was given."""
        self._wait()
        self._window.__exit__(None, None, None)
        _mark(None)
        self._profile.stop()

    def write(self, path: Path) -> None:
        """Write the trace, for chrome://tracing and Perfetto, as JSON that gzip has packed; whole or not at all. Raises
        UserError where it cannot be written."""
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            text = trace.read_bytes()
        self._events = json.loads(text)["traceEvents"]
        write_bytes(path, gzip.compress(text))

    def figures(self, stages: Collection[str], unit: str, units: int, undisturbed: float) -> dict[str, Any]:
        """The figures of `units` rounds or steps (`trace.figures`), after `write`. `unit`: `round` or `step`, in the
        names of `rounds`, `round_ms` and of counts such as `kernels_per_round`.

        `undisturbed`: seconds of one of them where no profiler runs, which makes the host slower and a GPU wait. The
        kernels take as long, so `busy_undisturbed` is their time by these seconds; null on a CPU, whose operators are
        slower too.
        """
        found = figures(self._events, stages, units, is_view)
        share = found["device_ms"] / 1e3 / undisturbed if self._is_gpu else None
        names = {"units": f"{unit}s", "unit_ms": f"{unit}_ms", **{name: f"{name}_per_{unit}" for name in COUNTS}}
        named = {names.get(name, name): value for name, value in found.items()}
        return {**named, "undisturbed_ms": 1e3 * undisturbed, "busy_undisturbed": share}

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


def _mark(marked: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    global _marked
    _marked = marked


class MemoryPeaks:
    """Ranges that also note the most memory within them, in `found`; of nested ranges the innermost has it.

    `peak`: the most bytes since `reset`.
    """

    def __init__(self, peak: Callable[[], int], reset: Callable[[], None], found: dict[str, int]):
        self._peak, self._reset, self._found = peak, reset, found
        self._open: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A range of that name."""
        self._note()
        self._open.append(name)
        try:
            with record_function(name):
                yield
        finally:
            self._note()
            self._open.pop()

    def _note(self) -> None:
        """What was there since the last mark belongs to the range that is open."""
        if self._open:
            name = self._open[-1]
            self._found[name] = max(self._found.get(name, 0), self._peak())
        self._reset()


@cache
def is_view(name: str) -> bool | None:
    """Whether an operator (`aten::view`) returns a view of what it is given; None for a name that is no operator's."""
    space, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), own, None) if own.isidentifier() else None
    if packet is None:
        return None
    return any(getattr(packet, overload).is_view for overload in packet.overloads())


def text(found: Mapping[str, Any], title: str, unit: str) -> str:
    """Figures as lines to read. `unit`: as `Profile.figures` was given."""
    gaps, undisturbed, share = found["gaps"], found["undisturbed_ms"], found["busy_undisturbed"]
    busy = f"operators ran {found['busy']:.1%} of the time"
    if found["device"] == "cuda":
        busy = f"GPU busy {found['busy']:.1%} of the time, and copying {found['copying']:.1%}"
        busy += f"; without a profiler busy {share:.1%}"
    lengths = ", ".join(f"{gaps[name]:,} {name.replace('_', ' ')}" for name in GAPS)
    own = found[f"{unit}_ms"]
    return "\n".join(
        [
            f"{title}: {found[f'{unit}s']} {unit}s, each {own:.2f} ms profiled and {undisturbed:.2f} without",
            f"  {busy}",
            f"  {gaps['count']:,} gaps between them, {gaps['total_ms']:.2f} ms: {lengths}; the longest "
            f"{gaps['longest_ms']:.3f} ms",
            *_stage_lines(found, unit),
            *_operator_lines(found, unit),
        ]
    )


def _stage_lines(found: Mapping[str, Any], unit: str) -> Iterator[str]:
    """A table of the stages: the host's time and calls, and on a GPU its own time and kernels."""
    of_gpu = {"GPU ms": "device_ms", "kernels": "kernels", "launches": "launches"} if found["device"] == "cuda" else {}
    columns = {"host ms": "host_ms", **of_gpu, "operations": "operations", "with views": "operations_with_views"}
    whole = {"host_ms": found[f"{unit}_ms"], "device_ms": found["device_ms"]}
    whole |= {name: found[f"{name}_per_{unit}"] for name in COUNTS}
    yield f"  {'of a ' + unit:<14}" + "".join(f"{name:>12}" for name in columns)
    for name, row in [*found["stages"].items(), ("all", whole)]:
        yield f"  {name:<14}" + "".join(
            f"{row[key]:>12,.{2 if key.endswith('_ms') else 1}f}" for key in columns.values()
        )


def _operator_lines(found: Mapping[str, Any], unit: str) -> Iterator[str]:
    """A table of the most expensive operators."""
    what = "kernels" if found["device"] == "cuda" else "calls"
    yield f"  {'most expensive by their own time, of a ' + unit:<62}{what:>10}{'ms':>10}"
    for row in found["operators"]:
        yield f"  {row['name'][:60]:<62}{row['calls']:>10,.1f}{row['self_ms']:>10.3f}"
