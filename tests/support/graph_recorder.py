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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from eagle_train.inference import Engine
from eagle_train.inference.parts import record
from tests.support.inside import inside, runner_of

ASKING = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount", "_unique2"}
REFUSED = ASKING | {"lift_fresh"}  # which makes a tensor of numbers
BY_THE_HOST = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class NoWaiting(TorchDispatchMode):
    """Refuses what would have the host wait for a device: values that are asked for, shapes that hang on values, and
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

    with patch.multiple(torch.Tensor, **{name: refusing(name) for name in BY_THE_HOST}), NoWaiting():
        yield


class Tape(NoWaiting):
    """The operations that ran."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple[Callable[[], Any], list[torch.Tensor | None]]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = super().__torch_dispatch__(function, types, arguments, options)
        given = {memory(x) for x in leaves((arguments, options))}
        made = [None if memory(x) in given else x for x in leaves(result)]  # or a view, or written in place
        self.operations.append((partial(function, *arguments, **(options or {})), made))
        return result

    def replay(self) -> None:
        for operation, made in self.operations:
            for old, new in zip(made, leaves(operation()), strict=True):
                if old is not None:
                    old.copy_(new)

    def spoil(self) -> None:
        """Nothing is left in the memory that it took."""
        for tensor in (x for _, made in self.operations for x in made if x is not None):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def leaves(result: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


class Recorder:
    """What `CudaGraphs` is on a GPU."""

    def __init__(self) -> None:
        self.last: Tape | None = None
        self.replays = 0

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        work()
        tape = Tape()
        with no_values(), tape:
            result = work()
        return result, partial(self.replay, tape)

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
