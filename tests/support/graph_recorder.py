"""A recorder in the place of CUDA graphs, for a CPU: the operations themselves, replayed on the tensors they had.

It is as strict as they are. Whatever asks for a tensor's values cannot be recorded; numbers of the host stay what they
were; nothing of a recording but its inputs and results may be relied on; and a replay overwrites the results of all
recordings of the same recorder.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from eagle_train.inference import Engine
from eagle_train.inference.parts import record
from tests.support.inside import inside, runner_of

ASKING = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount", "_unique2"}
REFUSED = ASKING | {"lift_fresh"}  # which makes a tensor of numbers
BY_RANKS = ("DTensor", "AsyncCollectiveTensor")
BY_THE_HOST = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class NoWaiting(TorchDispatchMode):
    """Refuses what would have the host wait for a device: values that are asked for, shapes that depend on values, and
    numbers of the host's other than by `to_device`."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        assert name not in REFUSED, name
        if name in ("index", "index_put_", "_unsafe_index"):
            assert not any(x is not None and x.dtype == torch.bool for x in arguments[1]), "an index of bools"
        return function(*arguments, **(options or {}))


@contextmanager
def no_values():
    """Nor may the host read a tensor that lies in its own memory, which no operation shows under inference mode. Other
    threads, which draw batches, say, may."""
    here = threading.get_ident()

    def refusing(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def refuse(*arguments, **options):
            assert threading.get_ident() != here, f"the host waits: {name}"
            return read(*arguments, **options)

        return refuse

    reads = {name: refusing(name) for name in BY_THE_HOST}
    with patch.multiple(torch.Tensor, __setitem__=set_item, **reads), NoWaiting():
        yield


SET_ITEM = torch.Tensor.__setitem__


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """A number where a mask says so: of a GPU's tensor this is `masked_fill`, and no tensor is made of the number."""
    mask, *rest = index if isinstance(index, tuple) else (index,)
    is_mask = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and isinstance(value, int | float)
    if is_mask and all(isinstance(each, slice) and each == slice(None) for each in rest):
        tensor.masked_fill_(mask.view(*mask.shape, *[1] * (tensor.ndim - mask.ndim)), value)
    else:
        SET_ITEM(tensor, index, value)


class Tape(NoWaiting):
    """The operations that ran."""

    def __init__(self):
        super().__init__()
        # with what each makes; None: a task of the host's, in a pause
        self.operations: list[tuple[Callable[[], Any], list[torch.Tensor | None] | None]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if any(kind.__name__ in BY_RANKS for kind in types):
            return NotImplemented  # they come back with the operations on this rank's part
        result = super().__torch_dispatch__(function, types, arguments, options)
        if any(type(x).__name__ in BY_RANKS for x in leaves(result)):
            return result  # a wrapper about what is under way
        given = {memory(x) for x in leaves((arguments, options))}
        made = [None if memory(x) in given else x for x in leaves(result)]  # or a view, or written in place
        self.operations.append((partial(function, *arguments, **(options or {})), made))
        return result

    def replay(self) -> None:
        for operation, made in self.operations:
            result = operation()
            if made is None:
                continue
            wait_for_ranks(operation.func, result)
            for old, new in zip(made, leaves(result), strict=True):
                if old is not None:
                    old.copy_(new)

    def spoil(self) -> None:
        """Nothing is left in the memory that it took."""
        for tensor in (x for _, made in self.operations for x in made or () if x is not None):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)


def wait_for_ranks(function: Callable[..., Any], result: Any) -> None:
    """Until what ranks sum, gather or send has come."""
    for work in (x for x in tree_leaves(result) if isinstance(x, torch.ScriptObject)):
        Work.unbox(work).wait()
    if function.namespace == "_c10d_functional":
        for tensor in leaves(result):
            torch.ops._c10d_functional.wait_tensor(tensor)


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def leaves(result: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


class Recorder:
    """What `CudaGraphs` is on a GPU."""

    def __init__(self) -> None:
        self.last: Tape | None = None
        self.recorded: Tape | None = None  # now
        self.replays = 0

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        work()
        tape = self.recorded = Tape()
        with no_values(), tape:
            result = work()
        self.recorded = None
        return result, partial(self.replay, tape)

    def pause(self, task: Callable[[], None]) -> None:
        if self.recorded is not None:
            self.recorded.operations.append((task, None))

    def replay(self, tape: Tape) -> None:
        self.replays += 1
        with _disable_current_modes():  # the host launches one thing
            if self.last is not None:
                self.last.spoil()
            tape.replay()
        self.last = tape


def recorded(engine: Engine) -> Engine:
    """The engine with its rounds recorded, as one on a GPU has them."""
    record(runner_of(engine), inside(engine).memory, engine.dispatcher, Recorder)
    return engine
