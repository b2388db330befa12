"""A device's work that is recorded once and then replayed: one launch in the place of thousands. Paper section 3.4.

A recording is of fixed sizes and of fixed places in memory: what it reads is copied there first, and what it leaves is
overwritten by the next replay. Numbers that the host had while it was made are part of it. Knows no models.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle_train.errors import OptionError, one_line

Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""record(work) -> (its result, replay). `work` may be done several times, and must do the same each time. `replay`
writes the result's tensors anew; it may write to those of all else that the same `record` made, too."""


class CudaGraphs:
    """`Record` by CUDA graphs that share memory. Raises OptionError for work in which the host would wait."""

    def __init__(self, device: torch.device):
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            work()  # whatever is made or tuned at its first call must not be in the recording
            try:  # other threads may use the device meanwhile
                with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                    result = work()
            except RuntimeError as error:  # the end of a recording that failed fails too, and hides why
                why = one_line(error.__context__ or error)
                message = f"graphs: CUDA cannot record a round; give graphs=False, or a smaller kv_tokens: {why}"
                raise OptionError(message, "graphs", "kv_tokens") from error
        main.wait_stream(self.stream)
        return result, graph.replay


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
