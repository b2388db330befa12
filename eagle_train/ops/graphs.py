"""A device's work that is recorded once and then replayed: one launch in the place of thousands. Paper section 3.4.

A recording is of fixed sizes and of fixed places in memory: what it reads is copied there first, and what it leaves is
overwritten by the next replay. Numbers that the host had while it was made are part of it. Knows no models.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eagle_train.errors import OptionError, one_line


class Record(Protocol):
    """Records work. It may be done several times, and must do the same each time."""

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Its result, and a function that replays it: it writes the result's tensors anew, and maybe those of all else
        that the same `Record` made."""

    def pause(self, task: Callable[[], None]) -> None:
        """Called by `work`: when a replay comes to this place, the host does `task`, which may wait for the device and
        write to tensors that the rest of the work reads."""


class CudaGraphs:
    """`Record` by CUDA graphs that share memory. Raises OptionError for work in which the host would wait."""

    def __init__(self, device: torch.device):
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._parts: list[Callable[[], None]] | None = None  # of what is being recorded: graphs and the host's tasks
        self._graph = torch.cuda.CUDAGraph()  # that is being recorded

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream), _nothing_collected():
            work()  # whatever is made or tuned at its first call must not be in the recording
            torch.cuda.synchronize(self.stream.device)
            torch.cuda.empty_cache()
            parts = self._parts = []
            self._begin()
            try:
                try:
                    result = work()
                finally:
                    self._end()
            except RuntimeError as error:  # the end of a recording that failed fails too, and hides why
                why = one_line(error.__context__ or error)
                message = f"graphs: CUDA cannot record a round; give graphs=False, or a smaller kv_tokens: {why}"
                raise OptionError(message, "graphs", "kv_tokens") from error
            finally:
                self._parts = None
        main.wait_stream(self.stream)
        return result, parts[0] if len(parts) == 1 else lambda: _do(parts)

    def pause(self, task: Callable[[], None]) -> None:
        if self._parts is not None:
            self._end()
            self._parts.append(task)
            self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self.pool, capture_error_mode="thread_local")  # other threads may use the device

    def _end(self) -> None:
        assert self._parts is not None
        self._graph.capture_end()
        self._parts.append(self._graph.replay)


def _do(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python collects no garbage meanwhile. There may be graphs among it, of an engine that nobody has any more, and
    CUDA refuses to destroy a graph while another one is recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Padded:
    """A tensor as the corner, from index 0 on, of one that has this shape and is `fill` elsewhere."""

    corner: torch.Tensor
    shape: tuple[int, ...]
    fill: int = 0


class Recording:
    """A function of tensors, recorded with tensors of its own."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Padded], record: Record):
        self.function = function  # what it refers to must live as long as the recording
        self.inputs = [x.corner.new_empty(x.shape) for x in inputs]
        self.corners: list[torch.Size | None] = [None] * len(inputs)
        self.copy(inputs)
        self.result, self.replay = record(lambda: function(*self.inputs))

    def __call__(self, inputs: Sequence[Padded]) -> Any:
        """What the function gives for these; to be read before anything is replayed that shares its memory."""
        self.copy(inputs)
        self.replay()
        return self.result

    def copy(self, inputs: Sequence[Padded]) -> None:
        for place, (own, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if self.corners[place] != given.corner.shape:
                self.corners[place] = given.corner.shape
                own.fill_(given.fill)
            own[tuple(map(slice, given.corner.shape))] = given.corner


class Recordings:
    """Functions that are recorded under keys. They share memory."""

    def __init__(self, record: Record):
        self.record, self.made = record, dict[Hashable, Recording]()

    def add(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Padded]) -> None:
        """Record `function` of tensors of the inputs' padded shapes, once for each key."""
        if key not in self.made:
            self.made[key] = Recording(function, inputs, self.record)

    def __call__(self, key: Hashable, inputs: Sequence[Padded]) -> Any:
        """What the function of this key gives for these, as `Recording` does."""
        return self.made[key](inputs)
